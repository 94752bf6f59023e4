"""Steps executed one operation after the other, on any device, and the record of their losses."""

import ctypes
import math
import sys
import time
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from holdfast.data import ImageSet
from holdfast.errors import DivergenceError, UsageError
from holdfast.learners import Learner, Losses

__all__ = ["Engine", "LossLog", "prepare_cpu"]

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters in malloc.h


class LossLog:
    """The loss terms of the last steps, recorded on the device and read every `interval` steps in one go.

    So a loss that is not finite is noticed at the next reading; the error names the step where it arose.
    """

    def __init__(self, terms: tuple[str, ...], device: torch.device, interval: int) -> None:
        self.names = ("total", *terms)
        self.interval = interval
        self.steps = 0
        self._rows = torch.zeros(interval, len(self.names), device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._zero = torch.zeros((), device=device)

    def record(self, losses: Losses) -> None:
        """Record one step's terms, on the device alone: it can be part of a captured step."""
        terms = losses.as_dict()
        if unknown := terms.keys() - set(self.names):
            raise UsageError(f"the loss term {min(unknown)} is not among the learner's `terms`: name it there.")
        row = torch.stack([terms.get(name, self._zero).float() for name in self.names])
        self._rows.index_copy_(0, self._at, row[None])
        self._at.add_(1).remainder_(self.interval)

    def state_dict(self) -> dict[str, Any]:
        """The terms not yet read and how many steps there were; the tensors are the log's own."""
        return {"steps": self.steps, "rows": self._rows, "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another log was; in place, since captured steps write to fixed addresses."""
        steps = int(state["steps"])
        if int(state["at"]) != steps % self.interval:
            raise ValueError("the log of losses contradicts itself.")
        self.steps = steps
        self._rows.copy_(state["rows"])
        self._at.copy_(state["at"])

    def due(self) -> bool:
        """Whether the log is full and must be read."""
        return self.steps % self.interval == 0

    def read(self) -> dict[str, float]:
        """Mean of each term since the last reading; raises if one was not finite. Waits for the device."""
        fresh = (self.steps - 1) % self.interval + 1 if self.steps else 0
        rows = self._rows[:fresh].tolist()
        for step, row in enumerate(rows, start=self.steps - fresh + 1):
            if not all(map(math.isfinite, row)):
                terms = ", ".join(f"{name} {value:.4g}" for name, value in zip(self.names, row, strict=True))
                error = f"the loss is no longer finite at step {step} ({terms})"
                raise DivergenceError(f"{error}. Try a smaller learning rate.")
        means = [sum(column) / fresh for column in zip(*rows, strict=True)]
        return dict(zip(self.names, means, strict=False))


class Engine:
    """Executes the steps of one run eagerly, on any device."""

    def __init__(self, learner: Learner, device: torch.device, *, interval: int = 50) -> None:
        self.learner, self.device = learner, device
        self.log = LossLog(learner.terms, device, interval)
        self.at_full_speed: float | None = None
        """When (time.perf_counter) steps reached their full speed: nothing is left to compile or capture."""
        self._images = self._labels = torch.empty(0)

    def load(self, data: ImageSet, classes: int) -> None:
        """Make `data` the training data of the steps that follow."""
        if len(data.labels) and (data.labels.min() < 0 or data.labels.max() >= classes):
            raise UsageError(f"training labels lie outside the model's outputs 0..{classes - 1}.")
        self._images, self._labels = data.images.to(self.device), data.labels.to(self.device)

    def unload(self) -> None:
        """Forget the training data, so that memory need not hold them beside those that are loaded next."""
        self._images = self._labels = torch.empty(0)

    def step(self, indices: Tensor) -> None:
        """One step on these samples."""
        self._execute(indices)
        self.log.steps += 1
        self.at_full_speed = self.at_full_speed or time.perf_counter()

    def learner_changed(self) -> None:
        """Forget everything prepared for the learner as it was; called after a task hook."""

    def _execute(self, indices: Tensor) -> None:
        losses = self.learner.observe(self._images.index_select(0, indices), self._labels.index_select(0, indices))
        self.log.record(losses)


@cache
def prepare_cpu() -> None:
    """Process-wide: let the C library reuse freed memory, which glibc otherwise returns to the system after every step.

    For a rot-mnist step, that cost 200 page faults and an eighth of the time.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
