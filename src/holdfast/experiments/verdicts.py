"""Ours beside the published: does a cell agree, does the order of the methods agree, does a whole column lean.

**A cell.** Ours are n runs with mean m and sample standard deviation s; the paper's are n_p = 3 with m_p and s_p. If
both came from the same experiment, they have one spread, estimated from both together, and the difference m - m_p has
the 90 % confidence interval

    s_pool^2 = ((n - 1) s^2 + (n_p - 1) s_p^2) / (n + n_p - 2)
    m - m_p  +-  t(90 %, n + n_p - 2) * s_pool * sqrt(1 / n + 1 / n_p)

It is compared with the band of differences that do not matter (`Measure.band`: 2 points, 0.04 for probabilities):

- **agrees**: the interval lies inside the band. This is the equivalence test of two one-sided tests at 5 % each.
- **differs**: the interval lies outside the band; or our runs scatter more than ten times as widely as the published
  ones and as the band (ten is where the 99 % quantile of F(2, 2) lies), so that they are not the same experiment.
- **open**: neither, or fewer than three runs. More runs would decide, unless the interval would be too wide with any
  number of them, as n_p stays 3.

Why 2 points: in the paper's Table 1 a regularizer gains 5 points over er (the median of 100), which 2 points do not
turn around; and three runs against three can tell such a difference, at the median published spread of 0.7.

A number published without a spread counts as one run.

**A column.** Differences of all methods may be small and yet all have the same sign. Methods share seeds, and with them
the order of samples, initial weights or angles of rotation, so that their differences are not independent. The mean
difference of a column is therefore computed seed by seed, and its 95 % interval comes from how those means scatter. The
paper's methods share their seeds as well; their spreads are added up as if they moved together, the worst case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan, nan, sqrt
from statistics import fmean
from typing import Literal, NamedTuple

from holdfast.analysis.claims import Claim, Place, check_claims
from holdfast.analysis.comparisons import REPLAY
from holdfast.config import RunConfig
from holdfast.experiments.base import Cell, Derived, Experiment
from holdfast.experiments.measures import MEASURES, Measure
from holdfast.experiments.published import PUBLISHED_RUNS, Published
from holdfast.experiments.statistics import kendall_tau, sign_test, student_t
from holdfast.experiments.stored import Results, Stored
from holdfast.metrics import mean_std
from holdfast.results import RunResult

__all__ = ["JUDGED", "Lean", "Rank", "Status", "Table", "Verdict", "assess", "claims", "difference_interval", "judge"]

FEWEST = 3
"""Runs without which there is no verdict."""
SCATTER = 10.0
NORMAL = 1.645
"""Of the normal distribution, 90 % lies within so many standard deviations."""

Status = Literal["agrees", "differs", "open", "missing", "unpublished"]
JUDGED: tuple[Status, ...] = ("agrees", "differs", "open")
"""What a cell can be that has a run of ours and a published number."""


@dataclass(frozen=True)
class Verdict:
    """One cell, ours beside the published. Numbers are NaN where they are not known."""

    cell: Cell
    values: tuple[float, ...]
    """One per finished run, in the order of the seeds."""
    stored: tuple[Stored, ...]
    """The finished runs."""
    mean: float
    std: float
    """Sample standard deviation (n - 1)."""
    difference: float
    """Ours minus published."""
    interval: tuple[float, float]
    """Its 90 % confidence interval."""
    status: Status
    """The verdict; `missing` without a finished run, `unpublished` without a published number."""
    reason: str
    """The rule that decided, with its numbers."""

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


@dataclass(frozen=True)
class Lean:
    """Whether the differences of a column, ours minus published, lean to one side."""

    column: str
    above: int
    """Cells where ours is larger."""
    n: int
    """Cells compared."""
    sign_p: float
    """p-value of the sign test, as if the cells were independent: too small where they share seeds."""
    mean: float
    """Mean difference over the cells."""
    low: float
    high: float
    """Its 95 % interval, seeds that cells share accounted for; NaN if all cells share fewer than three seeds."""
    seeds: tuple[int, ...]
    """The seeds that all cells share."""
    decimals: int = 2

    @property
    def direction(self) -> Literal["over", "under", "open"]:
        """`over` or `under` the paper if the interval excludes 0."""
        return "over" if self.low > 0 else "under" if self.high < 0 else "open"

    @property
    def reason(self) -> str:
        """What was found, in a sentence."""
        digits = self.decimals
        start = f"{self.above} of {self.n} cells lie over the paper; mean difference {self.mean:+.{digits}f}"
        if isnan(self.low):
            alone = f"p = {self.sign_p:.2g} by the sign test if cells were independent"
            return f"{start} ({alone}); seeds they share: {len(self.seeds)}, and it takes {FEWEST} to tell"
        shared = f"95 % interval {self.low:+.{digits}f} to {self.high:+.{digits}f} over {len(self.seeds)} shared seeds"
        if self.direction == "open":
            return f"{start} ({shared}): the seeds that all methods share can explain it"
        return f"{start} ({shared}): the column lies {self.direction} the paper as a whole; compare methods within it"


class Rank(NamedTuple):
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

    @cached_property
    def filled(self) -> list[str]:
        """Blocks with at least one result."""
        return list(dict.fromkeys(verdict.cell.group for verdict in self.verdicts if verdict.n))

    @cached_property
    def runs(self) -> dict[RunConfig, RunResult]:
        """The results behind the cells, each once: cells may share runs."""
        return {stored.config: stored.result for verdict in self.verdicts for stored in verdict.stored}

    def part(self, group: str, *, missing: bool = False) -> Table:
        """One block, without columns that have no result, and without such rows unless `missing`."""
        inside = [verdict for verdict in self.verdicts if verdict.cell.group == group]
        columns = {verdict.cell.column for verdict in inside if verdict.n}
        rows = {verdict.cell.row for verdict in inside if verdict.n or missing}
        return Table(self.experiment, tuple(v for v in inside if v.cell.column in columns and v.cell.row in rows))

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
        places: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for verdict in self.verdicts:
            if verdict.published is not None and not isnan(verdict.mean):
                pairs = places.setdefault((verdict.cell.group, verdict.cell.column), [])
                pairs.append((verdict.mean, verdict.published.mean))
        return [
            Rank(*place, kendall_tau(*zip(*pairs, strict=True)), len(pairs))
            for place, pairs in places.items()
            if len(pairs) > 1
        ]

    @cached_property
    def derived(self) -> Derived:
        """What the experiment computes from its means: column -> row -> number; empty for most."""
        return self.experiment.derive(self) if self.experiment.derive else {}

    @cached_property
    def sources(self) -> list[str]:
        """Where published numbers come from that are not the paper's: a sentence per source."""
        found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
        for cell in (verdict.cell for verdict in self.verdicts):
            if cell.published is not None and cell.published.source:
                rows, columns = found.setdefault(cell.published.source, ({}, {}))
                rows[cell.row], columns[cell.column] = None, None
        return [f"{', '.join(rows)} on {', '.join(columns)}: {source}" for source, (rows, columns) in found.items()]

    @cached_property
    def leans(self) -> list[Lean]:
        """Whether our numbers lean to one side of the paper's, for every column with two comparable cells or more."""
        found = []
        for column in self.columns:
            cells = [v for v in self.verdicts if v.cell.column == column and v.status in JUDGED]
            if len(cells) > 1:
                found.append(_lean(column, cells))
        return found

    def count(self, status: Status) -> int:
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
    usable = tuple(stored for stored, value in read if not isnan(value))
    values = tuple(value for _, value in read if not isnan(value))
    mean, std = mean_std(values)
    difference, interval = nan, (nan, nan)
    status: Status = "missing" if not values else "unpublished"
    reason = "no run yet" if not values else "no published number is known"
    if values and cell.published is not None:
        difference = mean - cell.published.mean
        half = difference_interval(len(values), std, cell.published)
        interval = (difference - half, difference + half)
        status, reason = _verdict(len(values), std, interval, cell.published, measure)
    return Verdict(cell, values, usable, mean, std, difference, interval, status, reason)


def difference_interval(n: int, std: float, published: Published) -> float:
    """Half the 90 % interval of the difference of means, by the formula at the top; NaN if no spread is known."""
    their_n = _runs_of(published)
    freedom = n + their_n - 2
    if freedom == 0:
        return nan
    ours = (n - 1) * std**2 if n > 1 else 0.0
    theirs = (their_n - 1) * published.std**2 if published.std is not None else 0.0
    return student_t(0.90, freedom) * sqrt((ours + theirs) / freedom) * sqrt(1 / n + 1 / their_n)


def _runs_of(published: Published) -> int:
    return 1 if published.std is None else PUBLISHED_RUNS


def _is_decidable(n: int, interval: tuple[float, float], published: Published, band: float) -> bool:
    """Whether more runs of ours would decide, if mean and spread stayed as they are."""
    difference, half = fmean(interval), (interval[1] - interval[0]) / 2
    their_n = _runs_of(published)
    # With any number of runs, t becomes the normal distribution's, and the paper's few runs remain.
    half *= NORMAL / student_t(0.90, n + their_n - 2) * sqrt(1 / their_n) / sqrt(1 / n + 1 / their_n)
    return abs(difference) + half <= band or abs(difference) - half > band


def _verdict(
    n: int, std: float, interval: tuple[float, float], published: Published, measure: Measure
) -> tuple[Status, str]:
    """The verdict on n runs of this spread and difference, and the rule that decided it."""
    digits, band = measure.decimals, measure.band
    low, high = interval
    if n < FEWEST:
        return "open", f"{n} {'run' if n == 1 else 'runs'}, {FEWEST} are needed"
    if std > SCATTER * max(published.std or 0.0, band):
        spread = "no spread" if published.std is None else f"{published.std:.{digits}f}"
        return "differs", f"our runs scatter by {std:.{digits}f}, the published by {spread}"
    told = f"the difference lies between {low:+.{digits}f} and {high:+.{digits}f} (90 %)"
    if -band <= low and high <= band:
        return "agrees", f"{told}, inside ±{band:g}"
    if low > band or high < -band:
        return "differs", f"{told}, outside ±{band:g}"
    more = "more runs would decide"
    if not _is_decidable(n, interval, published, band):
        more = "more runs of ours would hardly decide, as the paper has few"
    return "open", f"{told}, neither inside nor outside ±{band:g}: {more}"


def _lean(column: str, cells: Sequence[Verdict]) -> Lean:
    differences, digits = [cell.difference for cell in cells], cells[0].measure.decimals
    above = sum(difference > 0 for difference in differences)
    by_seed = [dict(zip((stored.config.seed for stored in cell.stored), cell.values, strict=True)) for cell in cells]
    seeds = tuple(sorted(set.intersection(*map(set, by_seed))))
    mean, half = fmean(differences), nan
    if len(seeds) >= FEWEST:
        theirs = fmean(cell.published.mean for cell in cells if cell.published)
        mean, std = mean_std([fmean(values[seed] for values in by_seed) - theirs for seed in seeds])
        spread = fmean(cell.published.std or 0.0 for cell in cells if cell.published)
        # Both parts have few degrees of freedom; the smaller number makes the interval wide enough.
        freedom = min(len(seeds), PUBLISHED_RUNS) - 1
        half = student_t(0.95, freedom) * sqrt(std**2 / len(seeds) + spread**2 / PUBLISHED_RUNS)
    return Lean(column, above, len(cells), sign_test(above, len(cells)), mean, mean - half, mean + half, seeds, digits)


def claims(verdicts: Iterable[Verdict]) -> list[Claim]:
    """Every claim, checked on the means among the verdicts and on the published numbers of the same cells."""
    # Numbers by measure, place and method.
    ours: dict[str, dict[Place, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    theirs: dict[str, dict[Place, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for verdict in verdicts:
        config, published = verdict.cell.config, verdict.published
        # A cell with its own alpha or beta is no method of the paper's comparison; its row then is not the method.
        if config.method not in REPLAY or verdict.cell.row != config.method:
            continue
        # Other papers ran the same methods with other settings.
        if config.buffer_size is None or (published is not None and published.source):
            continue
        metric, place = verdict.cell.metric, Place.of(config)
        if not isnan(verdict.mean):
            ours[metric][place][config.method] = verdict.mean
        if published is not None:
            theirs[metric][place][config.method] = published.mean
    return check_claims(ours, theirs)
