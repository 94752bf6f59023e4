"""What a benchmark is: tasks with training data and test sets, and the view of them that the network gets."""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from holdfast import data
from holdfast.augment import Normalize, View
from holdfast.config import RunConfig
from holdfast.data import Dataset, ImageSet
from holdfast.errors import UsageError
from holdfast.methods import BENCHMARKS
from holdfast.rng import generator

__all__ = ["BENCHMARKS", "Benchmark", "Task", "make_benchmark", "needs", "required_data", "shared_dataset", "shuffled"]

CPU = torch.device("cpu")
RandomView = Callable[[View, torch.Generator], View]


@dataclass(frozen=True)
class Task:
    """One part of the stream, with a test set of its own."""

    classes: tuple[int, ...]
    """The classes that a Task-IL evaluation chooses from."""
    train: Callable[[], ImageSet]
    """Makes the training set when the task begins: memory must hold one task, not all of them."""
    test: ImageSet


def shuffled(count: int, batch_size: int, generator: torch.Generator) -> Iterable[Tensor]:
    """Indices of minibatches that visit `count` samples once in random order; the last one may be short."""
    return torch.split(torch.randperm(count, generator=generator, device=generator.device), batch_size)


@dataclass(frozen=True)
class Benchmark:
    """A sequence of tasks over one set of classes."""

    classes: int
    shape: tuple[int, ...]
    """Shape of one input as the network sees it."""
    tasks: tuple[Task, ...]
    normalize: View = field(default_factory=Normalize)
    """The view of test images that the network gets."""
    random_view: RandomView | None = None
    """Makes the view of training images from `normalize` and a generator, e.g. `CropFlip`; None: `normalize` alone."""
    batches: Callable[[int, int, torch.Generator], Iterable[Tensor]] = shuffled
    """(samples, batch size, generator) -> the index batches of one epoch of a task."""
    corruptible: ImageSet | None = None
    """The test images of all tasks in the order of a published set of corruptions of them; None if there is none."""
    boundaries: bool = True
    """Whether a learner is told where tasks begin and end."""

    def train_view(self, generator: torch.Generator) -> View:
        """The view of training images that the network gets; a random view draws from `generator`."""
        return self.random_view(self.normalize, generator) if self.random_view else self.normalize

    def joint(self) -> ImageSet:
        """The training data of all tasks together."""
        return ImageSet.joined(task.train() for task in self.tasks)


BenchmarkFunction = Callable[[RunConfig, Path], Benchmark]


def needs(*datasets: str) -> Callable[[BenchmarkFunction], BenchmarkFunction]:
    """A decorator that says which data sets a benchmark reads, for `required_data`."""

    def mark(function: BenchmarkFunction) -> BenchmarkFunction:
        function.needs = datasets  # type: ignore[attr-defined]
        return function

    return mark


def required_data(name: str) -> tuple[str, ...]:
    """The names of the data sets that the benchmark `name` reads; () if its author did not say (see `needs`)."""
    return getattr(BENCHMARKS[name], "needs", ())


_device: ContextVar[torch.device] = ContextVar("device", default=CPU)


def shared_dataset(name: str, root: Path) -> Dataset:
    """The data set `name`, on the device that `make_benchmark` was called for: tasks are made there.

    It is read once and shared by all runs of a process: do not write to it.
    """
    return _load(name, root, _device.get())


@lru_cache(maxsize=2)
def _load(name: str, root: Path, device: torch.device) -> Dataset:
    found = data.load(name, root)
    train, test = (ImageSet(part.images.to(device), part.labels.to(device)) for part in (found.train, found.test))
    return found._replace(train=train, test=test)


def make_benchmark(config: RunConfig, root: Path, device: torch.device = CPU) -> Benchmark:
    """The benchmark of a run, its data on `device`, with `train_limit` and `validation` applied and images checked."""
    token = _device.set(device)
    try:
        benchmark: object = BENCHMARKS[config.benchmark](config, root)
    finally:
        _device.reset(token)
    if not isinstance(benchmark, Benchmark):
        found = type(benchmark).__name__
        raise UsageError(f"the function of the benchmark {config.benchmark} must return a Benchmark, not a {found}.")
    if not benchmark.tasks:
        raise UsageError(f"{config.benchmark} has no tasks; it needs one at least.")
    if config.tasks is not None and len(benchmark.tasks) != config.tasks:
        there = len(benchmark.tasks)
        raise UsageError(f"{config.benchmark} has {there} task{'s' * (there != 1)} here, not {config.tasks}.")
    tasks = tuple(_checked(task, benchmark, number) for number, task in enumerate(benchmark.tasks, start=1))
    if config.train_limit is not None:
        tasks = tuple(_with_fewer(task, config.train_limit) for task in tasks)
    if config.validation:
        if benchmark.batches is not shuffled:
            raise UsageError(f"{config.benchmark} is one ordered stream: no part of it can be taken for validation.")
        tasks = tuple(_validated(task, config.validation) for task in tasks)
    return replace(benchmark, tasks=tasks)


def _checked(task: Task, benchmark: Benchmark, number: int) -> Task:
    """The task, its test set checked now, and its training set when it is made."""
    _check_images(task.test, benchmark, f"the test set of task {number}")

    def train() -> ImageSet:
        made = task.train()
        _check_images(made, benchmark, f"the training set of task {number}")
        return made

    return replace(task, train=train)


def _check_images(found: ImageSet, benchmark: Benchmark, what: str) -> None:
    """Raise unless a network of this benchmark can learn from these images, or be tested on them."""
    images, labels = found
    if not len(labels) or labels.shape != images.shape[:1]:
        shapes = f"{tuple(images.shape)} and {tuple(labels.shape)}"
        raise UsageError(f"{what} must have images, and a label for each; images and labels have the shapes {shapes}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UsageError(f"{what} must have whole numbers as labels, such as torch.int64, not {labels.dtype}.")
    if labels.min() < 0 or labels.max() >= benchmark.classes:
        lie = f"{int(labels.min())}..{int(labels.max())}"
        raise UsageError(f"labels of {what} lie outside 0..{benchmark.classes - 1}: {lie}.")
    shown = benchmark.normalize(images[:1].clone())  # a view may work in place
    shape, expected = tuple(shown.shape[1:]), tuple(benchmark.shape)
    if shape != expected:
        raise UsageError(
            f"{what} has images of shape {shape} for the network, but the benchmark's shape is {expected}."
        )
    if shown.is_floating_point() and shown.dtype != torch.float32:
        raise UsageError(f"{what} has {shown.dtype} for the network, which takes torch.float32; give images as bytes.")


def _with_fewer(task: Task, limit: int) -> Task:
    """The task with only its first `limit` training samples."""
    return replace(task, train=lambda: task.train().select(slice(limit)))


def _validated(task: Task, share: float) -> Task:
    """The task without a share of its training samples, which become its test set; the same ones for all seeds."""
    full = task.train()  # and again when the task begins: kept until then, all tasks would be in memory at once
    order = torch.randperm(len(full.labels), generator=generator(0, "validation")).to(full.labels.device)
    count = round(share * len(order))
    test, train = order[:count], order[count:].sort().values
    if not len(test):
        raise UsageError(f"a validation share of {share} takes no sample of a task; choose a larger one.")
    if not len(train):
        raise UsageError(f"a validation share of {share} leaves no sample of a task to train on; choose a smaller one.")
    return replace(task, train=lambda: task.train().select(train), test=full.select(test))
