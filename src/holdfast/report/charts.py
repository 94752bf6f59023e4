"""Which figures an experiment or a comparison of runs gets, each with its numbers and a description in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import TYPE_CHECKING

from holdfast.experiments import Table, Verdict
from holdfast.report.figures import draw_bars, draw_curves, draw_heatmaps, draw_profiles
from holdfast.report.groups import Comparison, slug
from holdfast.report.numbers import Numbers
from holdfast.report.series import (
    Bar,
    Course,
    Profile,
    bar_numbers,
    bars,
    curve_numbers,
    curves,
    heatmap_numbers,
    heatmaps,
    profile_numbers,
)
from holdfast.report.tables import filled_columns, filled_groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Chart", "comparison_bars", "comparison_charts", "matrix_charts", "table_charts"]

MANY_COLUMNS = 4
"""From so many columns on, one picture of lines says more than as many of bars."""


@dataclass(frozen=True)
class Chart:
    """A figure that is yet to be drawn."""

    title: str
    alt: str
    """What is to be seen, in words."""
    numbers: Numbers
    draw: Callable[..., Figure]
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
    if lines := curves(comparison):
        ends = _ranking((line.label, line.seen.mean[-1]) for line in lines)
        alt = f"Lines of accuracy over tasks on {comparison.title}. Mean accuracy after the last task: {ends}."
        title = f"Accuracy over tasks: {comparison.title}"
        charts.append(Chart(title, alt, curve_numbers(lines), partial(draw_curves, lines)))
    return charts + matrix_charts(comparison)


def matrix_charts(comparison: Comparison) -> list[Chart]:
    """The accuracy matrices of a comparison in one figure, if it has any."""
    charts = []
    if maps := heatmaps(comparison):
        ends = _ranking((heatmap.label, heatmap.rows[-1][0]) for heatmap in maps)
        alt = f"Accuracy matrices on {comparison.title}, tasks across, time down. First task at the end: {ends}."
        title = f"Accuracy matrices: {comparison.title}"
        charts.append(Chart(title, alt, heatmap_numbers(maps), partial(draw_heatmaps, maps), folded=True))
    return charts


def comparison_bars(comparison: Comparison) -> Chart:
    """Final accuracy of each variant of a comparison, without published numbers."""
    given = bars(comparison)
    alt = f"Bars of final accuracy on {comparison.title}: {_ranking((bar.label, bar.mean) for bar in given)}."
    return Chart(f"Final accuracy: {comparison.title}", alt, bar_numbers(given), partial(draw_bars, given))


def table_charts(table: Table) -> list[Chart]:
    """The figures of an experiment's numbers: lines where its columns are ordered or many, else bars per column."""
    charts = []
    for group in filled_groups(table):
        columns = filled_columns(table, group)
        ordered = _ordered_columns(table, group, columns)
        if ordered:
            charts.append(_profile_chart(table, group, ordered))
        charts += [_bar_chart(table, group, column) for column in columns if column not in ordered]
    return [chart for chart in charts if len(chart.numbers.rows) > 2]


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
    """Lines over the columns, or over the rows where it is the columns that are methods."""
    cells = [v for v in table.verdicts if v.cell.group == group and v.cell.column in columns]
    by_row = not all(v.cell.column == v.cell.config.method for v in cells)
    labels = table.rows(group) if by_row else list(columns)
    places = list(columns) if by_row else table.rows(group)
    at = {((v.cell.row, v.cell.column) if by_row else (v.cell.column, v.cell.row)): v for v in cells}
    profiles = [_profile(label, [at.get((label, place)) for place in places]) for label in labels]
    metrics = {v.cell.metric for v in cells}
    measure = cells[0].measure
    unit = f" ({measure.label.rpartition('(')[2]}" if measure.label.endswith(")") else ""
    axis = measure.label if len(metrics) == 1 else _stem(measure.name).replace("_", " ") + unit
    ticks, across = _ticks(places)
    title = f"{table.experiment.title}: {group}"
    ends = _ranking((profile.label, profile.ours.mean[-1]) for profile in profiles)
    alt = f"Lines of {axis} over {', '.join(places)}. At {places[-1]}: {ends}."
    numbers = profile_numbers(profiles, places)
    return Chart(title, alt, numbers, partial(draw_profiles, profiles, ticks, axis=axis, across=across))


def _ticks(places: Sequence[str]) -> tuple[list[str], str]:
    """Places without the words they all begin or end with, and those words: `beta 0.5`, `beta 1` -> 0.5, 1; beta."""
    words = [place.replace("_", " ").split() for place in places]
    for own, shared in ((-1, slice(None, -1)), (0, slice(1, None))):
        common = {" ".join(word[shared]) for word in words}
        if len(places) > 1 and len(common) == 1:
            return [word[own] for word in words], common.pop()
    return list(places), ""


def _profile(label: str, verdicts: Sequence[Verdict | None]) -> Profile:
    nan = float("nan")
    method = next((v.cell.config.method for v in verdicts if v is not None), label)
    ours = Course(tuple(v.mean if v else nan for v in verdicts), tuple(v.std if v else nan for v in verdicts))
    published = tuple(v.published.mean if v and v.published else nan for v in verdicts)
    return Profile(label, method, ours, published)


def _bar_chart(table: Table, group: str, column: str) -> Chart:
    """Ours against the published in one column of a block."""
    verdicts = [v for row in table.rows(group) if (v := table.at(group, row, column)) is not None]
    given = [_bar(verdict) for verdict in verdicts if verdict.n or verdict.published]
    measure = verdicts[0].measure
    where = group if column == measure.name else f"{column}, {group}"
    title = f"{measure.label[:1].upper()}{measure.label[1:]}: {where}"
    alt = f"Bars of {measure.label}, {where}. Ours: {_ranking((bar.label, bar.mean) for bar in given)}."
    draw = partial(
        draw_bars, given, axis=measure.label, decimals=measure.decimals, ascending=not measure.higher_is_better
    )
    return Chart(title, alt, bar_numbers(given), draw)


def _bar(verdict: Verdict) -> Bar:
    nan = float("nan")
    published = verdict.published
    return Bar(
        verdict.cell.row,
        verdict.cell.config.method,
        verdict.mean,
        verdict.std,
        verdict.n,
        published.mean if published else nan,
        published.std if published and published.std is not None else nan,
    )


def _ranking(pairs: Iterable[tuple[str, float]]) -> str:
    """Names and numbers from the largest down."""
    found = sorted(((label, value) for label, value in pairs if not isnan(value)), key=lambda pair: -pair[1])
    return ", ".join(f"{label} {value:.1f}" if abs(value) >= 2 else f"{label} {value:.3f}" for label, value in found)
