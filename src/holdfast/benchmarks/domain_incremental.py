"""Domain-incremental benchmarks: all digits in every task, seen differently."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from holdfast.benchmarks.base import BENCHMARKS, Benchmark, Task, load
from holdfast.benchmarks.rotation import rotate
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.rng import generator

__all__: list[str] = []


@BENCHMARKS.register("rot-mnist", "MNIST, 20 tasks, each rotated by an angle in [0, 180)")
def rot_mnist(config: RunConfig, root: Path) -> Benchmark:
    """Each task is all of MNIST, rotated by one angle."""
    data = load("mnist", root)
    draw = generator(config.seed, "stream")
    angles = torch.rand(config.tasks or 20, generator=draw, dtype=torch.float64) * 180

    def turned(images: ImageSet, angle: float) -> ImageSet:
        return ImageSet(rotate(images.images, angle), images.labels)

    digits = tuple(range(10))
    tasks = [Task(digits, partial(turned, data.train, a), turned(data.test, a)) for a in angles.tolist()]
    return Benchmark(10, (1, 28, 28), tuple(tasks))


@BENCHMARKS.register("perm-mnist", "MNIST, 20 tasks, each with its pixels permuted")
def perm_mnist(config: RunConfig, root: Path) -> Benchmark:
    """Each task is all of MNIST, its pixels in another order."""
    data = load("mnist", root)
    draw = generator(config.seed, "stream")
    orders = [torch.randperm(28 * 28, generator=draw) for _ in range(config.tasks or 20)]

    def permuted(images: ImageSet, order: Tensor) -> ImageSet:
        return ImageSet(images.images.flatten(1)[:, order].view_as(images.images), images.labels)

    digits = tuple(range(10))
    tasks = [Task(digits, partial(permuted, data.train, o), permuted(data.test, o)) for o in orders]
    return Benchmark(10, (1, 28, 28), tuple(tasks))
