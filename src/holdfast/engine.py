"""How a step is executed: eager on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holdfast.data import ImageSet
from holdfast.errors import TrainingError, UsageError
from holdfast.learners import Learner, Losses

__all__ = ["Engine", "LossLog"]


class LossLog:
    """The loss terms of the last steps, kept on the device and read every `interval` steps in one go.

    A loss that is not finite is therefore noticed at the next reading, with the exact step at which it arose.
    """

    def __init__(self, device: torch.device, interval: int) -> None:
        self.interval = interval
        self.steps = 0
        self._rows = torch.zeros(interval, len(Losses._fields), device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)

    def record(self, losses: Losses) -> None:
        """Keep one step's terms. Device work only, so that it can be part of a captured step."""
        self._rows.index_copy_(0, self._at, torch.stack(losses)[None])
        self._at.add_(1).remainder_(self.interval)

    def due(self) -> bool:
        """Whether the log is full and waits to be read."""
        return self.steps % self.interval == 0

    def read(self) -> dict[str, float]:
        """Mean of each term since the last reading; raises if one was not finite. Waits for the device."""
        fresh = (self.steps - 1) % self.interval + 1 if self.steps else 0
        rows = self._rows[:fresh].tolist()
        for offset, row in enumerate(rows):
            if not all(map(math.isfinite, row)):
                terms = ", ".join(f"{name} {value:.4g}" for name, value in zip(Losses._fields, row, strict=True))
                raise TrainingError(
                    f"the loss is no longer finite at step {self.steps - fresh + offset + 1} ({terms}). "
                    "Try a smaller learning rate."
                )
        means = [sum(column) / fresh for column in zip(*rows, strict=True)] if fresh else []
        return dict(zip(Losses._fields, means, strict=False))


class Engine:
    """Executes the steps of one run."""

    def __init__(self, learner: Learner, device: torch.device, *, interval: int = 50) -> None:
        self.learner, self.device = learner, device
        self.log = LossLog(device, interval)

    def load(self, data: ImageSet, classes: int) -> None:
        """Make `data` the training data of the steps that follow."""
        if len(data.labels) and (data.labels.min() < 0 or data.labels.max() >= classes):
            raise UsageError(f"training labels lie outside the model's outputs 0..{classes - 1}.")
        self._images, self._labels = data.images.to(self.device), data.labels.to(self.device)

    def step(self, indices: Tensor) -> None:
        """One step on these samples."""
        losses = self.learner.observe(self._images.index_select(0, indices), self._labels.index_select(0, indices))
        self.log.record(losses)
        self.log.steps += 1
