"""CLS-ER: two slow averages of the network, whose answers on stored samples it is held to.

Arani, Sarfraz, Zonooz, "Learning Fast, Learning Slow: A General Continual Learning Method based on Complementary
Learning System", ICLR 2022.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.errors import UsageError
from holdfast.learners.averages import averaged, follow, keep_mode, pace
from holdfast.learners.losses import Losses
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions, check_shares, check_weights
from holdfast.learners.replay import ReplayLearner
from holdfast.methods import LEARNERS
from holdfast.nested import Nested, concat, transform
from holdfast.rng import generator

__all__ = ["ClsEr"]


@LEARNERS.register("clser", "CLS-ER: replay, held to the better of two averaged networks")
class ClsEr(ReplayLearner):
    """Replay with a consistency term against a plastic and a stable average of the network.

    loss = CE(minibatch and draw) + consistency * MSE(outputs now, outputs of the better average; draw)

    For each drawn sample, the better average is the one that gives its label the higher probability. After a step,
    each average moves towards the network with its own probability: w <- d * w + (1 - d) * network, where d is its
    decay, at first limited to 1 - 1/step. The averages stay in training mode and see drawn samples only; the stable one
    is evaluated.

    Options of this learner:

    - consistency: weight of the consistency term. Default: 0.1.
    - stable_decay, plastic_decay: how slowly each average moves, 0 to 1. Default: 0.999 both.
    - stable_rate, plastic_rate: how often each average moves, as a share of the steps. Default: 0.1 and 0.3.
    """

    passes = ((1, 1), (2, 1))
    terms = ("current", "consistency")
    grows = False
    own_state = ("stable", "plastic", "updates", "generator")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        consistency: float = 0.1,
        stable_decay: float = 0.999,
        plastic_decay: float = 0.999,
        stable_rate: float = 0.1,
        plastic_rate: float = 0.3,
        **shared: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(consistency=consistency)
        self.consistency = consistency
        self.averages = {"stable": (stable_decay, stable_rate), "plastic": (plastic_decay, plastic_rate)}
        for name, (decay, rate) in self.averages.items():
            check_shares(**{f"{name}_decay": decay, f"{name}_rate": rate})
        self.stable, self.plastic = (averaged(self.model) for _ in self.averages)
        self.updates = torch.zeros((), dtype=torch.int64, device=self.device)
        self.generator = generator(self.seed, "averages", self.device)

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """Cross-entropy of the minibatch and a draw together, and the distance to the better average on the draw."""
        if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.dim() != 1:
            self.refuse(UsageError("CLS-ER asks its averages for the probability of a label: targets must be labels."))
        if not self.buffer.stored:
            return self.losses_alone(x, y)
        keep_mode(self.model, self.stable, self.plastic)
        x, y, (drawn,) = self.align(x, y, self.draw(y))
        view, replayed = self.view(x), self.view(drawn.x)
        both = concat([view, replayed])
        steady = [transform(torch.clone, replayed) for _ in self.averages]  # each network may work in place on its own
        consistency = F.mse_loss(self.forward(replayed), self._better(steady, drawn.y))
        outputs = self.forward(both)
        self.check_labels(y, outputs)
        current = self.criterion(outputs, concat([y, drawn.y]))
        total = current + self.consistency * consistency
        return Losses(total, current=current, consistency=consistency, offer=self.offer(x, y, outputs))

    @torch.no_grad()
    def _better(self, views: Sequence[Nested], labels: Tensor) -> Tensor:
        """For each sample, the outputs of the average that is surer of its label, (B, C); a copy of the view each."""
        stable, plastic = map(self.forward, views, (self.stable, self.plastic))
        sure = [each.softmax(1).gather(1, labels[:, None]) for each in (stable, plastic)]
        return torch.where(sure[0] > sure[1], stable, plastic)

    def commit(self, losses: Losses) -> None:
        """Offer the minibatch to the buffer, and let the averages follow the network."""
        super().commit(losses)
        self.updates += 1
        chances = torch.rand(2, generator=self.generator, device=self.device)
        for chance, (name, (decay, rate)) in zip(chances.unbind(), self.averages.items(), strict=True):
            # A weight of 0 in place of a branch: a captured step always executes the same operations.
            follow(getattr(self, name), self.model, torch.where(chance < rate, pace(self.updates, decay), 0.0))

    def evaluated(self) -> nn.Module:
        """The stable average."""
        return self.stable
