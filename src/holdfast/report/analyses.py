"""The figures of analyses: which there are, and their numbers, computed apart from drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean

from holdfast.analysis import CATEGORIES, CORRUPTIONS, Estimate
from holdfast.analysis.findings import Findings, Summary
from holdfast.report.charts import Chart, Draw, ranking
from holdfast.report.draw.analyses import draw_recency, draw_reliability, draw_robustness, draw_tasks
from holdfast.report.draw.canvas import save_figure
from holdfast.report.draw.runs import draw_dots
from holdfast.report.numbers import Numbers, Value
from holdfast.report.series import Dot
from holdfast.report.text import slug

__all__ = ["analysis_charts", "write_analysis_figures"]

GAINS = ("accuracy", "recency", "calibration")
TRANSFERS: dict[str, Callable[[Summary], Estimate | None]] = {
    "forward transfer": lambda summary: summary.transfer.forward_transfer,
    "backward transfer": lambda summary: summary.transfer.backward_transfer,
    "forgetting": lambda summary: summary.transfer.forgetting,
}


def analysis_charts(found: Findings) -> dict[str, Chart]:
    """Every chart that there are numbers for, by the name of its file."""
    made = {
        "overview": _overview(found),
        "reliability": _reliability(found),
        "recency": _recency(found),
        "robustness": _robustness(found),
        "transfer": _transfer(found),
        "tasks": _tasks(found),
    }
    return {name: chart for name, chart in made.items() if chart is not None}


def write_analysis_figures(found: Findings, out: Path) -> list[Path]:
    """The charts in a folder of `out`, as SVG and PNG with the numbers as CSV and JSON; returns the PNGs."""
    folder = out / slug(found.title)
    return [
        save_figure(chart.draw(title=chart.title), folder / name, chart.numbers)
        for name, chart in analysis_charts(found).items()
    ]


def _chart(
    found: Findings, title: str, quantity: str, values: Iterable[tuple[str, float]], numbers: Numbers, draw: Draw
) -> Chart:
    """A chart that is described in words by the methods' `values` of a quantity."""
    title = f"{found.title}: {title}"
    return Chart(title, f"{title}. {quantity}: {ranking(values)}.", numbers, draw)


def _overview(found: Findings) -> Chart | None:
    """Relative gains over er in percent, the largest mean gain on top."""
    if not found.gains:
        return None
    methods = {summary.label: summary.method for summary in found.summaries}
    means = {label: fmean(v for v in gains.values() if v is not None) for label, gains in found.gains.items()}
    panels: dict[str, list[Dot]] = {kind: [] for kind in GAINS}
    for label in sorted(means, key=lambda label: -means[label]):
        for kind, gain in found.gains[label].items():
            if gain is not None:
                panels[kind].append(Dot(label, methods.get(label, label), gain, text=f"{gain:+.1f}"))
    numbers = Numbers(
        ("method", *(f"{kind}_gain_percent" for kind in GAINS)),
        [(label, *(gains[kind] for kind in GAINS)) for label, gains in found.gains.items()],
    )
    values = [(label, gains["accuracy"] or 0.0) for label, gains in found.gains.items()]
    draw = partial(draw_dots, {kind: dots for kind, dots in panels.items() if dots}, from_zero=True)
    return _chart(found, "relative gain over er (%)", "Gain in accuracy", values, numbers, draw)


def _reliability(found: Findings) -> Chart | None:
    """Reliability diagrams, the worst calibrated method first."""
    shown = [(one, one.calibration, one.ece.mean) for one in found.summaries if one.calibration and one.ece]
    if not shown:
        return None
    shown.sort(key=lambda entry: -entry[2])
    rows: list[tuple[Value, ...]] = []
    for summary, bins, ece in shown:
        for number, values in enumerate(zip(bins.confidence, bins.accuracy, bins.count, strict=True)):
            edges = number / bins.bins, (number + 1) / bins.bins
            rows.append((summary.label, ece, *edges, *(values if values[2] else (None, None, 0))))
    numbers = Numbers(("method", "ece_percent", "bin_from", "bin_to", "confidence", "accuracy", "count"), rows)
    errors = [(summary.label, ece) for summary, _, ece in shown]
    return _chart(found, "reliability", "ECE in percent", errors, numbers, partial(draw_reliability, shown))


def _recency(found: Findings) -> Chart | None:
    """The average probability of each task, the method most biased towards the last task first."""
    shown = [(summary, summary.recency) for summary in found.summaries if summary.recency]
    if not shown:
        return None
    shown.sort(key=lambda pair: -pair[1].gap)
    rows: list[tuple[Value, ...]] = []
    for summary, bias in shown:
        pairs = zip(bias.task_probabilities, bias.prediction_shares, strict=True)
        rows += [(summary.label, bias.gap, task, *pair) for task, pair in enumerate(pairs, start=1)]
    numbers = Numbers(("method", "recency_gap", "task", "probability", "prediction_share"), rows)
    gaps = [(summary.label, bias.gap) for summary, bias in shown]
    draw = partial(draw_recency, [(summary, bias.task_probabilities, bias.gap) for summary, bias in shown])
    return _chart(found, "average probability given to each task", "Last task minus first", gaps, numbers, draw)


def _robustness(found: Findings) -> Chart | None:
    """Accuracy under each corruption, averaged over severities, the most robust method on top."""
    shown = [(summary.label, summary.robustness) for summary in found.summaries if summary.robustness]
    if not shown:
        return None
    shown.sort(key=lambda pair: -(pair[1].mra or fmean(pair[1].per_corruption.values())))
    first = shown[0][1]
    rows: list[tuple[Value, ...]] = []
    for label, robust in shown:
        for name, values in robust.accuracy.items():
            head = (label, robust.source, robust.clean, robust.mra, CORRUPTIONS[name].category, name)
            rows += [(*head, severity, value) for severity, value in zip(robust.severities, values, strict=True)]
    columns = ("method", "source", "clean", "mra", "category", "corruption", "severity", "accuracy")
    names = [name for category in CATEGORIES for name in first.accuracy if CORRUPTIONS[name].category == category]
    cells = [(label, [robust.clean, *(robust.per_corruption[name] for name in names)]) for label, robust in shown]
    if first.mra is not None:
        cells = [(label, [*row, robust.mra or nan]) for (label, row), (_, robust) in zip(cells, shown, strict=True)]
    source = {"published": "CIFAR-10-C as published", "generated": "generated corruptions"}[first.source]
    draw = partial(
        draw_robustness,
        ["clean", *names, *([] if first.mra is None else ["mRA"])],
        cells,
        note=f"{source}; means over severities {', '.join(map(str, first.severities))}",
    )
    mras = [(label, robust.mra) for label, robust in shown if robust.mra is not None]
    title, quantity = "accuracy under corruptions (%)", "Mean robust accuracy"
    return _chart(found, title, quantity, mras, Numbers(columns, rows), draw)


def _transfer(found: Findings) -> Chart | None:
    """Transfer and forgetting with bootstrap intervals, in percentage points; who forgets least is on top."""
    shown = [(summary, value.mean) for summary in found.summaries if (value := summary.transfer.forgetting)]
    if not shown:
        return None
    rows: list[tuple[Value, ...]] = []
    panels: dict[str, list[Dot]] = {}
    for measure, number in reversed(TRANSFERS.items()):
        for summary, _ in sorted(shown, key=lambda pair: pair[1]):
            if (value := number(summary)) is not None:
                rows.append((summary.label, len(summary.seeds), measure, value.mean, value.low, value.high))
                low, high = (nan if end is None else end for end in (value.low, value.high))
                dot = Dot(summary.label, summary.method, value.mean, low, high, f"{value.mean:.1f}")
                panels.setdefault(measure, []).append(dot)
    several = any(len(summary.seeds) > 1 for summary, _ in shown)
    note = "lines: 95 % bootstrap interval over seeds" if several else "one seed: no intervals"
    numbers = Numbers(("method", "seeds", "measure", "points", "low", "high"), rows)
    forgetting = [(summary.label, value) for summary, value in shown]
    title, draw = "transfer and forgetting (percentage points)", partial(draw_dots, panels, note=note)
    return _chart(found, title, "Forgetting", forgetting, numbers, draw)


def _tasks(found: Findings) -> Chart | None:
    """The accuracy on each task from when it was learned, of methods that learned the tasks one after the other."""
    shown = [summary for summary in found.summaries if len(summary.transfer.curves) > 1]
    if not shown:
        return None
    rows = [
        (summary.label, task, after, value.mean, value.low, value.high)
        for summary in shown
        for task, curve in enumerate(summary.transfer.curves, start=1)
        for after, value in enumerate(curve, start=1)
        if value is not None
    ]
    numbers = Numbers(("method", "task", "after_task", "accuracy", "low", "high"), rows)
    finals = [(summary.label, summary.accuracy.mean) for summary in shown]
    return _chart(
        found, "each task from when it was learned", "Final accuracy", finals, numbers, partial(draw_tasks, shown)
    )
