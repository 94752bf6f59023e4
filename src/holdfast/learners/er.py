"""Experience replay: stored samples join the current minibatch."""

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.config import RunConfig
from holdfast.learners.losses import Losses
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions, check_weights
from holdfast.learners.replay import ReplayLearner
from holdfast.learners.scores import Reading
from holdfast.methods import LEARNERS
from holdfast.nested import Nested, rows, split
from holdfast.pure import pure

__all__ = ["ExperienceReplay"]


@LEARNERS.register("er", "experience replay")
class ExperienceReplay(ReplayLearner):
    """One pass over the minibatch and a draw from the buffer together; mean cross-entropy over both.

    loss = (B * CE(minibatch) + alpha * R * CE(draw)) / (B + R), with B samples observed and R drawn

    A `loss` given in place of cross-entropy, or cross-entropy with `class_weights`, takes the place of CE: each is a
    mean over its part, and the parts count by their sizes; with `class_dim`, B and R are supervised positions. Unlike
    in `ConsistencyReplay`, the two share BatchNorm statistics: they are one batch. Stored inputs are augmented anew for
    every draw.

    Options of this learner:

    - alpha: weight of the replayed samples. Default: 1.
    """

    passes = ((1, 1), (2, 1))
    terms = ("current", "replay")
    learns_mixtures = True
    takes_positions = True

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, alpha: float = 1.0, **shared: Unpack[ReplayOptions]
    ) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(alpha=alpha)
        self.alpha = alpha

    @classmethod
    def arguments(cls, config: RunConfig) -> dict[str, Any]:
        """The weight is that of a run's replayed samples."""
        return {**super().arguments(config), "alpha": config.alpha}

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """The mean over the minibatch and a draw."""
        draws = [self.draw(y)] if self.buffer.stored else []
        x, y, draws = self.align(x, y, *draws)
        plan = self.plan(x, y)
        view, wanted = self.show([x, *(each.x for each in draws)], [y, *(each.y for each in draws)])
        outputs = self.forward(view)
        self.check_labels(y, outputs)
        total, *terms = self.objective(outputs, wanted, rows(y))
        return Losses(total, offer=self.offer(x, y, outputs, plan), **dict(zip(self.terms, terms, strict=False)))

    @pure
    def objective(self, outputs: Tensor, targets: Nested, observed: int) -> tuple[Tensor, ...]:
        """The loss, its term for the first `observed` rows, and its term for the replayed rows if there are any."""
        replayed = len(outputs) - observed
        plain = self.loss is None and self.class_weights is None and self.positions is None
        if not plain or self.changes_targets:
            return self._weighed(outputs, targets, observed)
        logs = outputs.log_softmax(dim=1)
        if self.alpha == 1:
            loss = F.nll_loss(logs, targets)
        else:
            weights = torch.full_like(targets, 1 / len(targets), dtype=logs.dtype)
            weights[observed:] *= self.alpha
            loss = F.nll_loss(logs, targets, reduction="none") @ weights
        # The terms are computed apart from the loss: a gradient through slices costs more than that.
        now, then = logs.detach()[:observed], logs.detach()[observed:]
        current = F.nll_loss(now, targets[:observed])
        return (loss, current, F.nll_loss(then, targets[observed:])) if replayed else (loss, current)

    def _weighed(self, outputs: Tensor, targets: Nested, observed: int) -> tuple[Tensor, ...]:
        """The loss from its mean over the minibatch and over the draw."""
        sizes = [observed, len(outputs) - observed]
        wanted = split(targets, sizes)
        if self.positions is not None and self.loss is None:
            current, replay = Reading(self.positions, outputs, targets, observed, self.class_weights).losses()
        else:
            now, then = split(outputs, sizes)
            current = replay = self.criterion(now, wanted[0])
            if sizes[1]:
                replay = self.criterion(then, wanted[1])
        if not sizes[1]:
            return current, current
        first, others = sizes if self.positions is None else map(self.positions.weight, wanted)
        return (first * current + self.alpha * others * replay) / (first + others), current, replay
