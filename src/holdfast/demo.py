"""The newcomer's minute: four methods on a shortened rot-mnist, compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.analysis.comparisons import comparisons
from holdfast.config import RunConfig
from holdfast.report.charts import comparison_charts, score_charts
from holdfast.report.draw.canvas import save_figure
from holdfast.results import RunResult

__all__ = ["METHODS", "configs", "draw"]

METHODS = ("sgd", "er", "l2", "mse")
BUFFER = 200


def configs(*, tasks: int = 10, train_limit: int = 25_600, seed: int = 0) -> Iterator[RunConfig]:
    """The demo's runs, about a minute in all on a laptop."""
    for method in METHODS:
        yield RunConfig.preset("rot-mnist", method, buffer_size=BUFFER, seed=seed, tasks=tasks, train_limit=train_limit)


def draw(results: Sequence[RunResult], out: Path) -> Path:
    """The figure of accuracy over tasks as PNG and SVG; returns the PNG's path."""
    (comparison,) = comparisons(results)
    chart = [*comparison_charts(comparison), *score_charts(comparison)][0]  # one task has no course, only scores
    figure = chart.draw(title=f"Rotated MNIST, {BUFFER} stored samples")
    return save_figure(figure, out / "accuracy-over-tasks")
