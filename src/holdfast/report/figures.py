"""Figures in one style. The numbers behind each are computed apart from drawing, in series.py."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.report.numbers import Numbers
from holdfast.report.series import Bar, Course, Curve, Heatmap, Profile, mean_over_seen
from holdfast.report.styles import INK, VARIANTS, Style, method_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "PALETTE",
    "accuracy_over_tasks",
    "draw_bars",
    "draw_curves",
    "draw_heatmaps",
    "draw_profiles",
    "mean_over_seen",
    "save_figure",
    "spread",
]

# Okabe and Ito's colours, which stay apart for colour-blind readers; black is for text.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "text.color": INK["ink"],
    "text.parse_math": False,  # names come from files: a dollar sign is a dollar sign
    "axes.edgecolor": INK["muted"],
    "axes.facecolor": "none",
    "axes.labelcolor": INK["ink"],
    "axes.titlecolor": INK["ink"],
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # given, it need not be searched for
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": INK["grid"],
    "xtick.color": INK["muted"],
    "ytick.color": INK["muted"],
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",  # the same figure is the same file
}
COLORMAP = "cividis"  # the same order in grey and to colour-blind eyes
LABEL_GAP = 12.5  # points between the names at the ends of lines
LONGEST = 30  # characters of a name in a figure
BARS = 2.6  # inches: the longest bar; with names and numbers beside it, about what a phone shows unscaled
PANEL = 3.9  # inches: width of a panel with lines
MARGIN = 0.75  # inches: left of it, for numbers and their unit


def accuracy_over_tasks(labels: Sequence[str], matrices: Sequence[Tensor], *, title: str) -> Figure:
    """Two panels: mean accuracy over all tasks seen so far, and accuracy on the first task; a line per method."""
    lines = [
        Curve(label, label, 1, _single(mean_over_seen(matrix)), _single(matrix[:, 0]))
        for label, matrix in zip(labels, matrices, strict=True)
    ]
    return draw_curves(lines, title=title)


def draw_curves(lines: Sequence[Curve], *, title: str = "") -> Figure:
    """Accuracy over tasks in two panels: on all tasks seen so far, and on the first one. Names at the lines' ends."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        courses = [("all tasks seen so far", [c.seen for c in lines]), ("the first task", [c.first for c in lines])]
        titles = [f"Accuracy on {what}" for what, _ in courses]
        figure, panels = _line_panels(titles, [line.label for line in lines], title)
        stages = max(len(line.seen.mean) for line in lines)
        for panel, (_, course) in zip(panels, courses, strict=True):
            for number, (line, values) in enumerate(zip(lines, course, strict=True)):
                # Not a marker on every point: thirteen methods over twenty tasks would hide their own lines.
                every = max(1, stages // 5)
                marks = (number % every, every)
                _draw_line(panel, line, values, _style(line, lines), marks=marks, band=len(lines) <= 4)
            panel.set_xlabel("after task")
            panel.set_xlim(1 - 0.02 * stages, stages + 0.02 * stages)
            panel.set_xticks(_ticks(stages))
        for panel, (_, course) in zip(panels, courses, strict=True):
            _label_ends(panel, lines, [values.mean[-1] for values in course], stages)
        panels[0].set_ylabel("accuracy (%)")
    return figure


def draw_heatmaps(maps: Sequence[Heatmap], *, title: str = "") -> Figure:
    """Accuracy matrices side by side on one colour scale; the row is when, the column on which task."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE | {"axes.grid": False}):
        across = min(5, len(maps))
        down = ceil(len(maps) / across)
        side = 1.75 if across > 2 else 2.6
        width, height = across * (side + 0.2) + 1.5, down * (side + 0.5) + (0.95 if title else 0.6)
        figure = _figure(width, height, title)
        low, high = _limits(maps)
        for number, heatmap in enumerate(maps):
            row, column = divmod(number, across)
            left = 0.6 + column * (side + 0.2)
            bottom = height - (0.7 if title else 0.35) - (row + 1) * side - row * 0.5
            panel = figure.add_axes((left / width, bottom / height, side / width, side / height))
            _draw_heatmap(panel, heatmap, (low, high), numbers=side > 2 and len(heatmap.rows) <= 6)
            last_below = number + across >= len(maps)
            panel.set_xticks(_ticks(len(heatmap.rows[0])) if last_below else [])
            panel.set_yticks(_ticks(len(heatmap.rows)) if column == 0 else [])
            panel.set_ylabel("after task" if column == 0 else "")
            panel.set_xlabel("accuracy on task" if last_below else "")
        scale = figure.add_axes(((width - 0.65) / width, 0.5 / height, 0.14 / width, min(2.6, height - 1.0) / height))
        _draw_scale(scale, low, high, open_below=any(v < low for heatmap in maps for row in heatmap.rows for v in row))
    return figure


def draw_profiles(
    profiles: Sequence[Profile],
    places: Sequence[str],
    *,
    title: str = "",
    axis: str = "accuracy (%)",
    across: str = "",
) -> Figure:
    """A line per row of a table over its ordered columns; the published lines in a second panel on the same scale."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        panels = ["ours, mean over seeds"]
        if any(not isnan(value) for profile in profiles for value in profile.published):
            panels.append("published")
        figure, axes = _line_panels(panels, [profile.label for profile in profiles], title)
        for panel, what in zip(axes, panels, strict=True):
            lines = [profile.published if what == "published" else profile.ours.mean for profile in profiles]
            for profile, line in zip(profiles, lines, strict=True):
                style = _style(profile, profiles)
                look: dict[str, Any] = {
                    "color": style.color,
                    "linestyle": style.dash,
                    "marker": style.marker,
                    "markersize": 4.5,
                }
                panel.plot(range(1, len(places) + 1), line, linewidth=1.6, **look)
            panel.set_xlim(0.85, len(places) + 0.15)
            panel.set_xticks(range(1, len(places) + 1), places)
            panel.set_xlabel(across)
        for panel, what in zip(axes, panels, strict=True):
            ends = [(profile.published if what == "published" else profile.ours.mean)[-1] for profile in profiles]
            _label_ends(panel, profiles, ends, len(places))
        axes[0].set_ylabel(axis)
    return figure


def draw_bars(
    bars: Sequence[Bar], *, title: str = "", axis: str = "accuracy (%)", decimals: int = 2, ascending: bool = False
) -> Figure:
    """Our numbers as bars with the spread over seeds, the published ones as open diamonds with theirs; best first."""
    import matplotlib as mpl

    sign = 1 if ascending else -1
    bars = sorted(bars, key=lambda bar: (isnan(bar.mean), sign * (bar.published if isnan(bar.mean) else bar.mean)))
    with mpl.rc_context(STYLE | {"axes.grid.axis": "x"}):
        names = 0.25 + max(len(_short(bar.label)) for bar in bars) * 0.085
        width, height = BARS + names + 1.65, 0.3 * len(bars) + (1.2 if title else 0.9)
        figure = _figure(width, height, title)
        bottom = 0.55 / height
        panel = figure.add_axes((names / width, bottom, BARS / width, 0.3 * len(bars) / height))
        for place, bar in enumerate(bars):
            _draw_bar(panel, bar, place, _style(bar, bars), decimals)
        panel.set_yticks(range(len(bars)), [_short(bar.label) for bar in bars], color=INK["ink"])
        panel.set_ylim(len(bars) - 0.4, -0.6)
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel(axis)
        if any(not isnan(bar.published) for bar in bars):
            panel.set_title("ours, mean ± std over seeds (n)    ◇ published", fontsize=10, color=INK["muted"])
        else:
            panel.set_title("mean ± std over seeds (n)", fontsize=10, color=INK["muted"])
    return figure


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
    places = [0.0] * len(wanted)
    for centre, members in blocks:
        for rank, member in enumerate(members):
            places[member] = centre + gap * (rank - (len(members) - 1) / 2)
    return places


def save_figure(figure: Figure, path: Path, numbers: Numbers | None = None) -> Path:
    """Write `path` as PNG and SVG, with the numbers behind it as CSV and JSON if given; returns the PNG's path."""
    import matplotlib as mpl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(STYLE):
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
            figure.savefig(path.with_suffix(".png"), dpi=160)
        if numbers is not None:
            path.with_suffix(".csv").write_text(numbers.csv(), encoding="utf-8")
            path.with_suffix(".json").write_text(numbers.json(), encoding="utf-8")
    except OSError as error:
        raise HoldfastError(f"the figure could not be written to {path.parent}: {error.strerror or error}.") from error
    return path.with_suffix(".png")


def _figure(width: float, height: float, title: str) -> Figure:
    """An empty figure of so many inches, its title at the top left."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=INK["paper"])
    if title:
        figure.suptitle(title, x=0.12 / width, y=1 - 0.1 / height, ha="left", va="top", fontweight="bold", fontsize=12)
    return figure


def _line_panels(titles: Sequence[str], labels: Sequence[str], title: str) -> tuple[Figure, list[Axes]]:
    """Panels side by side on one scale, each with room at its right for the names of its lines."""
    names = 0.33 + max(len(_short(label)) for label in labels) * 0.085  # inches
    height = max(3.7, 1.2 + len(labels) * 0.24)
    width = MARGIN + len(titles) * (PANEL + names)
    figure = _figure(width, height, title)
    top = 1 - (0.65 if title else 0.35) / height
    grid = figure.subplots(1, len(titles), sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=MARGIN / width, right=1 - names / width, bottom=0.55 / height, top=top, wspace=names / PANEL
    )
    panels: list[Axes] = list(grid[0])
    for panel, what in zip(panels, titles, strict=True):
        panel.set_title(what)
    return figure, panels


def _single(values: Tensor) -> Course:
    return Course(tuple(values.tolist()), (float("nan"),) * len(values))


def _style(item: Curve | Bar | Profile, items: Sequence[Curve | Bar | Profile]) -> Style:
    """The method's look; variants of one method are told apart by looks of their own."""
    namesakes = [other.label for other in items if other.method == item.method]
    if len(namesakes) > 1 and not isinstance(item, Bar):
        return VARIANTS[namesakes.index(item.label) % len(VARIANTS)]
    return method_style(item.method, (other.method for other in items))


def _short(label: str) -> str:
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"


def _draw_line(panel: Axes, line: Curve, course: Course, style: Style, *, marks: tuple[int, int], band: bool) -> None:
    if line.is_level:
        panel.axhline(course.mean[0], color=style.color, linestyle=style.dash or "-", linewidth=1.2)
        return
    x = range(1, len(course.mean) + 1)
    panel.plot(
        x,
        course.mean,
        color=style.color,
        linestyle=style.dash,
        marker=style.marker,
        markersize=4.5,
        markevery=marks,
        linewidth=1.6,
    )
    if band and not any(isnan(value) for value in course.std):
        low = [mean - std for mean, std in zip(course.mean, course.std, strict=True)]
        high = [mean + std for mean, std in zip(course.mean, course.std, strict=True)]
        panel.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0)


def _label_ends(panel: Axes, lines: Sequence[Curve | Profile], ends: Sequence[float], stages: int) -> None:
    """Names beside the ends of the lines, pushed apart where they would overlap, with a thin lead to each."""
    low, high = panel.get_ylim()
    gap = LABEL_GAP / (72 * panel.bbox.height / panel.figure.dpi) * (high - low)
    drawn = [(line, end) for line, end in zip(lines, ends, strict=True) if not isnan(end)]
    right = panel.get_xlim()[1]
    room = 0.045 * (right - panel.get_xlim()[0])
    for (line, end), at in zip(drawn, spread([end for _, end in drawn], gap, low, high), strict=True):
        color = _style(line, lines).color
        start = right if isinstance(line, Curve) and line.is_level else stages
        panel.plot([start, right + room], [end, at], color=color, linewidth=0.7, clip_on=False, alpha=0.7)
        panel.text(right + 1.25 * room, at, _short(line.label), va="center", color=color, fontsize=9.5)
    panel.set_ylim(low, high)
    panel.set_xlim(right=right)


def _inside(centre: float, members: int, gap: float, low: float, high: float) -> float:
    """The centre of a block moved so that the block ends within low..high; its top end decides if it cannot fit."""
    half = gap * (members - 1) / 2
    return min(max(centre, low + half), high - half)


def _limits(maps: Sequence[Heatmap]) -> tuple[float, float]:
    """The ends of the colour scale, in tens; one number in fifty may lie below, so that the others stand apart."""
    values = [value for heatmap in maps for row in heatmap.rows for value in row if not isnan(value)]
    if not values:
        return 0.0, 100.0
    low = 10.0 * (sorted(values)[len(values) // 50] // 10)
    return low, max(10.0 * ceil(max(values) / 10), low + 10.0)


def _draw_heatmap(panel: Axes, heatmap: Heatmap, limits: tuple[float, float], *, numbers: bool) -> None:
    stages, tasks = len(heatmap.rows), len(heatmap.rows[0])
    extent = (0.5, tasks + 0.5, stages + 0.5, 0.5)
    low, high = limits
    panel.imshow(
        heatmap.rows, COLORMAP, vmin=low, vmax=high, extent=extent, aspect="auto", interpolation="none", zorder=0
    )
    final = heatmap.rows[-1]
    panel.set_title(f"{_short(heatmap.label)}  {sum(final) / len(final):.1f}", fontsize=10)
    panel.tick_params(length=2)
    if numbers:
        for stage, row in enumerate(heatmap.rows, start=1):
            for task, value in enumerate(row, start=1):
                if not isnan(value):
                    # Cividis runs from dark blue to yellow: fixed colours, in both themes.
                    color = "white" if value < (low + high) / 2 else "black"
                    panel.text(task, stage, f"{value:.0f}", ha="center", va="center", fontsize=10, color=color)


def _ticks(count: int) -> list[int]:
    return list(range(1, count + 1)) if count <= 6 else [1, *range(5, count + 1, 5)]


def _draw_scale(panel: Axes, low: float, high: float, *, open_below: bool) -> None:
    """The colour scale, as a picture of a few hundred bytes."""
    steps = [[1 - step / 63] for step in range(64)]
    panel.imshow(steps, COLORMAP, vmin=0, vmax=1, extent=(0, 1, low, high), aspect="auto", interpolation="none")
    panel.set_xticks([])
    panel.yaxis.tick_right()
    ticks = [low + step * (high - low) / 5 for step in range(6)]
    panel.set_yticks(ticks, [f"≤ {low:g}" if open_below and tick == low else f"{tick:g}" for tick in ticks])
    panel.tick_params(axis="y", length=2)
    panel.spines[:].set_visible(False)
    panel.set_title("%", fontsize=10, loc="center")


def _draw_bar(panel: Axes, bar: Bar, place: int, style: Style, decimals: int) -> None:
    whisker: dict[str, Any] = {"linewidth": 1.2, "capsize": 3}
    if not isnan(bar.mean):
        panel.barh(place, bar.mean, height=0.62, color=style.color, alpha=0.55, linewidth=0)
        if not isnan(bar.std):
            panel.errorbar(bar.mean, place, xerr=bar.std, fmt="none", ecolor=style.color, **whisker)
    if not isnan(bar.published):
        error = None if isnan(bar.published_std) else bar.published_std
        panel.errorbar(
            bar.published,
            place,
            xerr=error,
            marker="D",
            markersize=6,
            markerfacecolor="none",
            color=INK["ink"],
            ecolor=INK["ink"],
            **whisker,
        )
    text = "no result yet" if isnan(bar.mean) else f"{bar.mean:.{decimals}f}"
    text += "" if isnan(bar.std) else f" ± {bar.std:.{decimals}f}"
    text += f" ({bar.seeds})" if bar.seeds else ""
    panel.annotate(
        text, (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=10, annotation_clip=False
    )
