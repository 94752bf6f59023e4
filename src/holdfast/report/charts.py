"""Which figures a comparison of runs or a table gets, each with its numbers and a description in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from typing import TYPE_CHECKING

from holdfast.analysis import Calibration
from holdfast.analysis.calibration import pool_calibrations
from holdfast.analysis.comparisons import Comparison, comparisons
from holdfast.experiments import BY_CATEGORY, Table, Verdict
from holdfast.report.draw.analyses import draw_recency, draw_reliability, draw_robustness
from holdfast.report.draw.runs import draw_dots, draw_heatmaps, draw_lines, task_ticks
from holdfast.report.numbers import Numbers, Value
from holdfast.report.series import Dot, Heatmap, Line, curves, heatmaps, scores
from holdfast.report.tables import filled_columns, filled_groups
from holdfast.report.text import slug

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Chart",
    "comparison_charts",
    "gain_chart",
    "matrix_chart",
    "ranking",
    "recency_chart",
    "reliability_chart",
    "score_charts",
    "table_charts",
]

FEWEST = 3
"""Dots without which a figure says nothing that the table does not."""


@dataclass(frozen=True)
class Chart:
    """A figure that is yet to be drawn."""

    title: str
    alt: str
    """What it shows, in words."""
    numbers: Numbers
    draw: Callable[..., Figure]
    """Makes the figure; takes `title` as a keyword."""
    folded: bool = False
    """Whether a page shows it on demand only."""

    @property
    def slug(self) -> str:
        """The title as a file name and HTML id."""
        return slug(self.title)


def ranking(pairs: Iterable[tuple[str, float]]) -> str:
    """Names and numbers from the largest down."""
    found = sorted(((label, value) for label, value in pairs if not isnan(value)), key=lambda pair: -pair[1])
    return ", ".join(f"{label} {value:.1f}" if abs(value) >= 2 else f"{label} {value:.3f}" for label, value in found)


# --- of runs ---


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """Accuracy over tasks and accuracy matrices of the runs of a comparison; none for streams without tasks."""
    charts = []
    if found := curves(comparison):
        columns = ("line", "after_task", "seen_tasks_mean", "seen_tasks_std", "first_task_mean", "first_task_std")
        rows = [
            (seen.label, None if seen.is_level else stage, *numbers, seen.seeds)
            for seen, first in zip(*found, strict=True)
            for stage, numbers in enumerate(zip(seen.mean, seen.std, first.mean, first.std, strict=True), start=1)
        ]
        ends = ranking((line.label, line.mean[-1]) for line in found[0])
        alt = f"Lines of accuracy over tasks on {comparison.title}. Mean accuracy after the last task: {ends}."
        panels = dict(zip(("Accuracy on all tasks seen so far", "Accuracy on the first task"), found, strict=True))
        draw = partial(draw_lines, panels, task_ticks(max(len(line.mean) for line in found[0])))
        charts.append(Chart(f"Accuracy over tasks: {comparison.title}", alt, Numbers((*columns, "seeds"), rows), draw))
    if maps := heatmaps(comparison):
        charts.append(matrix_chart(f"Accuracy matrices: {comparison.title}", maps, folded=True))
    return charts


def matrix_chart(title: str, maps: Sequence[Heatmap], *, folded: bool = False) -> Chart:
    """Accuracy matrices in one figure."""
    rows: list[tuple[Value, ...]] = [
        (heatmap.label, stage, task, value, heatmap.seeds)
        for heatmap in maps
        for stage, row in enumerate(heatmap.rows, start=1)
        for task, value in enumerate(row, start=1)
        if not isnan(value)
    ]
    numbers = Numbers(("line", "after_task", "on_task", "accuracy_mean", "seeds"), rows)
    ends = ranking((heatmap.label, heatmap.rows[-1][0]) for heatmap in maps)
    alt = f"{title}, tasks across, time down. First task at the end: {ends}."
    return Chart(title, alt, numbers, partial(draw_heatmaps, maps), folded)


def score_charts(comparison: Comparison) -> list[Chart]:
    """Final accuracy of the variants of a comparison; none for a single one, which has nothing to be compared with."""
    dots = sorted(scores(comparison), key=lambda dot: -dot.mean)
    if len(dots) < 2:
        return []
    title = f"Final accuracy: {comparison.title}"
    numbers = Numbers(("line", "mean", "low", "high"), [(dot.label, dot.mean, dot.low, dot.high) for dot in dots])
    alt = f"Dots of accuracy in percent. {title}. {ranking((dot.label, dot.mean) for dot in dots)}."
    return [Chart(title, alt, numbers, partial(draw_dots, {"mean ± std over seeds (n)": dots}, axis="accuracy (%)"))]


# --- of tables ---


def table_charts(table: Table, groups: Sequence[str] | None = None) -> dict[str, list[Chart]]:
    """The figures of an experiment, by block: of all blocks with results, or of these `groups`.

    They are of the kind that the experiment asks for. Nothing is drawn of a single number.
    """
    kinds = {"lines": _profile_chart, "recency": _recency_chart, "robustness": _robustness_chart}
    made = {}
    for group in filled_groups(table) if groups is None else groups:
        kind = table.experiment.figure
        if kind == "matrices":
            found: list[Chart | None] = list(_matrix_charts(table, group))
        elif kind == "gains" and table.derived:
            found = [gain_chart(f"{table.experiment.title}: {group}", _by_row(table), {})]
        elif kind == "reliability":
            found = [_dot_chart(table, group), _reliability_chart(table, group)]
        else:
            found = [kinds.get(kind, _dot_chart)(table, group)]
        made[group] = [chart for chart in found if chart is not None]
    return made


def _cells(table: Table, group: str, column: str) -> list[Verdict]:
    """The cells of a column with a result, in the order of the rows."""
    found = (table.at(group, row, column) for row in table.rows(group))
    return [verdict for verdict in found if verdict is not None and verdict.n]


def _dot_chart(table: Table, group: str) -> Chart | None:
    """A panel for each column of a few cells: ours minus published, or ours where nothing was published.

    The numbers stand in the table, so that they are not written beside the dots.
    """
    panels: dict[str, list[Dot]] = {}
    bands: dict[str, float] = {}
    rows: list[tuple[Value, ...]] = []
    for column in filled_columns(table, group):
        cells = _cells(table, group, column)
        compared = [v for v in cells if v.published is not None]
        shown = compared or cells
        if len(shown) < FEWEST:
            continue
        measure = shown[0].measure
        title = column if column != measure.name else measure.label
        if compared:
            bands[title] = measure.band
        panels[title] = [_dot(v, difference=bool(compared)) for v in shown]
        for v in shown:
            theirs = v.published[:2] if v.published else (None, None)
            rows.append((v.cell.row, column, v.mean, v.std, v.n, *theirs, v.difference, *v.interval))
    if not panels:
        return None
    axis = "ours − published" if bands else cells[0].measure.label
    what = "Ours minus published" if bands else f"{axis[0].upper()}{axis[1:]}"
    title = f"{what}: {table.experiment.name}" + (f", {group}" if group != axis else "")
    columns = ("line", "at", "mean", "std", "seeds", "published_mean", "published_std", "difference", "low", "high")
    words = "; ".join(f"{what}: {ranking((dot.label, dot.mean) for dot in dots)}" for what, dots in panels.items())
    order = [row for row in table.rows(group) if any(dot.label == row for dots in panels.values() for dot in dots)]
    draw = partial(draw_dots, panels, order=order, bands=bands, axis=axis)
    return Chart(title, f"{title}. {words}.", Numbers(columns, rows), draw)


def _dot(v: Verdict, *, difference: bool) -> Dot:
    ends = v.interval if difference else (v.mean - v.std, v.mean + v.std)
    return Dot(v.cell.row, v.cell.config.method, v.difference if difference else v.mean, *ends)


def _profile_chart(table: Table, group: str) -> Chart | None:
    """Lines over the columns, or over the rows where the columns are the methods; ours beside the published."""
    columns = filled_columns(table, group)
    cells = {(v.cell.row, v.cell.column): v for v in table.verdicts if v.cell.group == group}
    by_row = not all(v.cell.column == v.cell.config.method for v in cells.values())
    labels, places = (table.rows(group), columns) if by_row else (columns, table.rows(group))
    ours, theirs, rows = [], [], []
    for label in labels:
        found = [cells.get((label, place) if by_row else (place, label)) for place in places]
        method = next((v.cell.config.method for v in found if v is not None), label)
        means = tuple(nan if v is None else v.mean for v in found)
        stds = tuple(nan if v is None else v.std for v in found)
        printed = tuple(nan if v is None or v.published is None else v.published.mean for v in found)
        ours.append(Line(label, method, means, stds))
        theirs.append(Line(label, method, printed, (nan,) * len(found)))
        rows += [(label, *values) for values in zip(places, means, stds, printed, strict=True)]
    words, across = _ticks(places)
    axis = next(iter(cells.values())).measure.label
    ends = ranking((line.label, line.mean[-1]) for line in ours)
    alt = f"Lines of {axis} over {', '.join(places)}. At {places[-1]}: {ends}."
    panels = {"ours, mean over seeds": ours, "published": theirs}
    draw = partial(draw_lines, panels, dict(enumerate(words, start=1)), axis=axis, across=across)
    numbers = Numbers(("line", "at", "mean", "std", "published_mean"), rows)
    return Chart(f"{table.experiment.title}: {group}", alt, numbers, draw)


def _ticks(places: Sequence[str]) -> tuple[list[str], str]:
    """Places without the words they all begin or end with, and those words: `beta 0.5`, `beta 1` -> 0.5, 1; beta."""
    words = [place.split() for place in places]
    for own, shared in ((-1, slice(None, -1)), (0, slice(1, None))):
        common = {" ".join(word[shared]) for word in words}
        if len(places) > 1 and len(common) == 1:
            return [word[own] for word in words], common.pop()
    return list(places), ""


def _matrix_charts(table: Table, group: str) -> Iterable[Chart]:
    runs = {s.config: s.result for v in table.verdicts if v.cell.group == group for s in v.stored}
    for comparison in comparisons(runs.values()):
        if maps := heatmaps(comparison):
            yield matrix_chart(f"Accuracy matrices: {comparison.title}", maps)


def _by_row(table: Table) -> dict[str, dict[str, float | None]]:
    """The gains that an experiment computes from its means: row -> kind -> percent."""
    names = dict.fromkeys(row for column in table.derived.values() for row in column)
    return {
        row: {title.partition(" gain")[0]: column.get(row) for title, column in table.derived.items()} for row in names
    }


def gain_chart(title: str, gains: Mapping[str, Mapping[str, float | None]], methods: Mapping[str, str]) -> Chart:
    """Relative gains over er in percent, by label and kind, the largest mean gain on top."""
    kinds = list(dict.fromkeys(kind for by_kind in gains.values() for kind in by_kind))
    means = {label: sum(value or 0.0 for value in by_kind.values()) for label, by_kind in gains.items()}
    order = sorted(means, key=lambda label: -means[label])
    panels = {
        kind: [
            Dot(label, methods.get(label, label), gain, text=f"{gain:+.1f}")
            for label in order
            if (gain := gains[label][kind]) is not None
        ]
        for kind in kinds
    }
    columns = ("method", *(f"{kind}_gain_percent" for kind in kinds))
    numbers = Numbers(columns, [(label, *(gains[label][kind] for kind in kinds)) for label in gains])
    alt = f"{title}. Gain in accuracy: {ranking((label, gains[label]['accuracy'] or 0.0) for label in gains)}."
    filled = {kind: dots for kind, dots in panels.items() if dots}
    return Chart(title, alt, numbers, partial(draw_dots, filled, order=order, from_zero=True))


def _reliability_chart(table: Table, group: str) -> Chart | None:
    """Reliability diagrams of the runs whose logits are there."""
    shown = []
    for row in table.rows(group):
        verdict = table.at(group, row, "ece")
        found = [s.analysis.calibration for s in verdict.stored if s.analysis] if verdict else []
        if verdict and (bins := [each for each in found if each]):
            shown.append((row, verdict.cell.config.method, pool_calibrations(bins), verdict.mean))
    return reliability_chart(f"{table.experiment.title}: reliability, {group}", shown) if shown else None


def reliability_chart(title: str, found: Sequence[tuple[str, str, Calibration, float]]) -> Chart:
    """Reliability diagrams by label, method, bins and ECE in percent, the worst calibrated first."""
    order = sorted(found, key=lambda one: -one[3])
    rows: list[tuple[Value, ...]] = []
    for label, _, bins, ece in order:
        for number, values in enumerate(zip(bins.confidence, bins.accuracy, bins.count, strict=True)):
            edges = number / bins.bins, (number + 1) / bins.bins
            rows.append((label, ece, *edges, *(values if values[2] else (None, None, 0))))
    numbers = Numbers(("method", "ece_percent", "bin_from", "bin_to", "confidence", "accuracy", "count"), rows)
    alt = f"{title}. ECE in percent: {ranking((label, ece) for label, _, _, ece in order)}."
    return Chart(title, alt, numbers, partial(draw_reliability, order))


def _recency_chart(table: Table, group: str) -> Chart | None:
    columns = [column for column in filled_columns(table, group) if column.startswith("task_probability")]
    found = []
    for row in table.rows(group):
        cells = [table.at(group, row, column) for column in (*columns, "recency_gap")]
        values = [v.mean for v in cells if v is not None and v.n]
        if len(values) == len(columns) + 1:
            found.append((row, row, values[:-1], values[-1]))
    return recency_chart(f"{table.experiment.title}: {group}", found) if columns and found else None


def recency_chart(title: str, found: Sequence[tuple[str, str, Sequence[float], float]]) -> Chart:
    """The average probability of each task by label, method and task, the one most biased to the last task first."""
    order = sorted(found, key=lambda one: -one[3])
    rows: list[tuple[Value, ...]] = [
        (label, gap, task, value) for label, _, values, gap in order for task, value in enumerate(values, start=1)
    ]
    alt = f"{title}. Last task minus first: {ranking((label, gap) for label, _, _, gap in order)}."
    numbers = Numbers(("method", "recency_gap", "task", "probability"), rows)
    return Chart(title, alt, numbers, partial(draw_recency, order))


def _robustness_chart(table: Table, group: str) -> Chart | None:
    columns = filled_columns(table, group)
    found = {row: [table.at(group, row, column) for column in columns] for row in table.rows(group)}
    rows = [(row, [nan if v is None else v.mean for v in cells]) for row, cells in found.items()]
    rows = [(row, values) for row, values in rows if not any(map(isnan, values))]
    if not rows:
        return None
    rows.sort(key=lambda pair: -pair[1][-1])
    title = f"{table.experiment.title}: {group}"
    names = [BY_CATEGORY.get(column, "mRA") for column in columns]
    numbers = Numbers(("method", *columns), [(row, *values) for row, values in rows])
    alt = f"{title}. Mean robust accuracy: {ranking((row, values[-1]) for row, values in rows)}."
    return Chart(title, alt, numbers, partial(draw_robustness, names, rows))
