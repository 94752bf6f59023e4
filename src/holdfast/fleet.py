"""Several runs at once on one device, in one process: their steps take turns, their work on a GPU overlaps."""

from __future__ import annotations

import time
from collections.abc import Generator

import torch

from holdfast.benchmarks import Benchmark
from holdfast.config import RunConfig
from holdfast.results import RunResult
from holdfast.run_state import Checkpointer, Progress
from holdfast.training import train

__all__ = ["FleetSize", "Member"]


class Member:
    """One run. On a GPU it has a stream of its own."""

    def __init__(
        self, config: RunConfig, benchmark: Benchmark, device: torch.device, checkpointer: Checkpointer | None = None
    ) -> None:
        self.config = config
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self._steps: Generator[Progress, None, RunResult] = train(config, benchmark, device, checkpointer)

    def step(self) -> Progress | RunResult:
        """Advance by one step; returns the result once the run has ended."""
        with torch.cuda.stream(self.stream):  # without effect on a CPU, where the stream is None
            try:
                return next(self._steps)
            except StopIteration as end:
                result: RunResult = end.value
                return result


class FleetSize:
    """The number of runs at once: grows by one while that makes all of them together faster."""

    SETTLE, WINDOW, GAIN = 600, 400, 1.05  # steps per run to wait and to measure; gain that is worth another run

    def __init__(self, given: int | None, device: torch.device) -> None:
        self.now, self._device = given or 1, device
        self._growing = given is None
        self._best = 0.0
        self._steps = 0
        self._began = 0.0

    def stepped(self) -> None:
        """Count one step of any run."""
        if not self._growing:
            return
        self._steps += 1
        if self._steps == self.SETTLE * self.now:
            self._began = time.perf_counter()
        elif self._steps == (self.SETTLE + self.WINDOW) * self.now:
            rate = self.WINDOW * self.now / (time.perf_counter() - self._began)
            if rate < self._best * self.GAIN or not self._room():
                self._growing = False
                return
            self._best, self._steps = rate, 0
            self.now += 1

    def _room(self) -> bool:
        """Whether the GPU's memory has room for one more run of the size of the present ones."""
        if self._device.type != "cuda":
            return False  # on a CPU, runs gain nothing from taking turns
        free, total = torch.cuda.mem_get_info(self._device)
        return free > 1.5 * (total - free) / self.now
