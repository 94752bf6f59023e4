"""Domain-incremental benchmarks: all digits in every task, but the images change."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from holdfast.benchmarks.base import BENCHMARKS, Benchmark, Task, needs, shared_dataset
from holdfast.benchmarks.rotation import rotate
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.errors import UsageError
from holdfast.rng import generator

__all__: list[str] = []


@BENCHMARKS.register("rot-mnist", "MNIST, 20 tasks, each rotated by an angle in [0, 180)")
@needs("mnist")
def rot_mnist(config: RunConfig, root: Path) -> Benchmark:
    """Each task is all of MNIST, rotated by one angle."""
    draw = generator(config.seed, "stream")
    angles = torch.rand(config.tasks or 20, generator=draw, dtype=torch.float64) * 180
    return _digits(root, [partial(rotate, angle=angle) for angle in angles.tolist()])


@BENCHMARKS.register("perm-mnist", "MNIST, 20 tasks, each with its pixels permuted")
@needs("mnist")
def perm_mnist(config: RunConfig, root: Path) -> Benchmark:
    """Each task is all of MNIST, its pixels in another order."""
    draw = generator(config.seed, "stream")
    orders = [torch.randperm(28 * 28, generator=draw) for _ in range(config.tasks or 20)]
    return _digits(root, [partial(_permute, order=order) for order in orders])


def _permute(images: Tensor, order: Tensor) -> Tensor:
    return images.flatten(1)[:, order].view_as(images)


def _digits(root: Path, changes: list[Callable[[Tensor], Tensor]]) -> Benchmark:
    """MNIST, with one task for each change of its images."""
    data = shared_dataset("mnist", root)

    def changed(part: ImageSet, change: Callable[[Tensor], Tensor]) -> ImageSet:
        return ImageSet(change(part.images), part.labels)

    test = data.test.images
    try:  # in one piece: the system refuses what it can never give, before memory fills up
        tests = test.new_empty((len(changes), *test.shape))
    except RuntimeError as error:
        wanted = f"{len(changes) * test.nbytes:,} bytes of memory"
        raise UsageError(f"the test sets of {len(changes):,} tasks need {wanted}: choose fewer tasks.") from error
    tasks = []
    for change, images in zip(changes, tests, strict=True):
        images.copy_(change(test))
        exam = ImageSet(images, data.test.labels)
        tasks.append(Task(tuple(range(10)), partial(changed, data.train, change), exam))
    return Benchmark(10, (1, 28, 28), tuple(tasks))
