"""How fast this machine runs: steps per second, and a complete run against the floor of its matrix products."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

from holdfast.benchmarks import Benchmark, Task
from holdfast.benchmarks import build as build_benchmark
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.results import RunResult
from holdfast.training import train

__all__ = ["CompleteRun", "complete_run", "floor_step", "made_up", "side_by_side", "steps_per_second"]

SHAPES = {
    "seq-mnist": ((1, 28, 28), 10),
    "rot-mnist": ((1, 28, 28), 10),
    "perm-mnist": ((1, 28, 28), 10),
    "mnist-360": ((1, 28, 28), 10),
    "seq-cifar10": ((3, 32, 32), 10),
    "seq-cifar100": ((3, 32, 32), 100),
    "seq-tinyimagenet": ((3, 64, 64), 200),
}
"""Input shape and number of classes of each benchmark, for data made up on the spot."""


@dataclass(frozen=True)
class CompleteRun:
    """A complete run beside the bare matrix products of its steps, timed in turns on one machine; times in seconds."""

    steps: int
    seconds: float
    floor_seconds: float
    training: float
    evaluation: float
    data: float
    setup: float
    peak_memory_mb: float

    @property
    def ratio(self) -> float:
        """How many times the floor the run took."""
        return self.seconds / self.floor_seconds

    def to_json(self) -> dict[str, float]:
        """All numbers by name."""
        return {**asdict(self), "ratio": self.ratio}


def made_up(config: RunConfig, samples: int = 4096) -> Benchmark:
    """A benchmark of the shapes of `config.benchmark` with random images, for timing."""
    shape, classes = SHAPES[config.benchmark]
    draw = torch.Generator().manual_seed(0)

    def images(count: int) -> ImageSet:
        pixels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=draw)
        return ImageSet(pixels, torch.randint(0, classes, (count,), generator=draw))

    data, test = images(samples), images(1000)
    tasks = tuple(Task(tuple(range(classes)), lambda: data, test) for _ in range(config.tasks or 1))
    return Benchmark(
        classes, shape, tasks, augment=config.benchmark in ("seq-cifar10", "seq-cifar100", "seq-tinyimagenet")
    )


def floor_step(rows: int, repeats: int, sizes: tuple[int, ...] = (784, 100, 100, 10)) -> float:
    """Seconds of the bare matrix products of one MLP step on `rows` samples: forward, and backward to every weight."""
    inputs = [torch.rand(rows, size) for size in sizes]
    weights = [torch.rand(out, size) for size, out in pairwise(sizes)]
    began = time.perf_counter()
    for _ in range(repeats):
        for x, weight in zip(inputs, weights, strict=False):
            torch.mm(x, weight.t())
        for layer, weight in reversed(list(enumerate(weights))):
            torch.mm(inputs[layer + 1].t(), inputs[layer])
            if layer:  # nobody needs the gradient of the images
                torch.mm(inputs[layer + 1], weight)
    return (time.perf_counter() - began) / repeats


def complete_run(method: str = "mse", buffer_size: int = 200, *, root: Path, tasks: int = 20) -> CompleteRun:
    """A whole rot-mnist run on one thread; the floor is timed after every task, so both see the same machine."""
    torch.set_num_threads(1)
    config = RunConfig.preset("rot-mnist", method, buffer_size=buffer_size, tasks=tasks)
    rows = 2 * config.batch_size + config.replay_size
    benchmark = build_benchmark(config, root)
    floor_step(rows, 50)
    floors: list[float] = []
    aside = 0.0
    steps = train(config, benchmark, torch.device("cpu"))
    while True:
        try:
            progress = next(steps)
        except StopIteration as end:
            result: RunResult = end.value
            break
        if progress.row is not None and len(floors) <= progress.task:
            began = time.perf_counter()
            floors.append(floor_step(rows, 100))
            aside += time.perf_counter() - began
    timing = result.timing
    return CompleteRun(
        steps=int(timing["steps"]),
        seconds=result.seconds - aside,
        floor_seconds=timing["steps"] * sum(floors) / len(floors),
        training=timing["training"],
        evaluation=timing["evaluation"],
        data=timing["data"] - aside,
        setup=timing["setup"],
        peak_memory_mb=peak_memory_mb(),
    )


def peak_memory_mb() -> float:
    """The most memory this process has held, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def steps_per_second(
    benchmark: str, method: str, *, steps: int = 300, buffer_size: int = 200, device: str = "cpu"
) -> float:
    """Rate of one run's training steps on made-up data, once its buffer is full, on one thread."""
    torch.set_num_threads(1)
    config = RunConfig.preset(benchmark, method, buffer_size=buffer_size).change(epochs=10_000, tasks=1)
    running = train(config, made_up(config), torch.device(device))
    for _ in range(20):
        next(running)
    began = time.perf_counter()
    for _ in range(steps):
        next(running)
    return steps / (time.perf_counter() - began)


def side_by_side(jobs: int = 2, steps: int = 2000) -> tuple[float, float]:
    """rot-mnist mse steps per second of one process alone, and the mean of `jobs` processes at the same time."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool:
        alone = pool.apply(_rate, (steps,))
        together = pool.map(_rate, [steps] * jobs, chunksize=1)
    return alone, sum(together) / jobs


def _rate(steps: int) -> float:
    return steps_per_second("rot-mnist", "mse", steps=steps)
