"""MNIST-360: a stream of slowly turning digits without task boundaries, and one test set."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.benchmarks.base import BENCHMARKS, Benchmark, Task, needs, shared_dataset
from holdfast.benchmarks.rotation import rotate_each
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.rng import generator

__all__ = ["Batch", "plan_batches"]

DIGITS = 9  # 0 to 8: a turned 9 is a 6.
ROUNDS = 6
CHUNKS = 2 * ROUNDS  # Each round meets every digit in two pairs.


class Batch(NamedTuple):
    """One minibatch of two digits: how many images of each, and from which of the digit's chunks."""

    digits: tuple[int, int]
    counts: tuple[int, int]
    chunks: tuple[int, int]


def plan_batches(chunks: list[list[int]], batch_size: int) -> list[Batch]:
    """The stream as a list of minibatches.

    `chunks[d]` are the sizes of digit d's chunks in order. The pairs (0,1), (1,2), ..., (8,0) follow each other; each
    pair takes the next chunk of both digits. A minibatch is divided in proportion to the rests of the two chunks.
    As soon as one of them is used up, the next pair follows, and the rest of the other chunk is dropped.
    """
    visits = [0] * DIGITS
    plan = []
    for pair in range(ROUNDS * DIGITS):
        a, b = pair % DIGITS, (pair + 1) % DIGITS
        at = visits[a], visits[b]
        visits[a], visits[b] = at[0] + 1, at[1] + 1
        left_a, left_b = chunks[a][at[0]], chunks[b][at[1]]
        while left_a and left_b:
            take_a = min(round(left_a / (left_a + left_b) * batch_size), left_a)
            take_b = min(batch_size - take_a, left_b)
            plan.append(Batch((a, b), (take_a, take_b), at))
            left_a, left_b = left_a - take_a, left_b - take_b
    return plan


@BENCHMARKS.register("mnist-360", "a stream of slowly turning digits 0 to 8, without boundaries")
@needs("mnist")
def mnist_360(config: RunConfig, root: Path) -> Benchmark:
    """Digits come in pairs and return later; they turn all the time. One test set has digits at all angles."""
    data = shared_dataset("mnist", root)
    draw = generator(config.seed, "stream")
    of_digit = _by_digit(data.train)
    if config.train_limit is not None:  # Fewer images of each digit, but still a full turn.
        of_digit = [indices[: max(CHUNKS, config.train_limit // DIGITS)] for indices in of_digit]
    chunks = [_cut(indices) for indices in of_digit]
    plan = plan_batches([[len(chunk) for chunk in row] for row in chunks], config.batch_size)
    order = [[chunk[torch.randperm(len(chunk), generator=draw)] for chunk in row] for row in chunks]
    stream = partial(_turned, data.train, *_schedule(plan, order))
    sizes = [sum(batch.counts) for batch in plan]

    def in_order(count: int, batch_size: int, generator: torch.Generator) -> Iterable[Tensor]:
        ends = accumulate(sizes)  # Where `train_limit` cuts the stream, only whole minibatches remain.
        whole = [size for size, end in zip(sizes, ends, strict=True) if end <= count]
        return torch.split(torch.arange(sum(whole), device=generator.device), whole)

    task = Task(tuple(range(10)), stream, _test(data.test))
    return Benchmark(10, (1, 28, 28), (task,), batches=in_order, boundaries=False)


def _by_digit(data: ImageSet) -> list[Tensor]:
    """The indices of each digit's images."""
    return [(data.labels == digit).nonzero().flatten() for digit in range(DIGITS)]


def _cut(indices: Tensor) -> list[Tensor]:
    """A digit's images in consecutive chunks of n // 12 + 1, the last one shorter.

    The sizes decide how small the very last minibatch is. With chunks as equal as possible it would have 4 samples,
    and one step on 4 samples at the published learning rate costs some runs 5 to 17 points.
    """
    size = len(indices) // CHUNKS + 1
    return [indices[at * size : (at + 1) * size] for at in range(CHUNKS)]


def _schedule(plan: list[Batch], order: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Which image comes when, and at which angle in degrees: two tensors in the order of the stream."""
    totals = [sum(len(chunk) for chunk in row) for row in order]
    shown = [0] * DIGITS  # images of each digit so far
    taken: Counter[tuple[int, int]] = Counter()  # of each chunk
    indices, angles = [], []
    for batch in plan:
        for digit, count, chunk in zip(*batch, strict=True):
            start = taken[digit, chunk]
            indices.append(order[digit][chunk][start : start + count])
            turns = torch.arange(shown[digit], shown[digit] + count, dtype=torch.float64)
            angles.append((digit - 1) * 60.0 + turns * (360.0 / totals[digit]))
            taken[digit, chunk] += count
            shown[digit] += count
    return torch.cat(indices), torch.cat(angles)


def _turned(data: ImageSet, indices: Tensor, angles: Tensor) -> ImageSet:
    return ImageSet(rotate_each(data.images[indices], angles), data.labels[indices])


def _test(data: ImageSet) -> ImageSet:
    """All test images of the digits; the angles of each digit's images go once round the circle."""
    of_digit = _by_digit(data)
    angles = [torch.arange(len(i), dtype=torch.float64) * (360.0 / len(i)) for i in of_digit]
    return _turned(data, torch.cat(of_digit), torch.cat(angles))
