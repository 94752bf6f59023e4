"""Class-incremental benchmarks: each task brings new classes, in label order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from holdfast.augment import Normalize
from holdfast.benchmarks.base import BENCHMARKS, Benchmark, Task, load
from holdfast.config import RunConfig
from holdfast.data import Dataset, ImageSet
from holdfast.errors import UsageError

__all__ = ["split_by_class"]

# CIFAR-100 is normalised with CIFAR-10's numbers, as in the published experiments.
_CIFAR = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615))
_TINY = Normalize((0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821))


def split_by_class(data: Dataset, tasks: int) -> tuple[Task, ...]:
    """`data` cut into tasks of equally many classes, in label order."""
    if data.classes % tasks:
        raise UsageError(f"{data.classes} classes cannot be split into {tasks} equal tasks.")
    groups = torch.split(torch.arange(data.classes), data.classes // tasks)
    return tuple(
        Task(tuple(group.tolist()), partial(_of_classes, data.train, group), _of_classes(data.test, group))
        for group in groups
    )


def _of_classes(images: ImageSet, classes: Tensor) -> ImageSet:
    chosen = torch.isin(images.labels, classes.to(images.labels.device)).nonzero().flatten()
    return ImageSet(images.images.index_select(0, chosen), images.labels.index_select(0, chosen))


def _benchmark(config: RunConfig, root: Path, data: str, tasks: int, normalize: Normalize, augment: bool) -> Benchmark:
    source = load(data, root)
    shape = tuple(source.train.images.shape[1:])
    return Benchmark(source.classes, shape, split_by_class(source, config.tasks or tasks), normalize, augment)


@BENCHMARKS.register("seq-mnist", "MNIST, 5 tasks of 2 digits")
def seq_mnist(config: RunConfig, root: Path) -> Benchmark:
    """MNIST in tasks of new digits."""
    return _benchmark(config, root, "mnist", 5, Normalize(), augment=False)


@BENCHMARKS.register("seq-cifar10", "CIFAR-10, 5 tasks of 2 classes")
def seq_cifar10(config: RunConfig, root: Path) -> Benchmark:
    """CIFAR-10 in tasks of new classes."""
    benchmark = _benchmark(config, root, "cifar10", 5, _CIFAR, augment=True)
    return replace(benchmark, corruptible=load("cifar10", root).test)  # CIFAR-10-C follows the order of the test set


@BENCHMARKS.register("seq-cifar100", "CIFAR-100, 5 tasks of 20 classes (also --tasks 10 or 20)")
def seq_cifar100(config: RunConfig, root: Path) -> Benchmark:
    """CIFAR-100 in tasks of new classes."""
    return _benchmark(config, root, "cifar100", 5, _CIFAR, augment=True)


@BENCHMARKS.register("seq-tinyimagenet", "Tiny-ImageNet, 10 tasks of 20 classes")
def seq_tinyimagenet(config: RunConfig, root: Path) -> Benchmark:
    """Tiny-ImageNet in tasks of new classes."""
    return _benchmark(config, root, "tinyimagenet", 10, _TINY, augment=True)
