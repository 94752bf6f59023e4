"""Figures of the analyses: reliability, recency, robustness, transfer, overview. Numbers apart from drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from holdfast.analysis import (
    CATEGORIES,
    CORRUPTIONS,
    SEVERITIES,
    Calibration,
    Estimate,
    Recency,
    Robustness,
    contact_sheet,
)
from holdfast.analysis.findings import Findings, Summary
from holdfast.errors import HoldfastError
from holdfast.report.charts import Chart
from holdfast.report.figures import STYLE, save_figure
from holdfast.report.groups import slug
from holdfast.report.numbers import Numbers, Value
from holdfast.report.styles import INK, Style, method_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PLOTS", "Plot", "charts", "draw_contact_sheet", "save_contact_sheet", "write_figures"]

LONGEST = 22  # characters of a name in a figure
MOST_PANELS = 10  # tasks drawn one by one; of more, as many spread over the run
COLORMAP = "cividis"  # the same order in grey and to colour-blind eyes


def charts(found: Findings) -> list[Chart]:
    """Every figure there are numbers for, yet to be drawn, with its numbers and a description in words."""
    made = []
    for plot in PLOTS:
        numbers = plot.numbers(found)
        if numbers.rows:
            title, values = f"{found.title}: {plot.title}", plot.values(found)
            ranked = sorted(values, key=lambda label: -values[label])
            alt = f"{title}. {plot.quantity}: {', '.join(f'{label} {values[label]:.2f}' for label in ranked)}."
            made.append(Chart(title, alt, numbers, partial(plot.draw, found)))
    return made


def write_figures(found: Findings, out: Path) -> list[Path]:
    """The charts in a folder of `out`, as SVG and PNG with the numbers as CSV and JSON; returns the PNGs."""
    folder, names = out / slug(found.title), {f"{found.title}: {plot.title}": plot.name for plot in PLOTS}
    return [
        save_figure(chart.draw(title=chart.title), folder / names[chart.title], chart.numbers)
        for chart in charts(found)
    ]


# --- reliability ---


def reliability_numbers(found: Findings) -> Numbers:
    """A row per method and bin: mean confidence, accuracy (shares) and count over all seeds."""
    rows: list[tuple[Value, ...]] = []
    for summary, bins, ece in _calibrated(found):
        for number, values in enumerate(zip(bins.confidence, bins.accuracy, bins.count, strict=True)):
            edges = number / bins.bins, (number + 1) / bins.bins
            rows.append((summary.label, ece, *edges, *(values if values[2] else (None, None, 0))))
    return Numbers(("method", "ece_percent", "bin_from", "bin_to", "confidence", "accuracy", "count"), rows)


def _across(panels: int, most: int) -> int:
    """Panels in a row so that all rows are about equally full, with at most `most`."""
    return ceil(panels / ceil(panels / most))


def draw_reliability(found: Findings, *, title: str = "") -> Figure:
    """Reliability diagrams side by side, the worst calibrated first; below each, where its confidences lie."""
    shown = _calibrated(found)
    across = _across(len(shown), 5)
    width, height = across * 2.15 + 0.65, ceil(len(shown) / across) * 2.95 + 0.55
    with _page(width, height, title) as figure:
        for number, (left, top) in enumerate(_grid(len(shown), across, (2.15, 2.95))):
            summary, bins, ece = shown[number]
            style = _look(summary, found)
            panel = _axes(figure, (left, top + 0.45, 1.95, 1.55))
            strip = _axes(figure, (left, top + 2.08, 1.95, 0.32))
            _draw_diagram(panel, strip, bins, style)
            panel.set_title(f"{_short(summary.label, 19)}\nECE {ece:.1f} %", fontsize=10.5, color=style.color)
            panel.tick_params(labelbottom=False, labelleft=number % across == 0)
            strip.set_xlabel("confidence", labelpad=1)
            if number % across == 0:
                panel.set_ylabel("accuracy")
                strip.set_ylabel("share", fontsize=9, rotation=0, ha="right", va="center")
        _foot(figure, "hatched: between accuracy and confidence", left=0.6)
    return figure


def _draw_diagram(panel: Axes, strip: Axes, bins: Calibration, style: Style) -> None:
    filled = [number for number in range(bins.bins) if bins.count[number]]
    centres = [(number + 0.5) / bins.bins for number in filled]
    accuracy = [bins.accuracy[number] for number in filled]
    gaps = [bins.confidence[number] - bins.accuracy[number] for number in filled]
    width = 0.92 / bins.bins
    panel.bar(centres, accuracy, width, color=style.color, alpha=0.75, linewidth=0)
    # The gap between what the model believes and what is true: what the ECE adds up.
    panel.bar(centres, gaps, width, accuracy, facecolor="none", edgecolor=INK["muted"], hatch="//////", linewidth=0.6)
    panel.plot([0, 1], [0, 1], color=INK["ink"], linewidth=0.9, linestyle=(0, (4, 3)))
    panel.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    strip.bar(centres, [bins.count[number] / sum(bins.count) for number in filled], width, color=INK["muted"])
    strip.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(), xticklabels=("0", "0.5", "1"))
    strip.tick_params(length=2)
    strip.grid(False)


def _calibrated(found: Findings) -> list[tuple[Summary, Calibration, float]]:
    """Methods with their pooled bins and mean ECE, the worst calibrated first."""
    shown = [(one, one.calibration, one.ece.mean) for one in found.summaries if one.calibration and one.ece]
    return sorted(shown, key=lambda entry: -entry[2])


# --- recency ---


def recency_numbers(found: Findings) -> Numbers:
    """A row per method and task: average probability and share of the predictions."""
    rows: list[tuple[Value, ...]] = []
    for summary, bias in _biased(found):
        pairs = zip(bias.task_probabilities, bias.prediction_shares, strict=True)
        rows += [(summary.label, bias.gap, task, *pair) for task, pair in enumerate(pairs, start=1)]
    return Numbers(("method", "recency_gap", "task", "probability", "prediction_share"), rows)


def draw_recency(found: Findings, *, title: str = "") -> Figure:
    """A group of bars per method, the most biased first: the average probability of each task."""
    shown = _biased(found)
    tasks = len(shown[0][1].task_probabilities)
    highest = max(max(bias.task_probabilities) for _, bias in shown)
    wide = max(1.25, 0.21 * tasks)
    across = _across(len(shown), max(1, int(10.5 / (wide + 0.15))))
    width, height = across * (wide + 0.15) + 0.75, ceil(len(shown) / across) * 2.65 + 0.4
    with _page(width, height, title) as figure:
        for number, (left, top) in enumerate(_grid(len(shown), across, (wide + 0.15, 2.65), left=0.65)):
            summary, bias = shown[number]
            style = _look(summary, found)
            panel = _axes(figure, (left, top + 0.5, wide, 1.65))
            _draw_group(panel, bias.task_probabilities, style, 1.08 * highest)
            panel.set_title(
                f"{_short(summary.label, int(wide / 0.1))}\ngap {bias.gap:+.2f}", fontsize=10.5, color=style.color
            )
            panel.tick_params(labelleft=number % across == 0)
            panel.set_ylabel("probability" if number % across == 0 else "")
            if number == 0:
                panel.text(0.55, 1 / tasks, "even", va="bottom", fontsize=9, color=INK["muted"])
    return figure


def _draw_group(panel: Axes, probabilities: Sequence[float], style: Style, top: float) -> None:
    tasks = len(probabilities)
    for task, probability in enumerate(probabilities, start=1):
        # From pale to full: the first task to the last.
        alpha = 0.35 + 0.65 * (task - 1) / (tasks - 1)
        panel.bar(task, probability, 0.8, color=style.color, alpha=alpha, linewidth=0)
    panel.axhline(1 / tasks, color=INK["muted"], linewidth=0.9, linestyle=(0, (4, 3)))
    panel.set(ylim=(0, top), xlim=(0.45, tasks + 0.55), xlabel="task")
    names = [str(task) if tasks <= 10 or task % 5 == 0 else "" for task in range(1, tasks + 1)]
    panel.set_xticks(range(1, tasks + 1), names)
    panel.tick_params(axis="x", length=0, labelsize=9, pad=2)


def _biased(found: Findings) -> list[tuple[Summary, Recency]]:
    """Methods with their recency, the most biased towards the last task first."""
    shown = [(summary, summary.recency) for summary in found.summaries if summary.recency]
    return sorted(shown, key=lambda pair: -pair[1].gap)


# --- robustness ---


def robustness_numbers(found: Findings) -> Numbers:
    """A row per method, corruption and severity, in percent."""
    rows: list[tuple[Value, ...]] = []
    for summary, robust in _robust(found):
        for name, values in robust.accuracy.items():
            head = (summary.label, robust.source, robust.clean, robust.mra, CORRUPTIONS[name].category, name)
            rows += [(*head, severity, value) for severity, value in zip(robust.severities, values, strict=True)]
    columns = ("method", "source", "clean", "mra", "category", "corruption", "severity", "accuracy")
    return Numbers(columns, rows)


def draw_robustness(found: Findings, *, title: str = "") -> Figure:
    """Accuracy under each corruption, averaged over severities, as numbered cells; the most robust method on top."""
    shown = _robust(found)
    names = [name for category in CATEGORIES for name in shown[0][1].accuracy if CORRUPTIONS[name].category == category]
    columns = ["clean", *names, "mRA"] if shown[0][1].mra is not None else ["clean", *names]
    table = [[_cell(robust, column) for column in columns] for _, robust in shown]
    places = _places(columns)
    left = 0.3 + 0.085 * max(len(_short(summary.label)) for summary, _ in shown)
    width, height = 0.46 * (places[-1] + 1) + left + 0.2, 0.3 * len(shown) + 2.15
    with _page(width, height, title) as figure:
        panel = _axes(figure, (left, 0.75, 0.46 * (places[-1] + 1), 0.3 * len(shown)))
        _draw_cells(panel, table, places)
        panel.set_yticks(range(len(shown)), [_short(summary.label) for summary, _ in shown], color=INK["ink"])
        panel.set_xticks(
            places, [column.replace("_", " ") for column in columns], rotation=40, ha="right", rotation_mode="anchor"
        )
        panel.tick_params(length=0, labelsize=9.5)
        for category in CATEGORIES:
            inside = [p for p, name in zip(places, columns, strict=True) if _category(name) == category]
            if inside:
                panel.text(fmean(inside), -0.72, category, ha="center", va="bottom", color=INK["muted"], fontsize=10)
        source = {"published": "CIFAR-10-C as published", "generated": "generated corruptions"}[shown[0][1].source]
        _foot(figure, f"{source}; means over severities {', '.join(map(str, shown[0][1].severities))}", left=0.12)
    return figure


def _draw_cells(panel: Axes, table: Sequence[Sequence[float]], places: Sequence[float]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    values = [value for row in table for value in row]
    scale, colors = Normalize(min(values), max(max(values), min(values) + 1)), colormaps[COLORMAP]
    for y, row in enumerate(table):
        for x, value in zip(places, row, strict=True):
            panel.add_patch(Rectangle((x - 0.49, y - 0.47), 0.98, 0.94, color=colors(scale(value)), linewidth=0))
            ink = "white" if scale(value) < 0.5 else "black"
            panel.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=9, color=ink)
    panel.set(xlim=(-0.5, places[-1] + 0.5), ylim=(len(table) - 0.5, -0.5))
    panel.grid(False)
    panel.spines[:].set_visible(False)


def _robust(found: Findings) -> list[tuple[Summary, Robustness]]:
    """Methods with their robustness, the most robust first."""
    shown = [(summary, summary.robustness) for summary in found.summaries if summary.robustness]
    return sorted(shown, key=lambda pair: -(pair[1].mra or fmean(pair[1].per_corruption.values())))


def _cell(robust: Robustness, column: str) -> float:
    if column == "clean":
        return robust.clean
    return robust.mra or 0.0 if column == "mRA" else robust.per_corruption[column]


def _category(column: str) -> str:
    return CORRUPTIONS[column].category if column in CORRUPTIONS else column


def _places(columns: Sequence[str]) -> list[float]:
    """Where the columns stand, with a little room between categories."""
    places, at = [], 0.0
    for number, column in enumerate(columns):
        if number:
            at += 1.0 if _category(columns[number - 1]) == _category(column) else 1.25
        places.append(at)
    return places


# --- transfer ---

_MEASURES: tuple[tuple[str, Callable[[Summary], Estimate | None]], ...] = (
    ("forward transfer", lambda summary: summary.transfer.forward_transfer),
    ("backward transfer", lambda summary: summary.transfer.backward_transfer),
    ("forgetting", lambda summary: summary.transfer.forgetting),
)


def transfer_numbers(found: Findings) -> Numbers:
    """A row per method and measure: mean and bootstrap interval over seeds, in percentage points."""
    rows = [
        (summary.label, len(summary.seeds), measure, value.mean, value.low, value.high)
        for measure, number in _MEASURES
        for summary in found.summaries
        if (value := number(summary)) is not None
    ]
    return Numbers(("method", "seeds", "measure", "points", "low", "high"), rows)


def draw_transfer(found: Findings, *, title: str = "") -> Figure:
    """Forward transfer, backward transfer and forgetting with their intervals; who forgets least is on top."""
    shown = [one for one in reversed(_by(found, lambda one: one.transfer.forgetting)) if one.transfer.forgetting]
    names = 0.3 + 0.085 * max(len(_short(summary.label)) for summary in shown)
    width, height = names + 3 * 3.1, 0.3 * len(shown) + 1.5
    with _page(width, height, title, grid="x") as figure:
        for number, (measure, estimate) in enumerate(_MEASURES):
            panel = _axes(figure, (names + number * 3.1, 0.8, 2.2, 0.3 * len(shown)))
            for place, summary in enumerate(shown):
                value = estimate(summary)
                if value is not None:
                    _draw_estimate(panel, place, value, _look(summary, found))
            _name_rows(panel, shown if number == 0 else [""] * len(shown))
            panel.axvline(0, color=INK["muted"], linewidth=0.8)
            panel.margins(x=0.12)
            panel.locator_params(axis="x", nbins=4)
            panel.set_title(measure)
        intervals = max(len(summary.seeds) for summary in shown) > 1
        note = "bars: 95 % bootstrap interval over seeds" if intervals else "one seed: no intervals"
        _foot(figure, note, left=names)
    return figure


def _draw_estimate(panel: Axes, place: int, value: Estimate, style: Style) -> None:
    if value.low is not None and value.high is not None:
        panel.plot([value.low, value.high], [place, place], color=style.color, linewidth=2, solid_capstyle="butt")
    panel.plot([value.mean], [place], color=style.color, marker=style.marker or "o", markersize=6, linestyle="none")
    _value(panel, place, f"{value.mean:.1f}")


def _value(panel: Axes, place: int, text: str) -> None:
    """A number to the right of a row, in figures of equal width with a proper minus."""
    at = panel.get_yaxis_transform()
    panel.text(1.18, place, text.replace("-", "−"), transform=at, ha="right", va="center", fontsize=9.5)


def _name_rows(panel: Axes, rows: Sequence[Summary | str]) -> None:
    names = [row if isinstance(row, str) else _short(row.label) for row in rows]
    panel.set_yticks(range(len(rows)), names, color=INK["ink"])
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)


def task_numbers(found: Findings) -> Numbers:
    """A row per method, task and stage: accuracy on the task after the stage, in percent."""
    rows: list[tuple[Value, ...]] = []
    for summary in _sequential(found):
        for task, curve in enumerate(summary.transfer.curves, start=1):
            rows += [
                (summary.label, task, after, value.mean, value.low, value.high)
                for after, value in enumerate(curve, start=1)
                if value is not None
            ]
    return Numbers(("method", "task", "after_task", "accuracy", "low", "high"), rows)


def draw_tasks(found: Findings, *, title: str = "") -> Figure:
    """A panel per task: what became of the accuracy on it while later tasks were learned; of many tasks, some."""
    shown = _sequential(found)
    tasks = len(shown[0].transfer.curves)
    chosen = _spread_over(tasks - 1, MOST_PANELS)  # nothing comes after the last
    across = _across(len(chosen), 5)
    legend_rows = ceil(len(shown) / 6)
    head = 0.55 + 0.24 * legend_rows
    low = min(point.mean for one in shown for task in chosen for point in _learned(one, task).values())
    width, height = across * 2.1 + 0.75, head + ceil(len(chosen) / across) * 2.2 + 0.05
    with _page(width, height, title) as figure:
        for number, (left, top) in enumerate(_grid(len(chosen), across, (2.1, 2.2), left=0.65, head=head)):
            panel = _axes(figure, (left, top + 0.3, 1.9, 1.4))
            for summary in shown:
                _draw_curve(
                    panel, _learned(summary, chosen[number]), _look(summary, found), tasks, band=len(shown) <= 4
                )
            panel.set(xlim=(0.6, tasks + 0.4), ylim=(10 * (low // 10), 102), xlabel="after task")
            panel.set_xticks(sorted({1, *range(5, tasks + 1, 5), tasks} if tasks > 5 else range(1, tasks + 1)))
            panel.set_title(f"task {chosen[number] + 1}")
            panel.tick_params(labelleft=number % across == 0, length=2)
            panel.set_ylabel("accuracy (%)" if number % across == 0 else "")
            panel.xaxis.labelpad = 1
        _name_lines(figure, shown, found)
    return figure


def _learned(summary: Summary, task: int) -> dict[int, Estimate]:
    """The accuracy on a task (from 0) after it and each later one (from 1)."""
    later = enumerate(summary.transfer.curves[task][task:], start=task + 1)
    return {after: value for after, value in later if value is not None}


def _draw_curve(panel: Axes, curve: Mapping[int, Estimate], style: Style, tasks: int, *, band: bool) -> None:
    means = [value.mean for value in curve.values()]
    panel.plot(list(curve), means, markevery=max(1, tasks // 5), **_line(style))
    bounds = [(after, v.low, v.high) for after, v in curve.items() if v.low is not None and v.high is not None]
    if band and bounds:
        low, high = [low for _, low, _ in bounds], [high for _, _, high in bounds]
        panel.fill_between([after for after, _, _ in bounds], low, high, color=style.color, alpha=0.12, linewidth=0)


def _line(style: Style) -> dict[str, Any]:
    return {"color": style.color, "linestyle": style.dash, "marker": style.marker, "markersize": 4.2, "linewidth": 1.5}


def _name_lines(figure: Figure, shown: Sequence[Summary], found: Findings) -> None:
    """The names of the lines in a strip below the title, each beside a piece of its line."""
    from matplotlib.lines import Line2D

    looks = [_look(summary, found) for summary in shown]
    handles = [Line2D([], [], **_line(look)) for look in looks]
    width, height = figure.get_size_inches()
    legend = figure.legend(
        handles,
        [_short(summary.label) for summary in shown],
        labelcolor=[look.color for look in looks],
        ncols=min(6, len(shown)),
        loc="upper left",
        bbox_to_anchor=(0.05 / width, 1 - 0.38 / height),
        frameon=False,
        fontsize=10,
        borderaxespad=0.2,
        handlelength=2.2,
        columnspacing=1.4,
    )
    legend.set_in_layout(False)


def _sequential(found: Findings) -> list[Summary]:
    """Methods that learned the tasks one after the other."""
    return [summary for summary in found.summaries if len(summary.transfer.curves) > 1]


def _spread_over(count: int, most: int) -> list[int]:
    """At most so many of `count` places, first and last among them, as evenly as they go."""
    if count <= most:
        return list(range(count))
    return [round(number * (count - 1) / (most - 1)) for number in range(most)]


# --- overview ---

_GAINS = ("accuracy", "recency", "calibration")


def overview_numbers(found: Findings) -> Numbers:
    """A row per method: its relative gains over er, in percent."""
    rows = [(label, *(values[name] for name in _GAINS)) for label, values in found.gains.items()]
    return Numbers(("method", *(f"{name}_gain_percent" for name in _GAINS)), rows)


def draw_overview(found: Findings, *, title: str = "") -> Figure:
    """Relative gains over er in accuracy, recency and calibration, as bars; the largest mean gain on top."""

    def mean_gain(label: str) -> float:
        return fmean(value for value in found.gains[label].values() if value is not None)

    labels = sorted(found.gains, key=mean_gain, reverse=True)
    looks = {summary.label: _look(summary, found) for summary in found.summaries}
    kinds = [kind for kind in _GAINS if any(found.gains[label][kind] is not None for label in labels)]
    names = 0.3 + 0.085 * max(len(_short(label)) for label in labels)
    width, height = names + len(kinds) * 3.1, 0.34 * len(labels) + 1.2
    with _page(max(width, 5.2), height, title, grid="x") as figure:
        for number, kind in enumerate(kinds):
            panel = _axes(figure, (names + number * 3.1, 0.75, 2.3, 0.34 * len(labels)))
            for place, label in enumerate(labels):
                gain = found.gains[label][kind]
                if gain is not None:
                    panel.barh(place, gain, 0.64, color=looks[label].color, alpha=0.75, linewidth=0)
                    _value(panel, place, f"{gain:+.1f}")
            _name_rows(panel, [_short(label) for label in labels] if number == 0 else [""] * len(labels))
            panel.axvline(0, color=INK["ink"], linewidth=0.9)
            panel.locator_params(axis="x", nbins=4)
            panel.set_title(kind)
    return figure


# --- contact sheet ---


def draw_contact_sheet(images: Tensor) -> Figure:
    """All corruptions at all severities of a few uint8 images (N, 1 or 3, H, W), to be looked at."""
    colour = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    gap = 2
    sheet = contact_sheet(colour.contiguous(), gap=gap).permute(1, 2, 0).cpu().numpy()
    cell_height, cell_width = images.shape[-2] + gap, images.shape[-1] * len(images) + gap
    wide = 8.0
    tall = wide * sheet.shape[0] / sheet.shape[1]
    with _page(wide + 1.75, tall + 0.95, "All corruptions at all severities", grid="x") as figure:
        panel = _axes(figure, (1.6, 0.8, wide, tall))
        panel.imshow(sheet, interpolation="nearest", aspect="auto")
        panel.set_yticks(
            [(row + 0.5) * cell_height - 0.5 for row in range(len(CORRUPTIONS))],
            [name.replace("_", " ") for name in CORRUPTIONS],
            color=INK["ink"],
        )
        heads = ["clean", *(f"severity {severity}" for severity in SEVERITIES)]
        panel.set_xticks([(column + 0.5) * cell_width - 0.5 for column in range(len(heads))], heads, color=INK["ink"])
        panel.tick_params(length=0, labeltop=True, labelbottom=False)
        panel.grid(False)
        panel.spines[:].set_visible(False)
    return figure


def save_contact_sheet(images: Tensor, out: Path) -> Path:
    """The contact sheet as `out`/contact-sheet.png, large enough that every pixel shows."""
    path = out / "contact-sheet.png"
    try:
        out.mkdir(parents=True, exist_ok=True)
        draw_contact_sheet(images).savefig(path, dpi=200)
    except OSError as error:
        raise HoldfastError(f"the figure could not be written to {out}: {error.strerror or error}.") from error
    return path


# --- what all figures share ---


@dataclass(frozen=True)
class Plot:
    """A figure of the analyses: file name, title, its numbers (no rows: not to be drawn), how to draw it.

    `values` are the methods' numbers that decide their order, and `quantity` what they are.
    """

    name: str
    title: str
    numbers: Callable[[Findings], Numbers]
    draw: Callable[..., Figure]
    quantity: str
    values: Callable[[Findings], dict[str, float]]


def _means(number: Callable[[Summary], Estimate | None]) -> Callable[[Findings], dict[str, float]]:
    return lambda found: {one.label: value.mean for one in found.summaries if (value := number(one)) is not None}


PLOTS = (
    Plot(
        "overview",
        "relative gain over er (%)",
        overview_numbers,
        draw_overview,
        "gain in accuracy",
        lambda found: {label: values["accuracy"] or 0.0 for label, values in found.gains.items()},
    ),
    Plot(
        "reliability", "reliability", reliability_numbers, draw_reliability, "ECE in percent", _means(lambda o: o.ece)
    ),
    Plot(
        "recency",
        "average probability given to each task",
        recency_numbers,
        draw_recency,
        "last task minus first",
        _means(lambda one: one.recency_gap),
    ),
    Plot(
        "robustness",
        "accuracy under corruptions (%)",
        robustness_numbers,
        draw_robustness,
        "mean robust accuracy",
        _means(lambda one: one.mra),
    ),
    Plot(
        "transfer",
        "transfer and forgetting (percentage points)",
        transfer_numbers,
        draw_transfer,
        "forgetting",
        _means(lambda one: one.transfer.forgetting),
    ),
    Plot(
        "tasks",
        "each task from when it was learned",
        task_numbers,
        draw_tasks,
        "final accuracy",
        _means(lambda one: one.accuracy),
    ),
)


@contextmanager
def _page(width: float, height: float, title: str, grid: str = "y") -> Iterator[Figure]:
    """An empty figure of so many inches in the house style, its title at the top left."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE | {"axes.grid.axis": grid}):
        figure = Figure(figsize=(width, height), facecolor=INK["paper"])
        if title:
            figure.suptitle(
                title, x=0.12 / width, y=1 - 0.1 / height, ha="left", va="top", fontweight="bold", fontsize=12
            )
        yield figure


def _foot(figure: Figure, text: str, *, left: float) -> None:
    """A note at the bottom, `left` inches from the edge."""
    width, height = figure.get_size_inches()
    figure.text(left / width, 0.08 / height, text, fontsize=9, color=INK["muted"], va="bottom")


def _axes(figure: Figure, box: tuple[float, float, float, float]) -> Axes:
    """Axes at (left, top, width, height) in inches from the figure's top left corner."""
    left, top, wide, tall = box
    width, height = figure.get_size_inches()
    return figure.add_axes((left / width, 1 - (top + tall) / height, wide / width, tall / height))


def _grid(
    count: int, across: int, cell: tuple[float, float], *, left: float = 0.6, head: float = 0.4
) -> Iterator[tuple[float, float]]:
    """The left and top, in inches, of `count` cells in rows of `across` below the title."""
    for number in range(count):
        row, column = divmod(number, across)
        yield left + column * cell[0], head + row * cell[1]


def _look(summary: Summary, found: Findings) -> Style:
    return method_style(summary.method, (other.method for other in found.summaries))


def _by(found: Findings, number: Callable[[Summary], Estimate | None]) -> list[Summary]:
    """The methods by a number, largest first; those without one last."""

    def key(summary: Summary) -> float:
        value = number(summary)
        return float("inf") if value is None else -value.mean

    return sorted(found.summaries, key=key)


def _short(label: str, longest: int = LONGEST) -> str:
    return label if len(label) <= longest else label[: longest - 1] + "…"
