"""Ours beside the published: does a cell agree, does the order of the methods agree.

The rule. Ours are n runs with mean m and sample standard deviation s; the paper's are n_p = 3 with m_p and s_p. If both
came from the same experiment, they have one spread, estimated from both together:

    s_pool^2 = ((n - 1) s^2 + (n_p - 1) s_p^2) / (n + n_p - 2)

A cell **agrees** if the 95 % confidence interval of the difference reaches into the band of differences that do not
matter (the measure's `tolerance`, 1 point for percentages, 0.02 for probabilities):

    |m - m_p| <= tolerance + t(0.975, n + n_p - 2) * s_pool * sqrt(1 / n + 1 / n_p)

Runs of ours that scatter more than ten times as widely as the published ones, or as the tolerance, are not the same
experiment, whatever their mean (ten is where the 99 % quantile of F(2, 2) lies): the cell does not agree.

One run of ours is judged by the published spread alone. A number published without a spread counts as one run. Where
neither gives a spread, the tolerance decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import isnan, nan, sqrt

from holdfast.experiments.base import Cell, Derived, Experiment
from holdfast.experiments.measures import MEASURES, Measure
from holdfast.experiments.published import PUBLISHED_RUNS, Published
from holdfast.experiments.stored import Results, Stored
from holdfast.metrics import mean_std

__all__ = ["Rank", "Table", "Verdict", "assess", "judge", "kendall_tau", "margin", "student_t"]


SCATTER = 10.0


@dataclass(frozen=True)
class Verdict:
    """One cell, ours beside the published. `mean`, `std` and `difference` are NaN where they are not known."""

    cell: Cell
    values: tuple[float, ...]
    """One per finished run, in the order of the seeds."""
    stored: tuple[Stored, ...]
    """The finished runs."""
    wanted: int
    """Runs asked for."""
    mean: float
    std: float
    """Sample standard deviation (n - 1)."""
    difference: float
    """Ours minus published."""
    margin: float
    """The largest difference that agrees."""
    agrees: bool | None
    """None where ours or the published number is missing."""

    @property
    def n(self) -> int:
        """Runs behind the mean."""
        return len(self.values)

    @property
    def published(self) -> Published | None:
        """What the paper prints."""
        return self.cell.published

    @property
    def measure(self) -> Measure:
        """How the cell's runs are read."""
        return MEASURES[self.cell.metric]

    @property
    def status(self) -> str:
        """`agrees`, `differs`, `missing` (no run finished) or `unpublished`."""
        if not self.values:
            return "missing"
        if self.agrees is None:
            return "unpublished"
        return "agrees" if self.agrees else "differs"


@dataclass(frozen=True)
class Rank:
    """How the order of the rows of one group and column agrees with the paper's."""

    group: str
    column: str
    tau: float
    """Kendall's tau-b in [-1, 1]; NaN with fewer than two rows to compare."""
    n: int
    """Rows that have both numbers."""


@dataclass(frozen=True)
class Table:
    """An experiment with a verdict per cell."""

    experiment: Experiment
    verdicts: tuple[Verdict, ...]

    @cached_property
    def groups(self) -> list[str]:
        """Blocks, in the paper's order."""
        return list(dict.fromkeys(verdict.cell.group for verdict in self.verdicts))

    @cached_property
    def columns(self) -> list[str]:
        """Columns, in the paper's order."""
        return list(dict.fromkeys(verdict.cell.column for verdict in self.verdicts))

    def rows(self, group: str) -> list[str]:
        """Rows of a block, in the paper's order."""
        return list(dict.fromkeys(verdict.cell.row for verdict in self.verdicts if verdict.cell.group == group))

    def at(self, group: str, row: str, column: str) -> Verdict | None:
        """The verdict at a place, or None where the table has no cell."""
        return self._places.get((group, row, column))

    @cached_property
    def _places(self) -> dict[tuple[str, str, str], Verdict]:
        return {(v.cell.group, v.cell.row, v.cell.column): v for v in self.verdicts}

    @cached_property
    def ranks(self) -> list[Rank]:
        """Rank agreement with the paper, for every group and column with two comparable rows or more."""
        places = dict.fromkeys((v.cell.group, v.cell.column) for v in self.verdicts)
        return [rank for place in places if (rank := self._rank(*place)).n > 1]

    def _rank(self, group: str, column: str) -> Rank:
        pairs = [
            (verdict.mean, verdict.published.mean)
            for verdict in self.verdicts
            if (verdict.cell.group, verdict.cell.column) == (group, column)
            and verdict.published is not None
            and not isnan(verdict.mean)
        ]
        return Rank(group, column, kendall_tau([a for a, _ in pairs], [b for _, b in pairs]), len(pairs))

    @cached_property
    def derived(self) -> Derived:
        """What the experiment computes from its means: column -> row -> number; empty for most."""
        return self.experiment.derive(self) if self.experiment.derive else {}

    def count(self, status: str) -> int:
        """Cells of a status."""
        return sum(verdict.status == status for verdict in self.verdicts)


def assess(experiment: Experiment, results: Results, seeds: Sequence[int] | None = None) -> Table:
    """A verdict for every cell from the results there are: of these seeds, or of every seed found."""
    verdicts = []
    for cell in experiment.cells:
        wanted = results.seeds_of(cell.config) if seeds is None else seeds
        verdicts.append(judge(cell, [results.get(config) for config in cell.configs(wanted)]))
    return Table(experiment, tuple(verdicts))


def judge(cell: Cell, runs: Sequence[Stored | None]) -> Verdict:
    """The verdict on one cell; None stands for a run that is not there. Runs that lack the measure do not count."""
    measure = MEASURES[cell.metric]
    read = [(stored, measure.of(stored)) for stored in runs if stored is not None]
    usable = [(stored, value) for stored, value in read if not isnan(value)]
    values = tuple(value for _, value in usable)
    mean, std = mean_std(values)
    allowed, difference, agrees = nan, nan, None
    if values and cell.published is not None:
        difference = mean - cell.published.mean
        allowed = margin(len(values), std, cell.published, measure.tolerance)
        agrees = abs(difference) <= allowed and not _scattered(std, cell.published, measure.tolerance)
    return Verdict(
        cell, values, tuple(stored for stored, _ in usable), len(runs), mean, std, difference, allowed, agrees
    )


def margin(n: int, std: float, published: Published, tolerance: float) -> float:
    """The largest difference of means that agrees, by the rule at the top of this file; `std` is ignored for n = 1."""
    their_n = 1 if published.std is None else PUBLISHED_RUNS
    freedom = n + their_n - 2
    if freedom == 0:
        return tolerance
    ours = (n - 1) * std**2 if n > 1 else 0.0
    theirs = (their_n - 1) * published.std**2 if published.std is not None else 0.0
    pooled = sqrt((ours + theirs) / freedom)
    return tolerance + student_t(freedom) * pooled * sqrt(1 / n + 1 / their_n)


def _scattered(std: float, published: Published, tolerance: float) -> bool:
    """Whether our runs spread so much more than the published ones that comparing means says nothing."""
    return std > SCATTER * max(published.std or 0.0, tolerance)  # False for NaN: one run has no spread


STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t with `freedom` >= 1 degrees of freedom, to three digits."""
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    # The first terms of its expansion about the quantile of the normal distribution.
    return 1.95996 + 2.37227 / freedom + 2.8225 / freedom**2 + 2.556 / freedom**3


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b between two lists of numbers, ties accounted for; NaN where either has no order.

    >>> kendall_tau([1, 2, 3, 4], [1, 2, 4, 3])
    0.6666666666666666
    """
    agreement, ordered_first, ordered_second = 0, 0, 0
    for (a, b), (c, d) in combinations(zip(first, second, strict=True), 2):
        sign_first, sign_second = (a > c) - (a < c), (b > d) - (b < d)
        agreement += sign_first * sign_second
        ordered_first += abs(sign_first)
        ordered_second += abs(sign_second)
    return agreement / sqrt(ordered_first * ordered_second) if ordered_first and ordered_second else nan
