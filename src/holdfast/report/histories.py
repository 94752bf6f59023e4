"""The figure of a forgetting monitor: scores of slices over the steps of learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.report.figures import STYLE
from holdfast.report.styles import INK, VARIANTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Line", "draw_history", "lines"]

Line = tuple[list[int], list[float], list[bool]]
"""Steps, scores, and which readings are the first of a drop; scores that are not finite are NaN."""


def lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, Line]:
    """The rows of a monitor's history as one line per slice."""
    found: dict[str, Line] = {}
    dropped: dict[str, bool] = {}
    for row in rows:
        steps, scores, told = found.setdefault(row["slice"], ([], [], []))
        steps.append(row["step"])
        scores.append(float("nan") if row["score"] is None else row["score"])
        told.append(row["dropped"] and not dropped.get(row["slice"], False))
        dropped[row["slice"]] = row["dropped"]
    return found


def draw_history(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> Figure:
    """Scores over steps, a line per slice; rings mark where a drop began."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.7), facecolor=INK["paper"], layout="constrained")
        panel = figure.subplots()
        drawn = lines(rows)
        for number, (name, (steps, scores, told)) in enumerate(drawn.items()):
            style = VARIANTS[number % len(VARIANTS)]
            panel.plot(steps, scores, color=style.color, marker=style.marker, markersize=4, linewidth=1.6, label=name)
            rings = [(step, score) for step, score, ring in zip(steps, scores, told, strict=True) if ring]
            for step, score in rings:
                panel.scatter(step, score, s=120, facecolors="none", edgecolors=style.color)
        panel.set_xlabel("step")
        panel.set_ylabel("score")
        if title:
            panel.set_title(title, fontweight="bold")
        if drawn:
            figure.legend(loc="outside right upper", frameon=False, fontsize=9.5)
    return figure
