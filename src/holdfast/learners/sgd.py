"""The two baselines without a memory: learning on as if nothing were lost, and learning everything at once."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from holdfast.config import RunConfig
from holdfast.learners.base import LEARNERS, Learner, Losses, Parts, refuse_options
from holdfast.nested import Nested

__all__ = ["Joint", "Sgd"]


@LEARNERS.register("sgd", "plain training on the stream: the lower bound")
class Sgd(Learner):
    """Cross-entropy, or the loss given instead, on what comes in, nothing else."""

    compilable = ("objective",)

    @classmethod
    def from_config(cls, config: RunConfig, parts: Parts) -> Self:
        """The learner of a run."""
        refuse_options(config)
        return cls(parts.model, parts.optimizer, augment=parts.view, precision=config.precision, validate=False)

    def observe(self, x: Nested, y: Nested) -> Losses:
        """One step on the minibatch alone."""
        x, y = self.receive(x, y)
        logits = self.forward(self.view(x))
        self.check_labels(y, logits)
        losses = self.objective(logits, y)
        self.descend(losses.total)
        return losses.detach()

    def objective(self, logits: Tensor, y: Nested) -> Losses:
        """The loss."""
        loss = self.criterion(logits, y)
        return Losses(loss, loss, self._zero, self._zero)


@LEARNERS.register("joint", "training on all tasks at once: the upper bound")
class Joint(Sgd):
    """Plain training on the data of all tasks together."""

    all_at_once = True
