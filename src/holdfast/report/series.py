"""The numbers behind the figures, computed apart from drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from holdfast.report.groups import Comparison, Variant, mean_std
from holdfast.report.numbers import Numbers

__all__ = [
    "Bar",
    "Course",
    "Curve",
    "Heatmap",
    "Profile",
    "bar_numbers",
    "bars",
    "curve_numbers",
    "curves",
    "heatmap_numbers",
    "heatmaps",
    "mean_over_seen",
    "profile_numbers",
]


@dataclass(frozen=True)
class Course:
    """A number after each task: mean and standard deviation over seeds, in percent; NaN where there is none."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """How one variant fared over the tasks."""

    label: str
    method: str
    seeds: int
    seen: Course
    """Mean accuracy over the tasks seen so far, after each task."""
    first: Course
    """Accuracy on the first task, after each task."""

    @property
    def is_level(self) -> bool:
        """Trained on everything at once: one number, drawn as a level to compare with."""
        return len(self.seen.mean) == 1


@dataclass(frozen=True)
class Heatmap:
    """The accuracy matrix of one variant, mean over seeds: `rows[i][j]` in percent on task j after task i."""

    label: str
    method: str
    seeds: int
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Bar:
    """A number of ours over seeds, and the published one; NaN where there is none."""

    label: str
    method: str
    mean: float
    std: float
    seeds: int
    published: float = float("nan")
    published_std: float = float("nan")


@dataclass(frozen=True)
class Profile:
    """One line over the places of an ordered axis: ours over seeds, and as published; NaN where there is none."""

    label: str
    method: str
    ours: Course
    published: tuple[float, ...]


def mean_over_seen(matrix: Tensor) -> Tensor:
    """Mean accuracy over the tasks seen so far, after each task, (T,)."""
    return torch.stack([row[: stage + 1].mean() for stage, row in enumerate(matrix)])


def curves(comparison: Comparison) -> list[Curve]:
    """One curve per variant; none if nothing in the comparison has more than one stage."""
    made = [_curve(variant) for variant in comparison.variants]
    return made if any(not curve.is_level for curve in made) else []


def heatmaps(comparison: Comparison) -> list[Heatmap]:
    """The mean accuracy matrix of each variant trained in more than one stage."""
    stacks = [(variant, _matrices(variant)) for variant in comparison.variants]
    return [
        Heatmap(variant.label, variant.method, len(stack), tuple(tuple(row) for row in stack.mean(dim=0).tolist()))
        for variant, stack in stacks
        if stack.shape[1] > 1
    ]


def bars(comparison: Comparison, metric: str = "accuracy") -> list[Bar]:
    """A metric of each variant over its seeds, without the published numbers."""
    made = []
    for variant in comparison.variants:
        values = variant.values(metric)
        mean, std = mean_std(values)
        made.append(Bar(variant.label, variant.method, mean, std, len(values)))
    return [bar for bar in made if not isnan(bar.mean)]


def curve_numbers(lines: Sequence[Curve]) -> Numbers:
    """The curves as rows: one per line and task."""
    columns = ("line", "after_task", "seen_tasks_mean", "seen_tasks_std", "first_task_mean", "first_task_std", "seeds")
    rows = [
        (line.label, None if line.is_level else stage, *numbers, line.seeds)
        for line in lines
        for stage, numbers in enumerate(
            zip(line.seen.mean, line.seen.std, line.first.mean, line.first.std, strict=True), start=1
        )
    ]
    return Numbers(columns, rows)


def heatmap_numbers(maps: Sequence[Heatmap]) -> Numbers:
    """The matrices as rows: one per variant, stage and task."""
    rows = [
        (heatmap.label, stage, task, value, heatmap.seeds)
        for heatmap in maps
        for stage, row in enumerate(heatmap.rows, start=1)
        for task, value in enumerate(row, start=1)
        if not isnan(value)
    ]
    return Numbers(("line", "after_task", "on_task", "accuracy_mean", "seeds"), rows)


def bar_numbers(given: Sequence[Bar]) -> Numbers:
    """The bars as rows."""
    rows = [(bar.label, bar.mean, bar.std, bar.seeds, bar.published, bar.published_std) for bar in given]
    return Numbers(("line", "mean", "std", "seeds", "published_mean", "published_std"), rows)


def profile_numbers(given: Sequence[Profile], places: Sequence[str]) -> Numbers:
    """The profiles as rows: one per line and place."""
    rows = [
        (profile.label, *values)
        for profile in given
        for values in zip(places, profile.ours.mean, profile.ours.std, profile.published, strict=True)
    ]
    return Numbers(("line", "at", "mean", "std", "published_mean"), rows)


def _matrices(variant: Variant) -> Tensor:
    """(seeds, stages, T); a result whose shape is not the first one's does not belong to the same stream."""
    shape = variant.results[0].matrix.shape
    return torch.stack([result.matrix for result in variant.results if result.matrix.shape == shape])


def _curve(variant: Variant) -> Curve:
    stack = _matrices(variant)
    if stack.shape[1] == stack.shape[2]:
        seen, first = torch.stack([mean_over_seen(matrix) for matrix in stack]), stack[:, :, 0]
    else:
        seen, first = stack[:, -1:].mean(dim=2), stack[:, -1:, 0]
    return Curve(variant.label, variant.method, len(stack), _course(seen), _course(first))


def _course(values: Tensor) -> Course:
    """(seeds, stages) -> mean and standard deviation after each stage."""
    pairs = [mean_std(column) for column in values.T.tolist()]
    return Course(tuple(mean for mean, _ in pairs), tuple(std for _, std in pairs))
