"""Several runs at once on one device, in one process: their steps take turns, their work on a GPU overlaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from holdfast.benchmarks import Benchmark, make_benchmark
from holdfast.config import RunConfig
from holdfast.data import data_root
from holdfast.devices import choose_device
from holdfast.results import RunResult
from holdfast.run_state import Checkpointer, Progress
from holdfast.training import train

__all__ = ["Member", "Outcome", "run_fleet"]


class Outcome(NamedTuple):
    """How a run of a fleet ended: with a result, or the error that stopped it; with neither if it was abandoned."""

    config: RunConfig
    result: RunResult | None
    error: Exception | None


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

    def step(self) -> Progress:
        """Advance by one step; StopIteration carries the result."""
        with torch.cuda.stream(self.stream):  # without effect on a CPU, where the stream is None
            return next(self._steps)


class _Size:
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


def run_fleet(
    configs: Iterable[RunConfig],
    *,
    size: int | None = None,
    data: Path | str | None = None,
    device: str = "auto",
    on_step: Callable[[Progress], bool | None] | None = None,
    make_checkpointer: Callable[[RunConfig, torch.device], Checkpointer] | None = None,
) -> Iterator[Outcome]:
    """Carry out all runs, `size` at a time, and yield each as it ends. A run that fails does not affect the others.

    Each gives the result it would give alone. A run is abandoned if `on_step` answers True. Without `size`, the fleet
    grows while there is memory and the measured throughput of all runs together still rises. With checkpointers, runs
    continue from their checkpoints. When a stop is requested from all of them, each writes its state, and then
    KeyboardInterrupt is raised.
    """
    target = choose_device(device)
    waiting, active = iter(configs), list[Member]()  # one by one: several fleets may share an iterator
    wanted = _Size(size, target)
    exhausted = False
    stopped: KeyboardInterrupt | None = None
    while not exhausted or active:
        while not exhausted and len(active) < wanted.now:
            config = next(waiting, None)
            if config is None:
                exhausted = True
                break
            try:
                benchmark = make_benchmark(config, data_root(data), target)
                checkpointer = make_checkpointer(config, target) if make_checkpointer else None
                active.append(Member(config, benchmark, target, checkpointer))
            except Exception as error:  # a plugin's benchmark may raise anything
                yield Outcome(config, None, error)
        for member in list(active):
            try:
                progress = member.step()
            except KeyboardInterrupt as stop:
                if not stop.args:  # Ctrl-C in the middle of a step has no message, a checkpointer's stop has one
                    raise
                active.remove(member)
                stopped, exhausted = stop, True  # the other runs stop after their step, and no further run begins
                continue
            except StopIteration as end:
                outcome = Outcome(member.config, end.value, None)
            except Exception as error:  # a plugin's method may raise anything, a device may be out of memory
                outcome = Outcome(member.config, None, error)
            else:
                wanted.stepped()
                if not (on_step and on_step(progress)):
                    continue
                outcome = Outcome(member.config, None, None)
            active.remove(member)
            yield outcome
    if stopped:
        raise stopped
