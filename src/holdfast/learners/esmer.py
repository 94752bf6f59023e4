"""ESMER: samples of which the averaged network is unsure count less and are not stored.

Sarfraz, Arani, Zonooz, "Error Sensitivity Modulation based Experience Replay: Mitigating Abrupt Representation Drift in
Continual Learning", ICLR 2023.
"""

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.errors import UsageError
from holdfast.learners.averages import averaged, follow, keep_mode
from holdfast.learners.losses import Losses, Offer
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions, check_counts, check_shares, check_weights
from holdfast.learners.replay import ReplayLearner
from holdfast.methods import LEARNERS
from holdfast.nested import Nested, transform
from holdfast.rng import generator

__all__ = ["Esmer"]


@LEARNERS.register("esmer", "ESMER: replay; samples with a large error count less and are not stored")
class Esmer(ReplayLearner):
    """Replay and consistency with a stable average of the network, which also judges each sample of the minibatch.

    loss = mean of w_i CE(sample i) + CE(draw) + consistency * MSE(outputs now, outputs of the average; draw)

    s_i is the average's cross-entropy on sample i, and m the running mean of it. w_i = m / s_i where s_i >= loss_margin
    * m, else 1; samples with s_i > loss_margin * m are not offered to the buffer. m follows the mean of the minibatch's
    s_i that exceed their mean by no more than `deviations` standard deviations. The average moves as in CLS-ER, stays
    in training mode, and is evaluated.

    How many samples are offered depends on their values, so steps are not captured in CUDA graphs.

    Options of this learner:

    - consistency: weight of the consistency term. Default: 0.15.
    - decay: how slowly the average moves, 0 to 1. Default: 0.999.
    - rate: how often the average moves, as a share of the steps. Default: 0.1.
    - loss_margin: which multiple of the running mean makes an error large. Default: 1.
    - loss_decay: how slowly the running mean moves, 0 to 1. Default: 0.99.
    - deviations: errors above the minibatch's mean by so many standard deviations are left out of the mean. Default: 1.
    - warmup: steps at the beginning of a task in which nothing is stored and the mean stays, where a stream has
        boundaries. Default: 0.
    """

    capturable = False
    grows = False
    own_state = ("stable", "mean", "updates", "warming", "generator")
    terms = ("current", "replay", "consistency", "stable")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        consistency: float = 0.15,
        decay: float = 0.999,
        rate: float = 0.1,
        loss_margin: float = 1.0,
        loss_decay: float = 0.99,
        deviations: float = 1.0,
        warmup: int = 0,
        **shared: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(consistency=consistency, loss_margin=loss_margin, deviations=deviations)
        check_counts(0, warmup=warmup)
        if self.loss is not None or self.class_weights is not None:
            raise UsageError("ESMER weighs cross-entropy by itself: leave out loss= and class_weights=.")
        check_shares(decay=decay, rate=rate, loss_decay=loss_decay)
        self.consistency, self.decay, self.rate = consistency, decay, rate
        self.loss_margin, self.loss_decay, self.deviations, self.warmup = loss_margin, loss_decay, deviations, warmup
        self.stable = averaged(self.model)
        self.updates, self.warming = (torch.zeros((), dtype=torch.int64) for _ in range(2))
        self.mean = torch.zeros((), dtype=torch.float64, device=self.device)
        self.generator = generator(self.seed, "averages")

    def begin_task(self, classes: tuple[int, ...]) -> None:
        """Store nothing for some steps: the average knows nothing of the task yet."""
        self.warming.fill_(self.warmup)

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """The weighted loss of the minibatch, and on a draw the loss and the distance from the average."""
        keep_mode(self.model, self.stable)
        view = self.view(x)
        judged = transform(torch.clone, view)  # each network has its own: it may work in place
        outputs = self.forward(view)
        self.check_labels(y, outputs)
        with torch.no_grad():
            errors = F.cross_entropy(self.forward(judged, self.stable), y, reduction="none")
        limit, mean = self.loss_margin * self.mean, self.mean.to(errors.dtype)
        weights = torch.where((self.mean > 0) & (errors >= limit), mean / errors, 1.0)
        current = (weights * F.cross_entropy(outputs, y, reduction="none")).mean()
        terms = {"current": current, "stable": self._usual(errors)}
        offer = self._small_errors(x, y, (self.mean == 0) | (errors <= limit))
        if self.buffer.stored < 2:  # BatchNorm refuses a draw of one, and as few may pass the limit in a step
            return Losses(current, offer=offer, **terms)
        drawn = self.draw(y)
        replayed = self.view(drawn.x)
        with torch.no_grad():
            target = self.forward(transform(torch.clone, replayed), self.stable)
        now = self.forward(replayed)
        replay, distance = F.cross_entropy(now, drawn.y), F.mse_loss(now, target)
        total = current + replay + self.consistency * distance
        return Losses(total, offer=offer, replay=replay, consistency=distance, **terms)

    def _usual(self, errors: Tensor) -> Tensor:
        """The mean of the errors without those that are unusually large."""
        if len(errors) == 1:
            return errors[0]
        limit = errors.mean() + self.deviations * errors.std()
        # Rounding may put the mean of equal errors below all of them.
        return errors[errors <= limit.clamp(min=errors.min())].mean()

    def _small_errors(self, x: Nested, y: Tensor, small: Tensor) -> Offer | None:
        """The samples whose error is small, if there are any and they may be stored."""
        if self.warming > 0 or not bool(small.any()):
            return None
        return Offer(transform(lambda part: part[small], x), y[small])

    @torch.no_grad()
    def commit(self, losses: Losses) -> None:
        """Offer samples to the buffer; let the average follow the network, and the mean the errors."""
        super().commit(losses)
        self.updates += 1
        limit = 1 - 1 / (int(self.updates) + 1)
        if float(torch.rand((), generator=self.generator)) < self.rate:
            follow(self.stable, self.model, torch.tensor(1 - min(limit, self.decay), device=self.device))
        if self.warming > 0:
            self.warming -= 1
        else:
            self.mean.lerp_(losses.stable.to(self.mean.dtype), 1 - min(limit, self.loss_decay))

    def evaluated(self) -> nn.Module:
        """The average."""
        return self.stable
