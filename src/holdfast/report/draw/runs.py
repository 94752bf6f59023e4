"""Figures of runs and tables: lines over an ordered axis, accuracy matrices, dots with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isnan
from typing import TYPE_CHECKING

from holdfast.report.draw.canvas import add_note, add_panel, blank, per_row, places, text_width
from holdfast.report.draw.style import INK, QUIET, Style, color_map, looks
from holdfast.report.series import Dot, Heatmap, Line, highlights
from holdfast.report.text import shorten_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_cells", "draw_dots", "draw_heatmaps", "draw_lines", "spread", "task_ticks"]

LABEL_GAP = 12.5  # points between the names at the ends of lines
LONGEST = 30  # characters of a name in a figure
PANEL = 2.9  # inches: width of a panel with lines; two of them fill half a page
DOTS, FEW_DOTS, MANY_DOTS = 2.6, 1.25, 0.75  # inches: width of a panel with dots if it is alone, one of a few, of many
FAR = 5.0  # bands from the published value up to which a panel makes room for a dot
LETTER = 0.1  # inches of a panel's width for each letter of its title
MARGIN = 0.75  # inches left of a panel, for numbers and their unit
DARK_CELLS = 0.29  # share of the colour scale on which white letters can be read better than black ones
MOST_BANDS = 4  # lines that can show their standard deviation as a band without hiding each other


def draw_lines(
    panels: Mapping[str, Sequence[Line]],
    ticks: Mapping[int, str],
    *,
    title: str = "",
    across: str = "after task",
    axis: str = "accuracy (%)",
) -> Figure:
    """Lines over the places 1, 2, ... in panels side by side on one scale, the names at the ends of the lines.

    `ticks` names the places that get a tick. Of more than a handful of lines some stand out, and the rest are grey.
    """
    lines = max(panels.values(), key=len)
    named = highlights(lines)
    styles = {
        label: style if label in named else QUIET
        for label, style in looks({line.label: line.method for line in lines}).items()
    }
    names = shorten_all((line.label for line in lines), LONGEST)
    beside = 0.33 + text_width([names[line.label] for line in lines if line.label in named])
    width, height = MARGIN + len(panels) * (PANEL + beside), max(2.8, 1.2 + len(named) * 0.24)
    top, last = 0.65 if title else 0.35, max(len(line.mean) for line in lines)
    with blank(width, height, title) as figure:
        drawn: list[Axes] = []
        for number, (what, inside) in enumerate(panels.items()):
            box = (MARGIN + number * (PANEL + beside), top, PANEL, height - top - 0.55)
            panel = add_panel(figure, box, sharey=drawn[0] if drawn else None)
            for place, line in enumerate(sorted(inside, key=lambda line: line.label in named)):
                _draw_line(panel, line, styles[line.label], place, last, band=len(lines) <= MOST_BANDS)
            panel.set(title=what, xlabel=across, xlim=(1 - 0.02 * last, 1.02 * last))
            panel.set_xticks(list(ticks), list(ticks.values()))
            panel.tick_params(labelleft=not drawn)
            drawn.append(panel)
        drawn[0].set_ylabel(axis)
        for panel, inside in zip(drawn, panels.values(), strict=True):
            _label_ends(panel, [line for line in inside if line.label in named], names, styles, last)
    return figure


def task_ticks(tasks: int) -> dict[int, str]:
    """Ticks for the tasks 1, 2, ...: all of a few, else every fifth."""
    return {task: str(task) for task in (range(1, tasks + 1) if tasks <= 6 else [1, *range(5, tasks + 1, 5)])}


def draw_heatmaps(maps: Sequence[Heatmap], *, title: str = "") -> Figure:
    """Accuracy matrices side by side on one colour scale: a row per stage, a column per task."""
    across, rows = per_row(len(maps), 8)
    side = 1.35 if across > 5 else 1.75 if across > 2 else 2.6
    top, size = 0.9 if title else 0.55, (side + 0.2, side + 0.7)
    names = shorten_all((heatmap.label for heatmap in maps), int(side / LETTER))
    width, height = across * size[0] + 1.5, rows * size[1] + top + 0.05
    low, high = _limits([row for heatmap in maps for row in heatmap.rows])
    with blank(width, height, title, grid="") as figure:
        for number, (left, at) in enumerate(places(len(maps), across, size, 0.6, top)):
            heatmap, is_lowest = maps[number], number + across >= len(maps)
            panel = add_panel(figure, (left, at, side, side))
            draw_cells(panel, heatmap.rows, (low, high), numbered=side > 2 and len(heatmap.rows) <= 6)
            final = heatmap.rows[-1]
            panel.set_title(f"{names[heatmap.label]}\n{sum(final) / len(final):.1f}", fontsize=10)
            panel.set_xticks(list(task_ticks(len(final))) if is_lowest else [])
            panel.set_yticks(list(task_ticks(len(heatmap.rows))) if number % across == 0 else [])
            panel.set_ylabel("after task" if number % across == 0 else "")
            panel.set_xlabel("accuracy on task" if is_lowest else "")
            panel.tick_params(length=2)
        tall = min(2.6, height - 1.0)
        scale = add_panel(figure, (width - 0.65, height - 0.5 - tall, 0.14, tall))
        _draw_scale(scale, low, high, open_below=any(v < low for heatmap in maps for row in heatmap.rows for v in row))
    return figure


def draw_cells(
    panel: Axes, rows: Sequence[Sequence[float]], limits: tuple[float, float], *, numbered: bool, format: str = ".0f"
) -> None:
    """A table as coloured cells, row and column 1 at the top left; with the numbers in them if `numbered`."""
    low, high = limits
    extent = (0.5, len(rows[0]) + 0.5, len(rows) + 0.5, 0.5)
    panel.imshow(rows, color_map(), vmin=low, vmax=high, extent=extent, aspect="auto", interpolation="none", zorder=0)
    for at, row in enumerate(rows if numbered else [], start=1):
        for column, value in enumerate(row, start=1):
            if not isnan(value):
                # The cells are the same in both themes, and so is their ink. Pure white would change with the theme.
                color = "#fefefe" if value < low + DARK_CELLS * (high - low) else "black"
                panel.text(column, at, f"{value:{format}}", ha="center", va="center", fontsize=10, color=color)


def draw_dots(
    panels: Mapping[str, Sequence[Dot]],
    *,
    order: Sequence[str] = (),
    bands: Mapping[str, float] | None = None,
    title: str = "",
    axis: str = "",
    note: str = "",
    from_zero: bool = False,
) -> Figure:
    """A row per label with a dot and its interval, and the number in words; a panel for each entry.

    The rows come in this `order`, or as in the first panel. A panel with a band is of differences: the band to either
    side of 0 is shaded, and what lies far beyond it is an arrow at the edge. A line marks zero where a panel reaches
    it, as it does if `from_zero`.
    """
    rows = list(order) or [dot.label for dot in next(iter(panels.values()))]
    styles = looks({dot.label: dot.method for dots in panels.values() for dot in dots}, variants_differ=False)
    short = shorten_all(rows, LONGEST)
    names = 0.25 + text_width(list(short.values()))
    texts = [0.2 + text_width([dot.text for dot in dots if dot.text]) for dots in panels.values()]
    wide = DOTS if len(panels) == 1 else FEW_DOTS if len(panels) < 4 else MANY_DOTS
    heads = [what.replace(", ", "\n") if len(panels) > 1 else what for what in panels]
    top, tall = (0.65 if title else 0.35) + 0.18 * max(head.count("\n") for head in heads), 0.27 * len(rows)
    bottom = 0.55 + (0.25 if note else 0)
    with blank(names + sum(texts) + len(panels) * wide, top + tall + bottom, title, grid="x") as figure:
        for number, (what, dots) in enumerate(panels.items()):
            panel = add_panel(figure, (names + number * wide + sum(texts[:number]), top, wide, tall))
            panel.locator_params(axis="x", nbins=4 if len(panels) == 1 else 3)  # before the limits, which depend on it
            _draw_rows(panel, dots, rows, styles, (bands or {}).get(what), from_zero)
            panel.set_yticks(range(len(rows)), [short[label] if number == 0 else "" for label in rows])
            panel.set_xlabel(axis)
            panel.set_title(heads[number], fontsize=10, color=INK["muted"])
        if note:
            add_note(figure, note, left=names)
    return figure


def _draw_rows(
    panel: Axes,
    dots: Sequence[Dot],
    rows: Sequence[str],
    styles: Mapping[str, Style],
    band: float | None,
    from_zero: bool,
) -> None:
    """The dots of a panel, each in its row, the band to either side of 0, and the line at 0."""
    for dot in dots:
        _draw_dot(panel, dot, rows.index(dot.label), styles[dot.label])
    panel.tick_params(axis="y", length=0, labelcolor=INK["ink"])
    if from_zero:
        panel.update_datalim([(0.0, 0.0)])  # before the margins, which then are a share of the way from zero
    panel.margins(x=0.08)
    if band is not None:
        _draw_band(panel, dots, band, rows)
    if panel.get_xlim()[0] <= 0 <= panel.get_xlim()[1]:
        panel.axvline(0, color=INK["muted"], linewidth=0.9)
    panel.set_ylim(len(rows) - 0.4, -0.6)


def _draw_band(panel: Axes, dots: Sequence[Dot], band: float, rows: Sequence[str]) -> None:
    """The band of differences that do not matter, and arrows for dots too far from it to be shown in their place."""
    panel.axvspan(-band, band, color=INK["grid"], alpha=0.6, linewidth=0)
    edge = max([1.5 * band, *(1.15 * abs(dot.mean) for dot in dots if abs(dot.mean) <= FAR * band)])
    panel.set_xlim(-edge, edge)
    for dot in dots:
        if abs(dot.mean) > edge:
            side = edge if dot.mean > 0 else -edge
            marker = ">" if dot.mean > 0 else "<"
            panel.plot(side, rows.index(dot.label), marker, color=INK["ink"], markersize=7, clip_on=False)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to those wanted, at least `gap` apart and inside low..high where they fit.

    >>> spread([0.0, 0.0, 5.0], 1.0, -10.0, 10.0)
    [-0.5, 0.5, 5.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, list[int]]] = []  # centre, members from below
    for i in order:
        block = (_inside(wanted[i], 1, gap, low, high), [i])
        while blocks and block[0] - blocks[-1][0] < gap * (len(block[1]) + len(blocks[-1][1])) / 2:
            members = blocks.pop()[1] + block[1]
            centre = sum(wanted[member] for member in members) / len(members)
            block = (_inside(centre, len(members), gap, low, high), members)
        blocks.append(block)
    found = [0.0] * len(wanted)
    for centre, members in blocks:
        for rank, member in enumerate(members):
            found[member] = centre + gap * (rank - (len(members) - 1) / 2)
    return found


def _inside(centre: float, members: int, gap: float, low: float, high: float) -> float:
    """The centre of a block moved so that the block ends within low..high; its top end decides if it cannot fit."""
    half = gap * (members - 1) / 2
    return min(max(centre, low + half), high - half)


def _draw_line(panel: Axes, line: Line, style: Style, number: int, last: int, *, band: bool) -> None:
    """The line with markers, or across the panel if it is a level; with a band of its standard deviation if asked."""
    if line.is_level and last > 1:
        panel.plot([1 - 0.02 * last, 1.02 * last], 2 * line.mean, **style.line(marker=""))
        return
    x = range(1, len(line.mean) + 1)
    every = max(1, last // 5)  # a marker on every point would hide the lines
    panel.plot(x, line.mean, **style.line(markevery=(number % every, every)))
    if band and not any(isnan(value) for value in line.std):
        low, high = ([mean + sign * std for mean, std in zip(line.mean, line.std, strict=True)] for sign in (-1, 1))
        panel.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0)


def _label_ends(
    panel: Axes, lines: Sequence[Line], names: Mapping[str, str], styles: Mapping[str, Style], last: int
) -> None:
    """Names beside the ends of the lines, pushed apart where they would overlap, with a thin lead to each."""
    low, high = panel.get_ylim()
    left, right = panel.get_xlim()
    gap = LABEL_GAP / (72 * panel.bbox.height / panel.figure.dpi) * (high - low)
    room = 0.045 * (right - left)
    drawn = [line for line in lines if not isnan(line.mean[-1])]
    for line, at in zip(drawn, spread([line.mean[-1] for line in drawn], gap, low, high), strict=True):
        color, start = styles[line.label].color, right if line.is_level else last
        panel.plot([start, right + room], [line.mean[-1], at], color=color, linewidth=0.7, clip_on=False, alpha=0.7)
        panel.text(right + 1.25 * room, at, names[line.label], va="center", color=color, fontsize=9.5)
    panel.set(xlim=(left, right), ylim=(low, high))


def _limits(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The ends of the colour scale, in tens; one number in fifty may lie below, so that the others stand apart."""
    values = [value for row in rows for value in row if not isnan(value)]
    if not values:
        return 0.0, 100.0
    low = 10.0 * (sorted(values)[len(values) // 50] // 10)
    return low, max(10.0 * ceil(max(values) / 10), low + 10.0)


def _draw_scale(panel: Axes, low: float, high: float, *, open_below: bool) -> None:
    """The colour scale, as a picture of a few hundred bytes."""
    steps = [[1 - step / 63] for step in range(64)]
    panel.imshow(steps, color_map(), vmin=0, vmax=1, extent=(0, 1, low, high), aspect="auto", interpolation="none")
    panel.set_xticks([])
    panel.yaxis.tick_right()
    step = 10 if high - low <= 50 else 20
    ticks = [low + step * number for number in range(int((high - low) // step) + 1)]
    panel.set_yticks(ticks, [f"≤ {low:g}" if open_below and tick == low else f"{tick:g}" for tick in ticks])
    panel.tick_params(axis="y", length=2)
    panel.spines[:].set_visible(False)
    panel.set_title("%", fontsize=10, loc="center")


def _draw_dot(panel: Axes, dot: Dot, place: int, style: Style) -> None:
    if not isnan(dot.low):
        panel.plot([dot.low, dot.high], [place, place], color=style.color, linewidth=2, solid_capstyle="butt")
    panel.plot([dot.mean], [place], **style.line(marker=style.marker or "o", markersize=6, linestyle="none"))
    beside = panel.get_yaxis_transform()
    panel.text(1.03, place, dot.text.replace("-", "−"), transform=beside, va="center", fontsize=10)
