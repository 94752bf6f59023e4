"""What a benchmark is: tasks with training data and test sets, and how the network is shown them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from holdfast.augment import CropFlip, Normalize, View
from holdfast.config import RunConfig
from holdfast.data import Dataset, ImageSet
from holdfast.data import load as load_data
from holdfast.errors import UsageError
from holdfast.registry import Registry
from holdfast.rng import generator

__all__ = ["BENCHMARKS", "Benchmark", "Task", "build", "load", "shuffled"]


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """One stretch of the stream with its own test set."""

    classes: tuple[int, ...]
    """The classes a Task-IL evaluation chooses from."""
    train: Callable[[], ImageSet]
    """Makes the training set when the task begins, so that long sequences need not fit into memory."""
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
    normalize: Normalize = field(default_factory=Normalize)
    augment: bool = False
    """Whether training views are randomly cropped and flipped."""
    batches: Callable[[int, int, torch.Generator], Iterable[Tensor]] = shuffled
    """(samples, batch size, generator) -> the index batches of one epoch of a task."""
    corruptible: ImageSet | None = None
    """The test images of all tasks in the order of a published set of corruptions of them; None if there is none."""

    def train_view(self, generator: torch.Generator) -> View:
        """What the network is shown of training images; `generator` decides augmentation."""
        return CropFlip(self.normalize, generator) if self.augment else self.normalize

    def joint(self) -> ImageSet:
        """The training data of all tasks at once."""
        parts = [task.train() for task in self.tasks]
        return ImageSet(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


_device: ContextVar[torch.device] = ContextVar("device", default=CPU)


def load(name: str, root: Path) -> Dataset:
    """The data set `name` on the device that `build` was called for, so that tasks are made there.

    Read once for all runs of a process; nobody writes to it.
    """
    return _load(name, root, _device.get())


@lru_cache(maxsize=2)
def _load(name: str, root: Path, device: torch.device) -> Dataset:
    data = load_data(name, root)
    train, test = (ImageSet(part.images.to(device), part.labels.to(device)) for part in (data.train, data.test))
    return data._replace(train=train, test=test)


BENCHMARKS: Registry[Callable[[RunConfig, Path], Benchmark]] = Registry("benchmark")


def build(config: RunConfig, root: Path, device: torch.device = CPU) -> Benchmark:
    """The benchmark of a run, its data on `device`, with `train_limit` and `validation` applied and labels checked."""
    token = _device.set(device)
    try:
        benchmark = BENCHMARKS[config.benchmark](config, root)
    finally:
        _device.reset(token)
    if config.tasks is not None and len(benchmark.tasks) != config.tasks:
        raise UsageError(f"{config.benchmark} has {len(benchmark.tasks)} tasks here, not {config.tasks}.")
    for number, task in enumerate(benchmark.tasks):
        _check_labels(task.test.labels, benchmark.classes, f"test labels of task {number}")
    tasks = benchmark.tasks
    if config.train_limit is not None:
        tasks = tuple(_limited(task, config.train_limit) for task in tasks)
    if config.validation:
        if benchmark.batches is not shuffled:
            raise UsageError(f"{config.benchmark} is one ordered stream: no part of it can be kept for validation.")
        tasks = tuple(_validated(task, config.validation) for task in tasks)
    return replace(benchmark, tasks=tasks)


def _limited(task: Task, limit: int) -> Task:
    def train() -> ImageSet:
        full = task.train()
        return ImageSet(full.images[:limit], full.labels[:limit])

    return replace(task, train=train)


def _validated(task: Task, share: float) -> Task:
    """The task tested on a share of its training samples, which are no longer trained on; the same for all seeds."""

    def split() -> tuple[ImageSet, ImageSet]:
        full = task.train()
        order = torch.randperm(len(full.labels), generator=generator(0, "validation")).to(full.labels.device)
        held, kept = order[: round(share * len(order))], order[round(share * len(order)) :].sort().values
        return ImageSet(full.images[held], full.labels[held]), ImageSet(full.images[kept], full.labels[kept])

    held, kept = split()
    if not len(held.labels):
        raise UsageError(f"a validation share of {share} holds back no sample of a task; take a larger one.")
    if not len(kept.labels):
        raise UsageError(f"a validation share of {share} leaves no sample of a task to train on; take a smaller one.")
    return replace(task, train=lambda: split()[1], test=held)


def _check_labels(labels: Tensor, classes: int, what: str) -> None:
    if len(labels) and (labels.min() < 0 or labels.max() >= classes):
        raise UsageError(f"{what} lie outside 0..{classes - 1}: {int(labels.min())}..{int(labels.max())}.")
