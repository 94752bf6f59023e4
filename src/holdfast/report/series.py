"""The numbers of figures about runs and tables, computed apart from drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.analysis.comparisons import Comparison, Variant
from holdfast.experiments import Verdict
from holdfast.metrics import mean_std
from holdfast.report.numbers import Numbers
from holdfast.report.text import plus_minus

__all__ = [
    "Curves",
    "Dot",
    "Heatmap",
    "Line",
    "Score",
    "curve_numbers",
    "curves",
    "heatmap_numbers",
    "heatmaps",
    "highlights",
    "mean_over_seen",
    "profile_numbers",
    "profiles",
    "score_numbers",
    "scores",
]

MOST_NAMED = 6
"""Lines that a reader can follow in one figure."""
REFERENCE = "er"
"""The method all others are compared with."""


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


class Curves(NamedTuple):
    """Accuracy after each task in percent, a line per variant."""

    seen: list[Line]
    """Mean over the tasks seen so far."""
    first: list[Line]
    """On the first task."""


@dataclass(frozen=True)
class Heatmap:
    """The accuracy matrix of one variant, mean over seeds: `rows[i][j]` in percent on task j after task i."""

    label: str
    method: str
    seeds: int
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Dot:
    """A number with the ends of an interval, and a published one to compare with; NaN where there is none."""

    label: str
    method: str
    mean: float
    low: float = nan
    high: float = nan
    text: str = ""
    """The number in words, shown beside it."""
    published: float = nan
    published_std: float = nan


@dataclass(frozen=True)
class Score:
    """A number over seeds, and the published one; NaN where there is none."""

    label: str
    method: str
    mean: float
    std: float
    seeds: int
    published: float = nan
    published_std: float = nan

    @classmethod
    def of(cls, verdict: Verdict) -> Score:
        """The score of a cell of a table."""
        mean, std = (verdict.published.mean, verdict.published.std) if verdict.published else (nan, nan)
        config, row = verdict.cell.config, verdict.cell.row
        return cls(row, config.method, verdict.mean, verdict.std, verdict.n, mean, nan if std is None else std)

    def dot(self, decimals: int = 2) -> Dot:
        """The score as a dot; its interval is the standard deviation to either side."""
        text = plus_minus(self.mean, self.std, self.seeds, decimals=decimals) or "no result yet"
        ends = self.mean - self.std, self.mean + self.std
        return Dot(self.label, self.method, self.mean, *ends, text, self.published, self.published_std)


def mean_over_seen(matrix: Tensor) -> Tensor:
    """Mean accuracy over the tasks seen so far, after each task, (T,)."""
    return torch.stack([row[: stage + 1].mean() for stage, row in enumerate(matrix)])


def curves(comparison: Comparison) -> Curves | None:
    """A line per variant; None if no variant was trained in more than one stage."""
    seen, first = [], []
    for variant in comparison.variants:
        stack = _matrices(variant)
        if stack.shape[1] == stack.shape[2]:
            courses = torch.stack([mean_over_seen(matrix) for matrix in stack]), stack[:, :, 0]
        else:
            courses = stack[:, -1:].mean(dim=2), stack[:, -1:, 0]
        seen.append(_line(variant, courses[0]))
        first.append(_line(variant, courses[1]))
    return None if all(line.is_level for line in seen) else Curves(seen, first)


def heatmaps(comparison: Comparison) -> list[Heatmap]:
    """The mean accuracy matrix of each variant trained in more than one stage."""
    stacks = [(variant, _matrices(variant)) for variant in comparison.variants]
    return [
        Heatmap(variant.label, variant.method, len(stack), tuple(tuple(row) for row in stack.mean(dim=0).tolist()))
        for variant, stack in stacks
        if stack.shape[1] > 1
    ]


def scores(comparison: Comparison, metric: str = "accuracy") -> list[Score]:
    """A metric of each variant that has it, over its seeds."""
    found = [(variant, variant.values(metric)) for variant in comparison.variants]
    return [Score(variant.label, variant.method, *mean_std(values), len(values)) for variant, values in found if values]


def profiles(rows: Sequence[tuple[str, Sequence[Verdict | None]]]) -> tuple[list[Line], list[Line]]:
    """A line per row of cells, ours and as published; a place without a cell is NaN."""
    ours, published = [], []
    for label, verdicts in rows:
        method = next((v.cell.config.method for v in verdicts if v is not None), label)
        cells = [Score.of(v) if v is not None else Score(label, method, nan, nan, 0) for v in verdicts]
        ours.append(Line(label, method, tuple(cell.mean for cell in cells), tuple(cell.std for cell in cells)))
        theirs = tuple(cell.published for cell in cells), tuple(cell.published_std for cell in cells)
        published.append(Line(label, method, *theirs))
    return ours, published


def highlights(lines: Sequence[Line], most: int = MOST_NAMED) -> set[str]:
    """Labels of the lines that stand out: all of a few, else er, the line that ends lowest, and the highest ones."""
    if len(lines) <= most:
        return {line.label for line in lines}
    order = sorted(lines, key=lambda line: -inf if isnan(line.mean[-1]) else line.mean[-1], reverse=True)
    first = [line for line in order if line.method == REFERENCE][:1]
    return {line.label for line in list(dict.fromkeys([*first, order[-1], *order]))[:most]}


def curve_numbers(found: Curves) -> Numbers:
    """A row per line and task."""
    columns = ("line", "after_task", "seen_tasks_mean", "seen_tasks_std", "first_task_mean", "first_task_std", "seeds")
    rows = [
        (seen.label, None if seen.is_level else stage, *numbers, seen.seeds)
        for seen, first in zip(*found, strict=True)
        for stage, numbers in enumerate(zip(seen.mean, seen.std, first.mean, first.std, strict=True), start=1)
    ]
    return Numbers(columns, rows)


def heatmap_numbers(maps: Sequence[Heatmap]) -> Numbers:
    """A row per variant, stage and task."""
    rows = [
        (heatmap.label, stage, task, value, heatmap.seeds)
        for heatmap in maps
        for stage, row in enumerate(heatmap.rows, start=1)
        for task, value in enumerate(row, start=1)
        if not isnan(value)
    ]
    return Numbers(("line", "after_task", "on_task", "accuracy_mean", "seeds"), rows)


def score_numbers(given: Sequence[Score]) -> Numbers:
    """A row per score."""
    rows = [(one.label, one.mean, one.std, one.seeds, one.published, one.published_std) for one in given]
    return Numbers(("line", "mean", "std", "seeds", "published_mean", "published_std"), rows)


def profile_numbers(ours: Sequence[Line], published: Sequence[Line], places: Sequence[str]) -> Numbers:
    """A row per line and place."""
    rows = [
        (line.label, *values)
        for line, theirs in zip(ours, published, strict=True)
        for values in zip(places, line.mean, line.std, theirs.mean, strict=True)
    ]
    return Numbers(("line", "at", "mean", "std", "published_mean"), rows)


def _matrices(variant: Variant) -> Tensor:
    """(seeds, stages, T); a result whose shape is not the first one's does not belong to the same stream."""
    shape = variant.results[0].matrix.shape
    return torch.stack([result.matrix for result in variant.results if result.matrix.shape == shape])


def _line(variant: Variant, values: Tensor) -> Line:
    """(seeds, stages) -> mean and standard deviation after each stage."""
    pairs = [mean_std(column) for column in values.T.tolist()]
    means, stds = tuple(mean for mean, _ in pairs), tuple(std for _, std in pairs)
    return Line(variant.label, variant.method, means, stds, len(values))
