"""The newcomer's minute: four methods on a shortened rot-mnist, compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.config import RunConfig
from holdfast.report.figures import accuracy_over_tasks, save_figure
from holdfast.results import RunResult

__all__ = ["METHODS", "configs", "draw"]

METHODS = ("sgd", "er", "l2", "mse")


def configs(*, tasks: int = 10, train_limit: int = 25_600, seed: int = 0) -> Iterator[RunConfig]:
    """The demo's runs, about a minute in all on a laptop."""
    for method in METHODS:
        yield RunConfig.preset("rot-mnist", method, buffer_size=200, seed=seed, tasks=tasks, train_limit=train_limit)


def draw(results: Sequence[RunResult], out: Path) -> Path:
    """The picture of accuracy over tasks, as PNG and SVG; returns the PNG's path."""
    labels = [result.config.method for result in results]
    figure = accuracy_over_tasks(labels, [result.matrix for result in results], title="Rotated MNIST, 200 samples kept")
    return save_figure(figure, out / "accuracy-over-tasks")
