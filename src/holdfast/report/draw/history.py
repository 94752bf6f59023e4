"""The figure of a forgetting monitor: scores of slices over the steps of learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.report.draw.canvas import blank
from holdfast.report.draw.style import VARIANTS

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
        steps, scores, begins = found.setdefault(row["slice"], ([], [], []))
        steps.append(row["step"])
        scores.append(float("nan") if row["score"] is None else row["score"])
        begins.append(row["dropped"] and not dropped.get(row["slice"], False))
        dropped[row["slice"]] = row["dropped"]
    return found


def draw_history(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> Figure:
    """Scores over steps, a line per slice; rings mark where a drop began."""
    drawn = lines(rows)
    with blank(7.2, 3.7) as figure:
        figure.set_layout_engine("constrained")  # names of slices may be long
        panel = figure.subplots()
        for number, (name, (steps, scores, begins)) in enumerate(drawn.items()):
            style = VARIANTS[number % len(VARIANTS)]
            panel.plot(steps, scores, label=name, **style.line())
            for step, score, begin in zip(steps, scores, begins, strict=True):
                if begin:
                    panel.scatter(step, score, s=120, facecolors="none", edgecolors=style.color)
        panel.set(xlabel="step", ylabel="score")
        panel.set_title(title, fontweight="bold")
        if drawn:
            figure.legend(loc="outside right upper", frameon=False, fontsize=9.5)
    return figure
