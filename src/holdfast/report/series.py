"""The numbers of figures, computed apart from drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, nan

import torch
from torch import Tensor

from holdfast.analysis.claims import REFERENCE
from holdfast.analysis.comparisons import Comparison, Variant
from holdfast.metrics import mean_std
from holdfast.report.text import plus_minus

__all__ = ["Dot", "Heatmap", "Line", "curves", "heatmaps", "highlights", "mean_over_seen", "scores"]

MOST_NAMED = 6
"""Lines that a reader can follow in one figure."""


@dataclass(frozen=True)
class Line:
    """A number at each place of an axis: mean and standard deviation over seeds, NaN where there is none.

    A line with a single number is a level to compare with: a method that trains on all tasks at once.
    """

    label: str
    method: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    seeds: int = 0

    @property
    def is_level(self) -> bool:
        """Whether this is one number for the whole axis."""
        return len(self.mean) == 1


@dataclass(frozen=True)
class Heatmap:
    """The accuracy matrix of one variant, mean over seeds: `rows[i][j]` in percent on task j after task i."""

    label: str
    method: str
    seeds: int
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Dot:
    """A number with the ends of an interval, NaN where there is none, and the text that is shown beside it."""

    label: str
    method: str
    mean: float
    low: float = nan
    high: float = nan
    text: str = ""

    @classmethod
    def of_runs(cls, label: str, method: str, mean: float, std: float, n: int) -> Dot:
        """The mean of n runs; its interval is the standard deviation to either side."""
        return cls(label, method, mean, mean - std, mean + std, plus_minus(mean, std, n))


def mean_over_seen(matrix: Tensor) -> Tensor:
    """Mean accuracy over the tasks seen so far, after each task, (T,)."""
    return torch.stack([row[: stage + 1].mean() for stage, row in enumerate(matrix)])


def curves(comparison: Comparison) -> tuple[list[Line], list[Line]] | None:
    """Accuracy after each task in percent: mean over the tasks seen so far, and on the first task, a line per variant.

    None if no variant was trained in more than one stage.
    """
    seen, first = [], []
    for variant in comparison.variants:
        stack = _matrices(variant)
        if stack.shape[1] == stack.shape[2]:
            courses = torch.stack([mean_over_seen(matrix) for matrix in stack]), stack[:, :, 0]
        else:
            courses = stack[:, -1:].mean(dim=2), stack[:, -1:, 0]
        seen.append(_line(variant, courses[0]))
        first.append(_line(variant, courses[1]))
    return None if all(line.is_level for line in seen) else (seen, first)


def heatmaps(comparison: Comparison) -> list[Heatmap]:
    """The mean accuracy matrix of each variant trained in more than one stage.

    Where tasks have classes of their own, accuracies on tasks to come are left out: they are 0 and say nothing.
    """
    stacks = [(variant, _matrices(variant)) for variant in comparison.variants]
    stacks = [
        (v, stack if v.results[0].shares_classes else stack.masked_fill(torch.ones_like(stack).triu(1).bool(), nan))
        for v, stack in stacks
    ]
    return [
        Heatmap(variant.label, variant.method, len(stack), tuple(tuple(row) for row in stack.mean(dim=0).tolist()))
        for variant, stack in stacks
        if stack.shape[1] > 1
    ]


def scores(comparison: Comparison) -> list[Dot]:
    """The final accuracy of each variant, over its seeds."""
    found = [(variant, variant.values("accuracy")) for variant in comparison.variants]
    return [Dot.of_runs(variant.label, variant.method, *mean_std(values), len(values)) for variant, values in found]


def highlights(lines: Sequence[Line], most: int = MOST_NAMED) -> set[str]:
    """Labels of the lines that stand out: all of a few, else er, the line that ends lowest, and the highest ones."""
    if len(lines) <= most:
        return {line.label for line in lines}
    order = sorted(lines, key=lambda line: -inf if isnan(line.mean[-1]) else line.mean[-1], reverse=True)
    first = [line for line in order if line.method == REFERENCE][:1]
    return {line.label for line in list(dict.fromkeys([*first, order[-1], *order]))[:most]}


def _matrices(variant: Variant) -> Tensor:
    """(seeds, stages, T); a result whose shape is not the first one's does not belong to the same stream."""
    shape = variant.results[0].matrix.shape
    return torch.stack([result.matrix for result in variant.results if result.matrix.shape == shape])


def _line(variant: Variant, values: Tensor) -> Line:
    """(seeds, stages) -> mean and standard deviation after each stage."""
    pairs = [mean_std(column) for column in values.T.tolist()]
    means, stds = tuple(mean for mean, _ in pairs), tuple(std for _, std in pairs)
    return Line(variant.label, variant.method, means, stds, len(values))
