"""Experience replay: stored samples join the current minibatch."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.augment import View
from holdfast.buffer import Reservoir
from holdfast.config import RunConfig
from holdfast.learners.base import LEARNERS, Learner, Losses, Parts, check_sizes, check_weights
from holdfast.learners.descent import Optimizer
from holdfast.nested import Nested, concat

__all__ = ["ExperienceReplay"]


@LEARNERS.register("er", "experience replay")
class ExperienceReplay(Learner):
    """One pass over the minibatch and a draw from the buffer together; mean cross-entropy over both.

    Unlike in `ConsistencyReplay`, the two share BatchNorm statistics: they are one batch. `alpha` weighs the replayed
    part; `replay_size` is how many samples are drawn a step (as many as observed, if None); `augment` turns stored
    inputs into what the network sees, anew for every draw. `storage` says where stored samples are: in the memory of
    the "device" or the "host", or in files in a folder (a Path).
    """

    compilable = ("objective",)
    buffer: Reservoir

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        buffer_size: int,
        alpha: float = 1.0,
        replay_size: int | None = None,
        augment: View | None = None,
        precision: str = "float32",
        validate: bool = True,
        seed: int = 0,
        generator: torch.Generator | None = None,
        storage: str | Path = "device",
    ) -> None:
        super().__init__(model, optimizer, augment=augment, precision=precision, validate=validate)
        check_weights(alpha=alpha)
        check_sizes(replay_size=replay_size)
        self.alpha, self.replay_size = alpha, replay_size
        self.buffer = self.reserve(buffer_size, seed, generator, storage)

    @classmethod
    def from_config(cls, config: RunConfig, parts: Parts) -> Self:
        """The learner of a run."""
        assert config.buffer_size is not None
        return cls(
            parts.model,
            parts.optimizer,
            buffer_size=config.buffer_size,
            alpha=config.alpha,
            replay_size=config.replay_size,
            augment=parts.view,
            precision=config.precision,
            validate=False,
            generator=parts.generator,
        )

    def observe(self, x: Nested, y: Tensor) -> Losses:
        """One step on the minibatch and a draw from the buffer; then the minibatch is offered to the buffer."""
        x, y = self.receive(x, y)
        inputs, labels = x, y
        if self.buffer.stored:
            drawn = self.buffer.sample(self.replay_size or len(y))
            inputs, labels = concat([x, drawn.x]), torch.cat([y, drawn.y])
        logits = self.forward(self.augment(inputs))
        self.check_labels(y, logits)
        losses = self.objective(logits, labels, len(y))
        self.descend(losses.total)
        self.buffer.add(x, y)
        return losses.detach()

    def objective(self, logits: Tensor, labels: Tensor, observed: int) -> Losses:
        """The loss with its terms; the first `observed` rows are the minibatch, the others replayed."""
        each = F.cross_entropy(logits, labels, reduction="none")
        current, replayed = each[:observed], each[observed:]
        loss = (current.sum() + self.alpha * replayed.sum()) / len(each)
        return Losses(loss, current.mean(), replayed.mean() if len(replayed) else self._zero, self._zero)
