"""How fast this machine runs: steps per second, and a complete run against the floor of its matrix products."""

import gc
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch

from holdfast.augment import CropFlip
from holdfast.benchmarks import Benchmark, Task, make_benchmark
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.engine import prepare_cuda
from holdfast.sweep.fleets import Member
from holdfast.training import Progress, run, train
from holdfast.workload import SHAPES, step_operations

__all__ = [
    "CompleteRun",
    "DeviceRate",
    "bare_products",
    "complete_run",
    "device_rates",
    "made_up",
    "side_by_side",
    "steps_per_second",
]

SECONDS = 1.5
"""How long each rate on a GPU is timed. With compilation, the whole table takes less than three minutes on an H200."""


@dataclass(frozen=True)
class CompleteRun:
    """A complete run and, timed in turns with it, the bare matrix products of its steps: the floor. In seconds."""

    steps: int
    seconds: float
    floor_seconds: float
    training: float
    evaluation: float
    data: float
    setup: float
    peak_memory_mb: float

    def to_json(self) -> dict[str, float]:
        """All numbers by name, and how many times the floor the run took."""
        return {**asdict(self), "ratio": self.seconds / self.floor_seconds}


def made_up(config: RunConfig, samples: int = 4096) -> Benchmark:
    """A benchmark of the shapes of `config.benchmark` with random images, for timing."""
    shape, classes = SHAPES[config.benchmark]
    draw = torch.Generator().manual_seed(0)

    def images(count: int) -> ImageSet:
        pixels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=draw)
        return ImageSet(pixels, torch.randint(0, classes, (count,), generator=draw))

    data, test = images(samples), images(1000)
    tasks = tuple(Task(tuple(range(classes)), lambda: data, test) for _ in range(config.tasks or 1))
    # Photographs are cropped and flipped for training, digits are not.
    return Benchmark(classes, shape, tasks, random_view=CropFlip if shape[0] == 3 else None)


def _seconds(act: Callable[[], object], times: int) -> float:
    """How long it takes to `act` so many times, until a GPU in use has done it as well."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        act()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def bare_products(rows: int) -> Callable[[], None]:
    """The bare matrix products of one MLP step on `rows` samples: forward, and backward to every weight."""
    sizes = (784, 100, 100, 10)
    inputs = [torch.rand(rows, size) for size in sizes]
    weights = [torch.rand(out, size) for size, out in pairwise(sizes)]

    def step() -> None:
        for x, weight in zip(inputs, weights, strict=False):
            torch.mm(x, weight.t())
        for layer, weight in reversed(list(enumerate(weights))):
            torch.mm(inputs[layer + 1].t(), inputs[layer])
            if layer:  # the images need no gradient
                torch.mm(inputs[layer + 1], weight)

    return step


def complete_run(*, root: Path, tasks: int = 20) -> CompleteRun:
    """A whole rot-mnist mse run on one thread. The floor is timed after every task: both meet the same load."""
    torch.set_num_threads(1)
    config = RunConfig.preset("rot-mnist", "mse", buffer_size=200, tasks=tasks)
    rows = 2 * config.batch_size + config.replay_size
    benchmark = make_benchmark(config, root)
    floor_step = bare_products(rows)
    _seconds(floor_step, 50)
    floors: list[float] = []
    pauses: list[float] = []  # seconds that timing the floor takes, which are not the run's
    evaluated: list[float] | None = None

    def time_floor(progress: Progress) -> None:
        nonlocal evaluated
        if progress.row is not evaluated:  # a task is finished
            evaluated = progress.row
            began = time.perf_counter()
            floors.append(_seconds(floor_step, 100) / 100)
            pauses.append(time.perf_counter() - began)

    result = run(config, benchmark, device="cpu", threads=1, on_step=time_floor)
    timing = result.timing
    return CompleteRun(
        steps=int(timing["steps"]),
        seconds=result.seconds - sum(pauses),
        floor_seconds=timing["steps"] * sum(floors) / len(floors),
        training=timing["training"],
        evaluation=timing["evaluation"],
        data=timing["data"] - sum(pauses[:-1]),  # all but the last fell into the making of a task
        setup=timing["setup"],
        peak_memory_mb=peak_memory_mb(),
    )


def peak_memory_mb() -> float:
    """The most memory this process has used at a time, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def steps_per_second(benchmark: str, method: str, *, steps: int) -> float:
    """Training steps of one run per second, on random images and one CPU thread, once its buffer is full."""
    torch.set_num_threads(1)
    config = RunConfig.preset(benchmark, method, buffer_size=200).change(epochs=10_000, tasks=1)
    running = train(config, made_up(config), torch.device("cpu"))
    _seconds(running.__next__, 20)
    return steps / _seconds(running.__next__, steps)


@dataclass(frozen=True)
class DeviceRate:
    """How fast a number of runs train together on a GPU."""

    benchmark: str
    method: str
    runs: int
    steps_per_second: float
    """Of all runs together."""
    tflops: float
    """Arithmetic of the networks' forward and backward passes, in 10^12 operations per second."""
    peak_tflops: float
    """The same of a large bfloat16 matrix product on this device, measured just before."""
    peak_share: float
    """`tflops` over `peak_tflops`, 0 to 1."""
    ready_seconds: float
    """From the start of the last run added until all ran at full speed, compilation included."""
    memory_mb: float
    """Device memory per run."""


def device_rates(benchmark: str, method: str, sizes: Sequence[int] = (1, 2, 4, 8)) -> Iterator[DeviceRate]:
    """Rates of one run alone and of fleets on a GPU, on random images; each is timed for about `SECONDS`."""
    prepare_cuda()  # must come first: counting operations would choose another folder for compiled code
    device = torch.device("cuda")
    config = RunConfig.preset(benchmark, method).change(epochs=10_000, tasks=1)
    work, peak = step_operations(config), matrix_peak(device)
    data = made_up(config)
    gc.collect()  # runs of the last measurement refer to each other; freed later, they would falsify the memory count
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    members: list[Member] = []

    def step() -> None:
        for member in members:
            member.step()

    for size in sizes:
        began = time.perf_counter()
        while len(members) < size:
            members.append(Member(config.change(seed=len(members)), data, device))
        _seconds(step, 40)  # fills the buffers, compiles, captures
        ready = time.perf_counter() - began
        steps = max(20, round(20 * SECONDS / _seconds(step, 20)))
        rate = size * steps / _seconds(step, steps)
        memory = (torch.cuda.memory_reserved(device) - before) / size / 1e6
        flops = rate * work
        yield DeviceRate(benchmark, method, size, rate, flops / 1e12, peak / 1e12, flops / peak, ready, memory)


def matrix_peak(device: torch.device) -> float:
    """Operations per second of a large bfloat16 matrix product on random numbers."""
    side, repeats = 8192, 20
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    _seconds(lambda: matrix @ matrix, 3)
    return repeats * 2.0 * float(side) ** 3 / _seconds(lambda: matrix @ matrix, repeats)


def side_by_side() -> tuple[float, float]:
    """rot-mnist mse steps per second of one process alone, and the mean of two processes at the same time."""
    rate = partial(steps_per_second, "rot-mnist", "mse", steps=2000)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        alone = pool.apply(rate)
        together = [pool.apply_async(rate) for _ in range(2)]
        return alone, fmean(each.get() for each in together)
