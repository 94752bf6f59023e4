"""Figures of the analyses: reliability, recency, robustness, and the corruptions themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from torch import Tensor

from holdfast.analysis import CATEGORIES, CORRUPTIONS, SEVERITIES, Calibration, contact_sheet
from holdfast.errors import HoldfastError
from holdfast.files import telling
from holdfast.report.draw.canvas import add_note, add_panel, blank, per_row, places, text_width
from holdfast.report.draw.runs import draw_cells
from holdfast.report.draw.style import INK, Style, looks
from holdfast.report.text import shorten_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_contact_sheet", "draw_recency", "draw_reliability", "draw_robustness", "save_contact_sheet"]

LONGEST = 22  # characters of a name in a figure


def draw_reliability(found: Sequence[tuple[str, str, Calibration, float]], *, title: str = "") -> Figure:
    """Reliability diagrams by label and method, with the ECE in percent; below each, where its confidences lie."""
    across, rows = per_row(len(found), 6)
    styles = looks({label: method for label, method, _, _ in found})
    names = shorten_all(styles, 16)
    width, height = across * 1.85 + 0.65, rows * 2.6 + 0.55
    with blank(width, height, title) as figure:
        for number, (left, top) in enumerate(places(len(found), across, (1.85, 2.6), 0.6, 0.4)):
            label, _, bins, ece = found[number]
            style, is_first = styles[label], number % across == 0
            panel = add_panel(figure, (left, top + 0.45, 1.65, 1.25))
            strip = add_panel(figure, (left, top + 1.78, 1.65, 0.3))
            _draw_diagram(panel, strip, bins, style)
            panel.set_title(f"{names[label]}\nECE {ece:.1f} %", fontsize=10.5, color=style.color)
            panel.tick_params(labelbottom=False, labelleft=is_first)
            strip.set_xlabel("confidence", labelpad=1)
            if is_first:
                panel.set_ylabel("accuracy")
                strip.set_ylabel("share", fontsize=9, rotation=0, ha="right", va="center")
        add_note(figure, "hatched: between accuracy and confidence", left=0.6)
    return figure


def _draw_diagram(panel: Axes, strip: Axes, bins: Calibration, style: Style) -> None:
    filled = [number for number in range(bins.bins) if bins.count[number]]
    centres = [(number + 0.5) / bins.bins for number in filled]
    accuracy = [bins.accuracy[number] for number in filled]
    gaps = [bins.confidence[number] - bins.accuracy[number] for number in filled]
    width = 0.92 / bins.bins
    panel.bar(centres, accuracy, width, color=style.color, alpha=0.75, linewidth=0)
    # The ECE adds up these gaps between confidence and accuracy.
    panel.bar(centres, gaps, width, accuracy, facecolor="none", edgecolor=INK["muted"], hatch="//////", linewidth=0.6)
    panel.plot([0, 1], [0, 1], color=INK["ink"], linewidth=0.9, linestyle=(0, (4, 3)))
    panel.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    strip.bar(centres, [bins.count[number] / sum(bins.count) for number in filled], width, color=INK["muted"])
    strip.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(), xticklabels=("0", "0.5", "1"))
    strip.tick_params(length=2)
    strip.grid(False)


def draw_recency(found: Sequence[tuple[str, str, Sequence[float], float]], *, title: str = "") -> Figure:
    """A group of bars per label and method: the average probability of each task, and the gap of last and first."""
    tasks = len(found[0][2])
    highest = max(max(probabilities) for _, _, probabilities, _ in found)
    styles = looks({label: method for label, method, _, _ in found})
    wide = max(1.25, 0.21 * tasks)
    names = shorten_all(styles, int(wide / 0.1))
    across, rows = per_row(len(found), max(1, int(10.5 / (wide + 0.15))))
    width, height = across * (wide + 0.15) + 0.75, rows * 2.25 + 0.4
    with blank(width, height, title) as figure:
        for number, (left, top) in enumerate(places(len(found), across, (wide + 0.15, 2.25), 0.65, 0.4)):
            label, _, probabilities, gap = found[number]
            panel = add_panel(figure, (left, top + 0.5, wide, 1.25))
            _draw_group(panel, probabilities, styles[label])
            panel.set_title(f"{names[label]}\ngap {gap:+.2f}", fontsize=10.5, color=styles[label].color)
            panel.set_ylim(0, 1.08 * highest)
            panel.tick_params(labelleft=number % across == 0)
            panel.set_ylabel("probability" if number % across == 0 else "")
            if number == 0:
                panel.text(0.55, 1 / tasks, "even", va="bottom", fontsize=9, color=INK["muted"])
    return figure


def _draw_group(panel: Axes, probabilities: Sequence[float], style: Style) -> None:
    tasks = len(probabilities)
    for task, probability in enumerate(probabilities, start=1):
        # From pale to full: the first task to the last.
        alpha = 0.35 + 0.65 * (task - 1) / (tasks - 1)
        panel.bar(task, probability, 0.8, color=style.color, alpha=alpha, linewidth=0)
    panel.axhline(1 / tasks, color=INK["muted"], linewidth=0.9, linestyle=(0, (4, 3)))
    panel.set(xlim=(0.45, tasks + 0.55), xlabel="task")
    names = [str(task) if tasks <= 10 or task % 5 == 0 else "" for task in range(1, tasks + 1)]
    panel.set_xticks(range(1, tasks + 1), names)
    panel.tick_params(axis="x", length=0, labelsize=9, pad=2)


def draw_robustness(
    columns: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]], *, title: str = "", note: str = ""
) -> Figure:
    """A row of numbered cells per method: accuracy in percent under each corruption, and in other columns."""
    categories = [CORRUPTIONS[name].category if name in CORRUPTIONS else name for name in columns]
    values = [value for _, row in rows for value in row]
    short = shorten_all((name for name, _ in rows), LONGEST)
    names = [short[name] for name, _ in rows]
    left, wide, tall = 0.3 + text_width(names), 0.47 * len(columns), 0.3 * len(rows)
    with blank(left + wide + 0.2, tall + 2.15, title, grid="") as figure:
        panel = add_panel(figure, (left, 0.75, wide, tall))
        limits = min(values), max(max(values), min(values) + 1)
        draw_cells(panel, [row for _, row in rows], limits, numbered=True, format=".1f")
        panel.set_yticks(range(1, len(rows) + 1), names, color=INK["ink"])
        words = [column.replace("_", " ") for column in columns]
        panel.set_xticks(range(1, len(columns) + 1), words, rotation=40, ha="right", rotation_mode="anchor")
        panel.tick_params(length=0, labelsize=9.5)
        panel.spines[:].set_visible(False)
        for place, (before, after) in enumerate(pairwise(categories), start=1):
            if before != after:
                panel.axvline(place + 0.5, color=INK["paper"], linewidth=4)
        for category in CATEGORIES:
            inside = [place for place, name in enumerate(categories, start=1) if name == category]
            if inside and len(columns) > len(CATEGORIES) + 1:  # else the columns are the categories
                panel.text(fmean(inside), 0.35, category, ha="center", va="bottom", color=INK["muted"], fontsize=10)
        add_note(figure, note, left=0.12)
    return figure


def draw_contact_sheet(images: Tensor) -> Figure:
    """All corruptions at all severities of a few uint8 images (N, 1 or 3, H, W), to be looked at."""
    colour = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    gap = 2
    sheet = contact_sheet(colour.contiguous(), gap=gap).permute(1, 2, 0).cpu().numpy()
    cell_height, cell_width = images.shape[-2] + gap, images.shape[-1] * len(images) + gap
    wide = 8.0
    tall = wide * sheet.shape[0] / sheet.shape[1]
    with blank(wide + 1.75, tall + 0.95, "All corruptions at all severities", grid="") as figure:
        panel = add_panel(figure, (1.6, 0.8, wide, tall))
        panel.imshow(sheet, interpolation="nearest", aspect="auto")
        rows = [name.replace("_", " ") for name in CORRUPTIONS]
        heads = ["clean", *(f"severity {severity}" for severity in SEVERITIES)]
        panel.set_yticks([(row + 0.5) * cell_height - 0.5 for row in range(len(rows))], rows)
        panel.set_xticks([(column + 0.5) * cell_width - 0.5 for column in range(len(heads))], heads)
        panel.tick_params(length=0, labeltop=True, labelbottom=False, labelcolor=INK["ink"])
        panel.spines[:].set_visible(False)
    return figure


def save_contact_sheet(images: Tensor, out: Path) -> Path:
    """The contact sheet as `out`/contact-sheet.png, large enough that every pixel shows."""
    path = out / "contact-sheet.png"
    with telling(HoldfastError, f"the figure could not be written to {out}"):
        out.mkdir(parents=True, exist_ok=True)
        draw_contact_sheet(images).savefig(path, dpi=200)
    return path
