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
from holdfast.experiments import Table, Verdict
from holdfast.experiments.measures import BY_CATEGORY
from holdfast.report.draw.analyses import draw_recency, draw_reliability, draw_robustness
from holdfast.report.draw.runs import draw_dots, draw_heatmaps, draw_lines, task_ticks
from holdfast.report.numbers import Numbers, Value
from holdfast.report.series import Dot, Heatmap, Line, curves, heatmaps, scores
from holdfast.report.tables import cell_numbers, column_title
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
    if matrices := matrix_chart(f"Accuracy matrices: {comparison.title}", heatmaps(comparison), folded=True):
        charts.append(matrices)
    return charts


def matrix_chart(title: str, maps: Sequence[Heatmap], *, folded: bool = False) -> Chart | None:
    """Accuracy matrices in one figure; None if there are none, as for the other charts."""
    if not maps:
        return None
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


def table_charts(table: Table) -> dict[str, list[Chart]]:
    """The figures of an experiment, by block with results: of the kind that it asks for. One number has no figure."""
    kinds = {
        "differences": (_dot_chart,),
        "lines": (_profile_chart,),
        "matrices": (_matrices_chart,),
        "gains": (_gains_chart,),
        "reliability": (_dot_chart, _reliability_chart),
        "recency": (_recency_chart,),
        "robustness": (_robustness_chart,),
    }
    makers = kinds[table.experiment.figure]
    parts = {group: table.part(group) for group in table.filled}
    made = {group: [make(part, group) for make in makers] for group, part in parts.items()}
    return {group: [chart for chart in charts if chart is not None] for group, charts in made.items()}


def _means(part: Table, group: str) -> dict[str, list[float]]:
    """Our means by row, one for each column, NaN where there is none."""
    found = {row: [part.at(group, row, column) for column in part.columns] for row in part.rows(group)}
    return {row: [v.mean if v else nan for v in cells] for row, cells in found.items()}


def _dot_chart(part: Table, group: str) -> Chart | None:
    """A panel for each column of a few cells: ours minus published, or ours where nothing was published.

    The numbers stand in the table, so they are not repeated beside the dots.
    """
    panels: dict[str, list[Dot]] = {}
    bands: dict[str, float] = {}
    for column in part.columns:
        cells = [v for v in part.verdicts if v.cell.column == column and v.n]
        compared = [v for v in cells if v.published is not None]
        if len(compared or cells) >= FEWEST:
            title = column_title(column)
            panels[title] = [_dot(v, difference=bool(compared)) for v in compared or cells]
            if compared:
                bands[title] = cells[0].measure.band
    if not panels:
        return None
    axis = "ours − published" if bands else part.verdicts[0].measure.label
    what = "Ours minus published" if bands else f"{axis[0].upper()}{axis[1:]}"
    title = f"{what}: {part.experiment.name}" + (f", {group}" if group != axis else "")
    words = "; ".join(f"{what}: {ranking((dot.label, dot.mean) for dot in dots)}" for what, dots in panels.items())
    order = [row for row in part.rows(group) if any(dot.label == row for dots in panels.values() for dot in dots)]
    draw = partial(draw_dots, panels, order=order, bands=bands, axis=axis)
    return Chart(title, f"{title}. {words}.", cell_numbers([part]), draw)


def _dot(v: Verdict, *, difference: bool) -> Dot:
    ends = v.interval if difference else (v.mean - v.std, v.mean + v.std)
    return Dot(v.cell.row, v.cell.config.method, v.difference if difference else v.mean, *ends)


def _profile_chart(part: Table, group: str) -> Chart | None:
    """Lines over the columns, or over the rows where the columns are the methods; ours beside the published."""
    by_row = not all(v.cell.column == v.cell.config.method for v in part.verdicts)
    labels, places = (part.rows(group), part.columns) if by_row else (part.columns, part.rows(group))
    ours, theirs = [], []
    for label in labels:
        found = [part.at(group, *((label, place) if by_row else (place, label))) for place in places]
        method = next((v.cell.config.method for v in found if v is not None), label)
        means, stds = (tuple(getattr(v, name) if v else nan for v in found) for name in ("mean", "std"))
        printed = tuple(v.published.mean if v and v.published else nan for v in found)
        ours.append(Line(label, method, means, stds))
        theirs.append(Line(label, method, printed, (nan,) * len(found)))
    words, across = _ticks(places)
    axis = part.verdicts[0].measure.label
    ends = ranking((line.label, line.mean[-1]) for line in ours)
    alt = f"Lines of {axis} over {', '.join(places)}. At {places[-1]}: {ends}."
    panels = {"ours, mean over seeds": ours, "published": theirs}
    draw = partial(draw_lines, panels, dict(enumerate(words, start=1)), axis=axis, across=across)
    return Chart(f"{part.experiment.title}: {group}", alt, cell_numbers([part]), draw)


def _ticks(places: Sequence[str]) -> tuple[list[str], str]:
    """Places without the words they all begin or end with, and those words: `beta 0.5`, `beta 1` -> 0.5, 1; beta."""
    words = [place.split() for place in places]
    for own, shared in ((-1, slice(None, -1)), (0, slice(1, None))):
        common = {" ".join(word[shared]) for word in words}
        if len(places) > 1 and len(common) == 1:
            return [word[own] for word in words], common.pop()
    return list(places), ""


def _matrices_chart(part: Table, group: str) -> Chart | None:
    found = comparisons(part.runs.values())
    made = (matrix_chart(f"Accuracy matrices: {each.title}", heatmaps(each)) for each in found)
    return next(filter(None, made), None)  # a block is of one benchmark and buffer


def _gains_chart(part: Table, group: str) -> Chart | None:
    return gain_chart(f"{part.experiment.title}: {group}", part.derived)


def _reliability_chart(part: Table, group: str) -> Chart | None:
    """Reliability diagrams of the runs whose logits are there."""
    shown = []
    for verdict in part.verdicts:
        found = [stored.analysis.calibration for stored in verdict.stored if stored.analysis]
        if bins := [each for each in found if each]:
            shown.append((verdict.cell.row, verdict.cell.config.method, pool_calibrations(bins), verdict.mean))
    return reliability_chart(f"{part.experiment.title}: reliability, {group}", shown)


def _recency_chart(part: Table, group: str) -> Chart | None:
    rows = _means(part, group).items()
    found = [(row, row, values[:-1], values[-1]) for row, values in rows if not any(map(isnan, values))]
    return recency_chart(f"{part.experiment.title}: {group}", found)


def _robustness_chart(part: Table, group: str) -> Chart | None:
    rows = sorted(_means(part, group).items(), key=lambda pair: -pair[1][-1])
    title = f"{part.experiment.title}: {group}"
    names = [BY_CATEGORY.get(column, "mRA") for column in part.columns]
    alt = f"{title}. Mean robust accuracy: {ranking((row, values[-1]) for row, values in rows)}."
    return Chart(title, alt, cell_numbers([part]), partial(draw_robustness, names, rows))


# --- of tables and analyses ---


def gain_chart(
    title: str, gains: Mapping[str, Mapping[str, float | None]], methods: Mapping[str, str] | None = None
) -> Chart | None:
    """Relative gains over er in percent, by kind and label, the largest mean gain on top; `methods` by label."""
    labels = dict.fromkeys(label for by_label in gains.values() for label in by_label)
    if not labels:
        return None
    order = sorted(labels, key=lambda label: -sum(by_label[label] or 0.0 for by_label in gains.values()))
    panels = {
        kind: [
            Dot(label, (methods or {}).get(label, label), gain, text=f"{gain:+.1f}")
            for label in order
            if (gain := by_label[label]) is not None
        ]
        for kind, by_label in gains.items()
    }
    columns = ("method", *(slug(kind.replace("%", "percent")).replace("-", "_") for kind in gains))
    numbers = Numbers(columns, [(label, *(by_label[label] for by_label in gains.values())) for label in labels])
    words = "; ".join(f"{kind}: {ranking((dot.label, dot.mean) for dot in dots)}" for kind, dots in panels.items())
    filled = {kind: dots for kind, dots in panels.items() if dots}
    return Chart(title, f"{title}. {words}.", numbers, partial(draw_dots, filled, order=order, from_zero=True))


def reliability_chart(title: str, found: Sequence[tuple[str, str, Calibration, float]]) -> Chart | None:
    """Reliability diagrams by label, method, bins and ECE in percent, the worst calibrated first."""
    if not found:
        return None
    order = sorted(found, key=lambda one: -one[3])
    rows: list[tuple[Value, ...]] = []
    for label, _, bins, ece in order:
        for number, values in enumerate(zip(bins.confidence, bins.accuracy, bins.count, strict=True)):
            edges = number / bins.bins, (number + 1) / bins.bins
            rows.append((label, ece, *edges, *(values if values[2] else (None, None, 0))))
    numbers = Numbers(("method", "ece_percent", "bin_from", "bin_to", "confidence", "accuracy", "count"), rows)
    alt = f"{title}. ECE in percent: {ranking((label, ece) for label, _, _, ece in order)}."
    return Chart(title, alt, numbers, partial(draw_reliability, order))


def recency_chart(title: str, found: Sequence[tuple[str, str, Sequence[float], float]]) -> Chart | None:
    """The average probability of each task by label, method and task, the one most biased to the last task first."""
    if not found:
        return None
    order = sorted(found, key=lambda one: -one[3])
    rows: list[tuple[Value, ...]] = [
        (label, gap, task, value) for label, _, values, gap in order for task, value in enumerate(values, start=1)
    ]
    numbers = Numbers(("method", "recency_gap", "task", "probability"), rows)
    alt = f"{title}. Last task minus first: {ranking((label, gap) for label, _, _, gap in order)}."
    return Chart(title, alt, numbers, partial(draw_recency, order))
