"""The figure of a study: each value that was tried against the accuracy it gave, and how much each value mattered."""

from __future__ import annotations

from math import nan, sqrt
from typing import TYPE_CHECKING

from holdfast.report.draw.canvas import add_note, add_panel, blank
from holdfast.report.draw.style import INK, method_style
from holdfast.report.text import count
from holdfast.tuning import Range, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_study"]

PANEL, GAP, LEFT, TOP, TALL = 2.4, 0.25, 0.8, 0.75, 2.3  # inches


def draw_study(study: Study) -> Figure:
    """A panel for each number tuned, on one scale of accuracy, and bars for how much each mattered."""
    bars = 1.1 + 1.6 if study.importance else 0.0
    width, height = LEFT + len(study.space) * (PANEL + GAP) + bars + 0.2, TOP + TALL + 0.75
    with blank(max(width, 4.6), height, study.name) as figure:
        first: Axes | None = None
        for number, tried in enumerate(study.space):
            box = (LEFT + number * (PANEL + GAP), TOP, PANEL, TALL)
            panel = add_panel(figure, box, sharey=first)
            _scatter(panel, study, tried)
            panel.tick_params(labelleft=first is None)
            first = first or panel
        if first is not None:
            first.set_ylabel("validation accuracy (%)")
        if study.importance:
            _bars(add_panel(figure, (width - 1.8, TOP, 1.6, TALL)), study.importance)
        pruned, running = study.count("pruned"), study.count("running")
        note = f"{count(len(study.complete), 'trial')} complete (dots; the ring is the best, the square the preset), "
        note += f"{pruned} stopped early (ticks at the bottom)" + (f", {running} not finished" if running else "")
        add_note(figure, note, left=0.12)
    return figure


def _scatter(panel: Axes, study: Study, tried: Range) -> None:
    """Complete trials as dots, and those that were stopped as ticks: their accuracy is of fewer tasks."""
    color = method_style(study.config.method).color
    for trial in study.complete:
        marker = "s" if trial == study.preset else "o"
        panel.plot(trial.values[tried.name], trial.accuracy or nan, marker, color=color, markersize=5, alpha=0.85)
    if study.best is not None:
        x, y = study.best.values[tried.name], study.best.accuracy or nan
        panel.plot(x, y, "o", markersize=11, markerfacecolor="none", markeredgecolor=INK["ink"], markeredgewidth=1.2)
    stopped = [trial.values[tried.name] for trial in study.trials if trial.state == "pruned"]
    panel.plot(stopped, [0.03] * len(stopped), "|", color=INK["muted"], transform=panel.get_xaxis_transform())
    low, high = tried.low, tried.high
    middle, margin = (low + high) / 2, 0.04 * (high - low)
    ends = (low - margin, high + margin)
    if tried.logarithmic:
        panel.set_xscale("log")
        middle, ends = sqrt(low * high), (low / 1.08, high * 1.08)
    panel.set_xticks([low, middle, high], [f"{tick:.3g}" for tick in (low, middle, high)])
    panel.set_xticks([], minor=True)
    panel.set(xlim=ends, title=tried.name)


def _bars(panel: Axes, importance: dict[str, float]) -> None:
    names = sorted(importance, key=lambda name: importance[name])
    panel.barh(names, [100 * importance[name] for name in names], color=INK["muted"], height=0.55)
    for place, name in enumerate(names):
        panel.text(100 * importance[name] + 2, place, f"{100 * importance[name]:.0f} %", va="center", fontsize=9)
    panel.grid(visible=False)
    panel.set(xlim=(0, 125), xticks=[], title="what mattered")
