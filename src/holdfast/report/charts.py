"""Which figures an experiment or a comparison of runs gets, each with its numbers and a description in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import TYPE_CHECKING

from holdfast.analysis.comparisons import Comparison
from holdfast.experiments import Table
from holdfast.report.draw.runs import draw_dots, draw_heatmaps, draw_lines, task_ticks
from holdfast.report.numbers import Numbers
from holdfast.report.series import (
    Score,
    curve_numbers,
    curves,
    heatmap_numbers,
    heatmaps,
    profile_numbers,
    profiles,
    score_numbers,
    scores,
)
from holdfast.report.tables import filled_columns, filled_groups
from holdfast.report.text import slug

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Chart", "Draw", "comparison_charts", "matrix_charts", "ranking", "score_charts", "table_charts"]

Draw = Callable[..., "Figure"]
MANY_COLUMNS = 4
"""From this number of columns on, one figure of lines says more than a figure of dots for each."""


@dataclass(frozen=True)
class Chart:
    """A figure that is yet to be drawn."""

    title: str
    alt: str
    """What it shows, in words."""
    numbers: Numbers
    draw: Draw
    """Makes the figure; takes `title` as a keyword."""
    folded: bool = False
    """Whether a page shows it on demand only."""

    @property
    def slug(self) -> str:
        """The title as a file name and HTML id."""
        return slug(self.title)


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """Accuracy over tasks and accuracy matrices of the runs of a comparison; none for streams without tasks."""
    charts = []
    if found := curves(comparison):
        ends = ranking((line.label, line.mean[-1]) for line in found.seen)
        alt = f"Lines of accuracy over tasks on {comparison.title}. Mean accuracy after the last task: {ends}."
        panels = {"Accuracy on all tasks seen so far": found.seen, "Accuracy on the first task": found.first}
        ticks = task_ticks(max(len(line.mean) for line in found.seen))
        draw = partial(draw_lines, panels, ticks)
        charts.append(Chart(f"Accuracy over tasks: {comparison.title}", alt, curve_numbers(found), draw))
    return charts + matrix_charts(comparison)


def matrix_charts(comparison: Comparison) -> list[Chart]:
    """The accuracy matrices of a comparison in one figure, if it has any."""
    maps = heatmaps(comparison)
    if not maps:
        return []
    ends = ranking((heatmap.label, heatmap.rows[-1][0]) for heatmap in maps)
    alt = f"Accuracy matrices on {comparison.title}, tasks across, time down. First task at the end: {ends}."
    title = f"Accuracy matrices: {comparison.title}"
    return [Chart(title, alt, heatmap_numbers(maps), partial(draw_heatmaps, maps), folded=True)]


def score_charts(comparison: Comparison) -> list[Chart]:
    """Final accuracy of the variants of a comparison; none for a single one, which has nothing to be compared with."""
    given = scores(comparison)
    return [_score_chart(f"Final accuracy: {comparison.title}", given, "accuracy (%)")] if len(given) > 1 else []


def table_charts(table: Table, groups: Sequence[str] | None = None) -> list[Chart]:
    """The figures of an experiment's numbers: lines where its columns are ordered or many, else dots per column.

    Of all blocks with results, or of these `groups`. A column of one or two numbers gets no figure.
    """
    charts = []
    for group in filled_groups(table) if groups is None else groups:
        columns = filled_columns(table, group)
        ordered = _ordered_columns(table, group, columns)
        if ordered:
            charts.append(_profile_chart(table, group, ordered))
        for column in columns:
            cells = [v for row in table.rows(group) if (v := table.at(group, row, column)) is not None]
            if column not in ordered and len(cells) > 2 and sum(v.n > 0 for v in cells) > 1:
                charts.append(_column_chart(table, group, column))
    return charts


def ranking(pairs: Iterable[tuple[str, float]]) -> str:
    """Names and numbers from the largest down."""
    found = sorted(((label, value) for label, value in pairs if not isnan(value)), key=lambda pair: -pair[1])
    return ", ".join(f"{label} {value:.1f}" if abs(value) >= 2 else f"{label} {value:.3f}" for label, value in found)


def _score_chart(title: str, given: Sequence[Score], axis: str, *, decimals: int = 2, ascending: bool = False) -> Chart:
    """Scores as dots, the best first, those without a number last."""
    sign = 1 if ascending else -1
    order = sorted(given, key=lambda one: (isnan(one.mean), sign * (one.published if isnan(one.mean) else one.mean)))
    printed = "    ◇ published" if any(not isnan(one.published) for one in given) else ""
    panels = {f"mean ± std over seeds (n){printed}": [one.dot(decimals) for one in order]}
    alt = f"Dots of {axis}. {title}. Ours: {ranking((one.label, one.mean) for one in given)}."
    return Chart(title, alt, score_numbers(given), partial(draw_dots, panels, axis=axis))


def _column_chart(table: Table, group: str, column: str) -> Chart:
    """Ours against the published in one column of a block."""
    verdicts = [v for row in table.rows(group) if (v := table.at(group, row, column)) is not None]
    measure = verdicts[0].measure
    where = group if column == measure.name else f"{column}, {group}"
    return _score_chart(
        f"{measure.label[:1].upper()}{measure.label[1:]}: {where}",
        [Score.of(verdict) for verdict in verdicts if verdict.n or verdict.published],
        measure.label,
        decimals=measure.decimals,
        ascending=not measure.higher_is_better,
    )


def _ordered_columns(table: Table, group: str, columns: Sequence[str]) -> list[str]:
    """The columns that belong on one axis: all of them if the experiment says so, or a family of many measures."""
    if table.experiment.figure == "lines":
        return list(columns)
    stems = {column: _stem(_metric(table, group, column)) for column in columns}
    family = [column for column in columns if stems[column] == stems[columns[0]] != _metric(table, group, column)]
    return family if len(family) >= MANY_COLUMNS else []


def _metric(table: Table, group: str, column: str) -> str:
    return next(v.cell.metric for v in table.verdicts if (v.cell.group, v.cell.column) == (group, column))


def _stem(metric: str) -> str:
    """What the measures of a family have in common: `task_probability` of `task_probability_3`."""
    return metric.rpartition("_")[0] or metric


def _profile_chart(table: Table, group: str, columns: Sequence[str]) -> Chart:
    """Lines over the columns, or over the rows where the columns are the methods."""
    cells = [v for v in table.verdicts if v.cell.group == group and v.cell.column in columns]
    by_row = not all(v.cell.column == v.cell.config.method for v in cells)
    labels, places = (table.rows(group), list(columns)) if by_row else (list(columns), table.rows(group))
    at = {((v.cell.row, v.cell.column) if by_row else (v.cell.column, v.cell.row)): v for v in cells}
    ours, published = profiles([(label, [at.get((label, place)) for place in places]) for label in labels])
    panels = {"ours, mean over seeds": ours}
    if any(not isnan(value) for line in published for value in line.mean):
        panels["published"] = published
    words, across = _ticks(places)
    axis = cells[0].measure.label
    if len({v.cell.metric for v in cells}) > 1:  # a family such as task_probability_1, task_probability_2, ...
        across, _, axis = _stem(cells[0].cell.metric).partition("_")
    ends = ranking((line.label, line.mean[-1]) for line in ours)
    alt = f"Lines of {axis} over {', '.join(places)}. At {places[-1]}: {ends}."
    draw = partial(draw_lines, panels, dict(enumerate(words, start=1)), axis=axis, across=across)
    return Chart(f"{table.experiment.title}: {group}", alt, profile_numbers(ours, published, places), draw)


def _ticks(places: Sequence[str]) -> tuple[list[str], str]:
    """Places without the words they all begin or end with, and those words: `beta 0.5`, `beta 1` -> 0.5, 1; beta."""
    words = [place.replace("_", " ").split() for place in places]
    for own, shared in ((-1, slice(None, -1)), (0, slice(1, None))):
        common = {" ".join(word[shared]) for word in words}
        if len(places) > 1 and len(common) == 1:
            return [word[own] for word in words], common.pop()
    return list(places), ""
