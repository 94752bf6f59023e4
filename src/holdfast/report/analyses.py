"""The figures of analyses, and which analyses a report may show: those that compare like with like."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean

from holdfast.analysis import CATEGORIES, CORRUPTIONS, Estimate
from holdfast.analysis.comparisons import comparisons
from holdfast.analysis.findings import Findings, Summary, summarize
from holdfast.config import RunConfig
from holdfast.experiments import EXPERIMENTS, Results
from holdfast.report.charts import Chart, gain_chart, matrix_chart, ranking, recency_chart, reliability_chart
from holdfast.report.draw.analyses import draw_robustness
from holdfast.report.draw.canvas import save_figure
from holdfast.report.draw.runs import draw_dots
from holdfast.report.numbers import Numbers, Value
from holdfast.report.series import Dot, Heatmap
from holdfast.report.text import slug

__all__ = ["TRANSFERS", "analysis_charts", "analyze_alike", "distinct", "refusal", "write_analysis_figures"]

TRANSFERS: dict[str, Callable[[Summary], Estimate | None]] = {
    "forgetting": lambda summary: summary.transfer.forgetting,
    "backward transfer": lambda summary: summary.transfer.backward_transfer,
    # Classes of their own are what gives tasks a recency; of classes that come later, a network knows nothing yet.
    "forward transfer": lambda summary: None if summary.recency else summary.transfer.forward_transfer,
}


def analysis_charts(found: Findings) -> dict[str, Chart]:
    """Every chart that there are numbers for, by the name of its file."""
    makers = {
        "overview": _overview,
        "reliability": _reliability,
        "recency": _recency,
        "robustness": _robustness,
        "transfer": _transfer,
        "tasks": _tasks,
    }
    made = {name: make(found) for name, make in makers.items()}
    return {name: chart for name, chart in made.items() if chart is not None}


def write_analysis_figures(found: Findings, out: Path) -> list[Path]:
    """The charts in a folder of `out`, as SVG and PNG with the numbers as CSV and JSON; returns the PNGs."""
    folder = out / slug(found.title)
    return [
        save_figure(chart.draw(title=chart.title), folder / name, chart.numbers)
        for name, chart in analysis_charts(found).items()
    ]


def analyze_alike(results: Results) -> tuple[list[Findings], list[str]]:
    """What the logits of the results say, like compared with like, and a sentence for each comparison refused.

    Where a comparison has any settings of the tables, it has only them. Of each method it has the same seeds, those
    that all methods have.
    """
    settings = {cell.config.change(seed=0) for experiment in EXPERIMENTS.values() for cell in experiment.cells}
    by_config = {stored.config: stored.analysis for stored in results if stored.analysis}
    found, refused = [], []
    for comparison in comparisons(run.result for run in by_config.values()):
        own = [variant for variant in comparison.variants if variant.config.change(seed=0) in settings]
        chosen = own or comparison.variants
        shared = set.intersection(*({run.config.seed for run in variant.results} for variant in chosen))
        if not shared:
            refused.append(f"{comparison.title} is not analyzed: its methods have no seed in common.")
            continue
        summaries = [
            summarize(v.label, [by_config[run.config] for run in v.results if run.config.seed in shared])
            for v in chosen
        ]
        found.append(Findings(comparison.title, tuple(summaries)))
    return found, refused


def distinct(analyses: Iterable[Findings]) -> list[Findings]:
    """The analyses without repetition: of several of the same runs, those with the robustness, or else the first."""
    by_runs: dict[object, list[Findings]] = {}
    for found in analyses:
        runs = frozenset((one.config.change(seed=0), frozenset(one.seeds)) for one in found.summaries)
        by_runs.setdefault(runs, []).append(found)
    robust = {runs: [each for each in same if _is_robust(each)] for runs, same in by_runs.items()}
    return [found for runs, same in by_runs.items() for found in robust[runs] or same[:1]]


def _is_robust(found: Findings) -> bool:
    return any(summary.robustness for summary in found.summaries)


def refusal(found: Findings, settings: Collection[RunConfig]) -> str:
    """Why a report does not show an analysis that was made before; empty if it compares like with like."""
    known = [summary for summary in found.summaries if summary.config.change(seed=0) in settings]
    others = [summary.label for summary in found.summaries if summary not in known]
    reasons = []
    if known and others:
        reasons.append(f"{', '.join(others)} {'has' if len(others) == 1 else 'have'} other settings than in the tables")
    seeds: dict[tuple[int, ...], list[str]] = {}
    for summary in found.summaries:
        seeds.setdefault(summary.seeds, []).append(summary.label)
    if len(seeds) > 1:
        texts = (f"{', '.join(labels)}: {', '.join(map(str, own))}" for own, labels in seeds.items())
        reasons.append(f"its methods have different seeds ({'; '.join(texts)})")
    if not reasons:
        return ""
    return f"The analysis of {found.title} is not shown: {', and '.join(reasons)}. Analyze the same seeds of each."


def _overview(found: Findings) -> Chart | None:
    methods = {summary.label: summary.method for summary in found.summaries}
    kinds = ("accuracy", "recency", "calibration")
    by_kind = {f"{kind} gain (%)": {label: gains[kind] for label, gains in found.gains.items()} for kind in kinds}
    return gain_chart(f"{found.title}: relative gain over er", by_kind, methods)


def _reliability(found: Findings) -> Chart | None:
    shown = [(o.label, o.method, o.calibration, o.ece.mean) for o in found.summaries if o.calibration and o.ece]
    return reliability_chart(f"{found.title}: reliability", shown)


def _recency(found: Findings) -> Chart | None:
    biases = [(one.label, one.method, one.recency) for one in found.summaries if one.recency]
    shown = [(label, method, bias.task_probabilities, bias.gap) for label, method, bias in biases]
    chart = recency_chart(f"{found.title}: average probability given to each task", shown)
    if chart is None:
        return None
    shares = {label: bias.prediction_shares for label, _, bias in biases}
    rows = [(*row, shares[str(row[0])][int(row[2] or 1) - 1]) for row in chart.numbers.rows]
    return replace(chart, numbers=Numbers((*chart.numbers.columns, "prediction_share"), rows))


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
        note=f"{source}; over all images; means over severities {', '.join(map(str, first.severities))}",
    )
    title = f"{found.title}: accuracy under corruptions (%)"
    mras = ranking((label, robust.mra) for label, robust in shown if robust.mra is not None)
    return Chart(title, f"{title}. Mean robust accuracy: {mras}.", Numbers(columns, rows), draw)


def _transfer(found: Findings) -> Chart | None:
    """Transfer and forgetting with bootstrap intervals, in percentage points; who forgets least is on top."""
    shown = sorted(
        ((value.mean, summary) for summary in found.summaries if (value := summary.transfer.forgetting)),
        key=lambda pair: pair[0],
    )
    if not shown:
        return None
    rows: list[tuple[Value, ...]] = []
    panels: dict[str, list[Dot]] = {}
    for measure, number in TRANSFERS.items():
        for _, summary in shown:
            if (value := number(summary)) is not None:
                rows.append((summary.label, len(summary.seeds), measure, value.mean, value.low, value.high))
                low, high = (nan if end is None else end for end in (value.low, value.high))
                dot = Dot(summary.label, summary.method, value.mean, low, high, f"{value.mean:.1f}")
                panels.setdefault(measure, []).append(dot)
    several = any(len(summary.seeds) > 1 for _, summary in shown)
    note = "lines: 95 % bootstrap interval over seeds" if several else "one seed: no intervals"
    numbers = Numbers(("method", "seeds", "measure", "points", "low", "high"), rows)
    title = f"{found.title}: transfer and forgetting (percentage points)"
    alt = f"{title}. Forgetting: {ranking((summary.label, value) for value, summary in shown)}."
    return Chart(title, alt, numbers, partial(draw_dots, panels, note=note), folded=True)


def _tasks(found: Findings) -> Chart | None:
    """The accuracy on each task after each task, of methods that learned the tasks one after the other."""
    shown = [summary for summary in found.summaries if len(summary.transfer.curves) > 1]
    chart = matrix_chart(f"{found.title}: each task over time", [_matrix(summary) for summary in shown], folded=True)
    rows = [
        (summary.label, task, after, value.mean, value.low, value.high)
        for summary in shown
        for task, curve in enumerate(summary.transfer.curves, start=1)
        for after, value in enumerate(curve, start=1)
        if value is not None
    ]
    numbers = Numbers(("method", "task", "after_task", "accuracy", "low", "high"), rows)
    return replace(chart, numbers=numbers) if chart else None


def _matrix(summary: Summary) -> Heatmap:
    """Tasks across, time down; tasks to come only where they share their classes with the others."""
    rows: Sequence[Sequence[Estimate | None]] = list(zip(*summary.transfer.curves, strict=True))
    ahead = len(rows) if summary.transfer.forward_transfer and not summary.recency else 0
    means = tuple(
        tuple(nan if value is None or task > after + ahead else value.mean for task, value in enumerate(row))
        for after, row in enumerate(rows)
    )
    return Heatmap(summary.label, summary.method, len(summary.seeds), means)
