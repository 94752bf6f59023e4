"""Transfer and forgetting over several seeds: per-task curves and summary numbers with bootstrap intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isnan, nan
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import metrics
from holdfast.errors import UsageError

__all__ = ["Estimate", "PercentEstimate", "Transfer", "bootstrap", "transfer"]

_Accuracies = Sequence[float | None]
"""Percentages; None or NaN where there is none."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with the bounds of its bootstrap interval; bounds are None for a single seed."""

    mean: float
    low: float | None
    high: float | None

    def lies(self, least: float, most: float) -> bool:
        """Whether the mean is inside its interval, and both are inside these bounds; rounding does not count."""
        low, high = (self.mean if bound is None else bound for bound in (self.low, self.high))
        both = (self.low is None) == (self.high is None)
        return both and least <= low <= self.mean + 1e-9 and self.mean - 1e-9 <= high <= most


PercentEstimate = Annotated[Estimate, lambda estimate: estimate.lies(0, 100)]
PointsEstimate = Annotated[Estimate, lambda estimate: estimate.lies(-100, 100)]


@dataclass(frozen=True)
class Transfer:
    """What training on later tasks did to the others. All numbers are percentage points.

    `curves[j][i]` is the accuracy on task j after training on task i, None where some seed did not evaluate it.
    `accuracy` is that of the last row; the transfers and forgetting are None where they are not defined: with a single
    task, without the cells they need, and forward transfer without a baseline. `level` is the intervals' coverage.
    """

    seeds: int
    level: float
    curves: list[list[PercentEstimate | None]]
    accuracy: PercentEstimate | None
    forward_transfer: PointsEstimate | None
    backward_transfer: PointsEstimate | None
    forgetting: PointsEstimate | None


def transfer(
    matrices: Sequence[Sequence[_Accuracies]],
    baselines: Sequence[_Accuracies] | None = None,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Transfer:
    """Transfer over the seeds of one experiment, from an accuracy matrix (percent, T x T) per seed.

    `matrices[s][i][j]` is the accuracy on task j after training on task i, None or NaN where it was not evaluated.
    `baselines[s][j]` is the accuracy of the untrained network on task j, needed for forward transfer.

    Intervals are percentile bootstrap: seeds are drawn with replacement `resamples` times, and the interval spans the
    middle `level` of the means. All numbers use the same draws. With few seeds such intervals are too narrow.

    >>> result = transfer([[[90.0, None], [60.0, 80.0]]])
    >>> result.accuracy.mean, result.backward_transfer.mean, result.forward_transfer
    (70.0, -30.0, None)
    """
    if not 0 < level < 1 or resamples < 1:
        raise UsageError(f"level must lie between 0 and 1 and resamples be positive, got {level} and {resamples}.")
    if not matrices or not matrices[0]:
        raise UsageError("transfer needs at least one accuracy matrix with at least one task, got none.")
    seeds, tasks = len(matrices), len(matrices[0])
    expected = f"every seed needs a {tasks} x {tasks} accuracy matrix like the first"
    tables = _percentages(matrices, (seeds, tasks, tasks), expected)
    expected = f"baselines must be one row of {tasks} accuracies per seed ({seeds})"
    untrained = _percentages(baselines or [[nan] * tasks] * seeds, (seeds, tasks), expected)
    estimate = partial(bootstrap, level=level, resamples=resamples, seed=seed)

    return Transfer(
        seeds=seeds,
        level=level,
        curves=[[estimate(tables[:, after, task].tolist()) for after in range(tasks)] for task in range(tasks)],
        accuracy=estimate([metrics.accuracy(table) for table in tables]),
        forward_transfer=estimate([metrics.forward_transfer(*pair) for pair in zip(tables, untrained, strict=True)]),
        backward_transfer=estimate([metrics.backward_transfer(table) for table in tables]),
        forgetting=estimate([metrics.forgetting(table) for table in tables]),
    )


def bootstrap(values: Sequence[float], level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Estimate | None:
    """The mean of values, one per seed, and its percentile interval; None if there are none or one is missing (NaN)."""
    if not values or any(isnan(value) for value in values):
        return None
    if len(values) == 1:
        return Estimate(values[0], None, None)
    means = _resamples(len(values), resamples, seed) @ np.asarray(values)
    low, high = np.quantile(means, ((1 - level) / 2, (1 + level) / 2))
    return Estimate(fmean(values), float(low), float(high))


@lru_cache(maxsize=8)
def _resamples(seeds: int, count: int, seed: int) -> NDArray[np.float64]:
    """(count, seeds): row r has the weights of resample r, whose mean depends only on how often each seed is drawn."""
    drawn: NDArray[np.int64] = np.random.default_rng(seed).multinomial(seeds, np.full(seeds, 1 / seeds), size=count)
    return drawn / seeds


def _percentages(values: Sequence[Any], shape: tuple[int, ...], expected: str) -> Tensor:
    """The values as one float64 tensor of this shape, NaN where there is None; `expected` is for the error."""
    try:
        numbers = torch.from_numpy(np.array(values, dtype=np.float64))
    except ValueError:  # rows of different lengths
        raise UsageError(f"{expected}, got rows of different lengths.") from None
    if numbers.shape != shape:
        raise UsageError(f"{expected}, got the shape {tuple(numbers.shape)}.")
    outside = numbers[(numbers < 0) | (numbers > 100)]
    if len(outside):
        raise UsageError(f"accuracies must be percentages in 0..100, got {float(outside[0]):g}.")
    return numbers
