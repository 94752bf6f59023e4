"""Class-incremental benchmarks: each task brings new classes, in label order."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from holdfast.augment import CropFlip, Normalize
from holdfast.benchmarks.base import BENCHMARKS, Benchmark, RandomView, Task, needs, shared_dataset
from holdfast.config import RunConfig
from holdfast.data import Dataset, ImageSet
from holdfast.errors import UsageError

__all__: list[str] = []


def _split_by_class(data: Dataset, tasks: int) -> tuple[Task, ...]:
    """`data` cut into tasks of equally many classes, in label order."""
    if data.classes % tasks:
        raise UsageError(f"{data.classes} classes cannot be split into {tasks} equal tasks.")
    return tuple(
        Task(tuple(classes.tolist()), partial(_of_classes, data.train, classes), _of_classes(data.test, classes))
        for classes in torch.split(torch.arange(data.classes), data.classes // tasks)
    )


def _of_classes(data: ImageSet, classes: Tensor) -> ImageSet:
    chosen = torch.isin(data.labels, classes.to(data.labels.device)).nonzero().flatten()
    return ImageSet(data.images.index_select(0, chosen), data.labels.index_select(0, chosen))


def _by_class(
    name: str, text: str, tasks: int, normalize: Normalize, random_view: RandomView | None, *, corrupted: bool = False
) -> None:
    """Register the benchmark seq-DATASET of `tasks` tasks, unless the config asks for another number.

    `corrupted` says that corruptions of the test images are published, in the order of the test set.
    """
    dataset = name.removeprefix("seq-")

    @BENCHMARKS.register(name, text)
    @needs(dataset)
    def benchmark(config: RunConfig, root: Path) -> Benchmark:
        data = shared_dataset(dataset, root)
        shape = tuple(data.train.images.shape[1:])
        parts = _split_by_class(data, config.tasks or tasks)
        corruptible = data.test if corrupted else None
        return Benchmark(data.classes, shape, parts, normalize, random_view, corruptible=corruptible)


# CIFAR-100 is normalised with CIFAR-10's numbers, as in the published experiments.
_CIFAR = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615))
_TINY = Normalize((0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821))

_by_class("seq-mnist", "MNIST, 5 tasks of 2 digits", 5, Normalize(), None)
_by_class("seq-cifar10", "CIFAR-10, 5 tasks of 2 classes", 5, _CIFAR, CropFlip, corrupted=True)
_by_class("seq-cifar100", "CIFAR-100, 5 tasks of 20 classes (also --tasks 10 or 20)", 5, _CIFAR, CropFlip)
_by_class("seq-tinyimagenet", "Tiny-ImageNet, 10 tasks of 20 classes", 10, _TINY, CropFlip)
