"""Figures in one style. The numbers behind each are computed apart from drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PALETTE", "accuracy_over_tasks", "mean_over_seen", "save_figure"]

# Okabe and Ito's colours, which stay apart for colour-blind readers; black is for text.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",  # the same figure is the same file
}


def mean_over_seen(matrix: Tensor) -> Tensor:
    """Mean accuracy over the tasks seen so far, after each task, (T,)."""
    return torch.stack([row[: stage + 1].mean() for stage, row in enumerate(matrix)])


def accuracy_over_tasks(labels: Sequence[str], matrices: Sequence[Tensor], *, title: str) -> Figure:
    """Two panels: mean accuracy over all tasks seen so far, and accuracy on the first task; a line per method."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 4.2), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        curves = [
            ("all tasks seen so far", [mean_over_seen(matrix) for matrix in matrices]),
            ("the first task", [matrix[:, 0] for matrix in matrices]),
        ]
        for panel, (what, lines) in zip(panels, curves, strict=True):
            for line, color in zip(lines, PALETTE, strict=False):
                panel.plot(range(1, len(line) + 1), line, color=color, marker="o", markersize=3.5, linewidth=1.8)
            panel.set_title(f"Accuracy on {what}", loc="left", fontsize=11)
            panel.set_xlabel("after task")
            panel.xaxis.get_major_locator().set_params(integer=True)
        _label_ends(panels[1], labels, [lines[:, 0] for lines in matrices])
        panels[0].set_ylabel("accuracy (%)")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def _label_ends(panel: Axes, labels: Sequence[str], lines: Sequence[Tensor], gap: float = 0.055) -> None:
    """Names at the ends of the lines, pushed apart where they would overlap."""
    low, high = panel.get_ylim()
    least = gap * (high - low)
    order = sorted(range(len(lines)), key=lambda i: float(lines[i][-1]))
    at = -float("inf")
    for i in order:
        at = max(float(lines[i][-1]), at + least)
        panel.annotate(
            labels[i],
            (len(lines[i]), at),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=PALETTE[i % len(PALETTE)],
            fontweight="bold",
            annotation_clip=False,
        )


def save_figure(figure: Figure, path: Path) -> Path:
    """Write `path` as PNG and SVG; returns the PNG's path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=160)
    except OSError as error:
        raise HoldfastError(f"the figure could not be written to {path.parent}: {error.strerror or error}.") from error
    return path.with_suffix(".png")
