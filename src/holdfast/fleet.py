"""Several runs at once on one device, from one process: their steps take turns, their GPU work overlaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from holdfast.benchmarks import Benchmark, make_benchmark
from holdfast.config import RunConfig
from holdfast.data import data_root
from holdfast.results import RunResult
from holdfast.training import Progress, choose_device, train

__all__ = ["Member", "Outcome", "run_fleet"]


class Outcome(NamedTuple):
    """How a run of a fleet ended: with a result, or with the error that stopped it."""

    config: RunConfig
    result: RunResult | None
    error: Exception | None


class Member:
    """One run on its own stream."""

    def __init__(self, config: RunConfig, benchmark: Benchmark, device: torch.device) -> None:
        self.config = config
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self._steps: Generator[Progress, None, RunResult] = train(config, benchmark, device)

    def step(self) -> Progress:
        """Advance by one step; StopIteration carries the result."""
        turn: AbstractContextManager[object] = torch.cuda.stream(self.stream) if self.stream else nullcontext()
        with turn:
            return next(self._steps)


class _Size:
    """How many runs to keep going: grows by one while that makes all of them together faster."""

    SETTLE, WINDOW, GAIN = 600, 400, 1.05  # steps per run to wait and to measure; growth worth another run

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
        """Whether one more run of the size of those running would fit into the GPU's memory."""
        if self._device.type != "cuda":
            return False  # on a CPU, runs gain nothing from taking turns
        free, total = torch.cuda.mem_get_info(self._device)
        return free > 1.5 * (total - free) / self.now


def run_fleet(
    configs: Iterable[RunConfig],
    *,
    size: int | None = None,
    data: Path | str | None = None,
    device: str = "auto",
    on_step: Callable[[Progress], None] | None = None,
) -> Iterator[Outcome]:
    """Carry out all runs, `size` at a time, and yield each as it ends; a run that fails leaves the others untouched.

    Each gives the result it would give alone. Without `size`, the fleet grows while memory lasts and the measured
    throughput of all runs together still rises.
    """
    target = choose_device(device)
    waiting, active = iter(configs), list[Member]()  # drawn one by one: several fleets may share a list
    wanted = _Size(size, target)
    exhausted = False
    while not exhausted or active:
        while not exhausted and len(active) < wanted.now:
            config = next(waiting, None)
            if config is None:
                exhausted = True
                break
            try:
                active.append(Member(config, make_benchmark(config, data_root(data), target), target))
            except Exception as error:  # a plugin's benchmark may raise anything
                yield Outcome(config, None, error)
        for member in list(active):
            try:
                progress = member.step()
            except StopIteration as end:
                active.remove(member)
                yield Outcome(member.config, end.value, None)
            except Exception as error:  # a plugin's method too, and a device without memory
                active.remove(member)
                yield Outcome(member.config, None, error)
            else:
                wanted.stepped()
                if on_step:
                    on_step(progress)
