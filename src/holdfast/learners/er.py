"""Experience replay: stored samples join the current minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.augment import View
from holdfast.buffer import Reservoir
from holdfast.config import RunConfig
from holdfast.learners.base import LEARNERS, Learner, Loss, Losses, Parts, refuse_options
from holdfast.learners.checks import check_sizes, check_weights
from holdfast.learners.descent import Optimizer, Scheduler
from holdfast.nested import Nested, concat, rows, split, transform

__all__ = ["ExperienceReplay"]


@LEARNERS.register("er", "experience replay")
class ExperienceReplay(Learner):
    """One pass over the minibatch and a draw from the buffer together; mean cross-entropy over both.

    loss = (B * CE(minibatch) + alpha * R * CE(draw)) / (B + R), with B samples observed and R drawn

    A `loss` given instead of cross-entropy, or cross-entropy with `class_weights`, takes the place of CE: each is a
    mean over its part, and the parts count by their sizes. Unlike in `ConsistencyReplay`, the two share BatchNorm
    statistics: they are one batch. `replay_size` is how many samples are drawn a step (as many as observed, if None).
    Stored inputs are augmented anew for every draw. `storage` says where stored samples are: in the memory of the
    "device" or the "host", or in files in a folder (a Path). `Learner` says what the other options do.
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
        loss: Loss | None = None,
        class_weights: Tensor | Sequence[float] | None = None,
        clip: float | None = None,
        scheduler: Scheduler | None = None,
        head: str | None = None,
        precision: str = "float32",
        validate: bool = True,
        seed: int = 0,
        generator: torch.Generator | None = None,
        storage: str | Path = "device",
    ) -> None:
        super().__init__(
            model,
            optimizer,
            augment=augment,
            loss=loss,
            class_weights=class_weights,
            clip=clip,
            scheduler=scheduler,
            head=head,
            precision=precision,
            validate=validate,
            seed=seed,
        )
        check_weights(alpha=alpha)
        check_sizes(replay_size=replay_size)
        self.alpha, self.replay_size = alpha, replay_size
        self.buffer = self.reserve(buffer_size, seed, generator, storage)

    @classmethod
    def from_config(cls, config: RunConfig, parts: Parts) -> Self:
        """The learner of a run."""
        assert config.buffer_size is not None
        refuse_options(config)
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

    def observe(self, x: Nested, y: Nested) -> Losses:
        """One step on the minibatch and a draw from the buffer; then the minibatch is offered to the buffer."""
        x, y = self.receive(x, y)
        inputs, targets, observed = x, y, rows(y)
        if not self.buffer.stored:
            self.check_offer(x, y)
            inputs = transform(torch.clone, x)  # a draw makes a copy as well: augment or the model may work in place
        else:
            drawn = self.buffer.sample(self.replay_size or observed)
            if drawn.logits is not None:  # of another learner, in a folder it left
                self.check_offer(x, y)
            inputs, targets = concat([x, drawn.x]), concat([y, drawn.y])
        outputs = self.forward(self.augment(inputs))
        self.check_labels(y, outputs)
        losses = self.objective(outputs, targets, observed)
        self.descend(losses.total)
        self.buffer.add(x, y)
        return losses.detach()

    def objective(self, outputs: Tensor, targets: Nested, observed: int) -> Losses:
        """The loss with its terms; the first `observed` rows are the minibatch, the others replayed."""
        if self.loss is not None or self.class_weights is not None:
            return self._weigh(split(outputs, sizes := [observed, len(outputs) - observed]), split(targets, sizes))
        logs = outputs.log_softmax(dim=1)
        if self.alpha == 1:
            loss = F.nll_loss(logs, targets)
        else:
            weights = torch.full_like(targets, 1 / len(targets), dtype=logs.dtype)
            weights[observed:] *= self.alpha
            loss = F.nll_loss(logs, targets, reduction="none") @ weights
        # The terms once again, apart from the loss: a gradient through slices costs more than that.
        now, then = logs.detach()[:observed], logs.detach()[observed:]
        replay = F.nll_loss(then, targets[observed:]) if len(then) else self._zero
        return Losses(loss, F.nll_loss(now, targets[:observed]), replay, self._zero)

    def _weigh(self, outputs: list[Tensor], targets: list[Nested]) -> Losses:
        """The loss from its mean over the minibatch and over the draw."""
        (observed, replayed), current = map(len, outputs), self.criterion(outputs[0], targets[0])
        if not replayed:
            return Losses(current, current, self._zero, self._zero)
        replay = self.criterion(outputs[1], targets[1])
        loss = (observed * current + self.alpha * replayed * replay) / (observed + replayed)
        return Losses(loss, current, replay, self._zero)
