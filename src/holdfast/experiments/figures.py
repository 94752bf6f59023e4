"""The paper's figures as grids of numbers: matrices, calibration, recency, robustness and the overview."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan

from holdfast.analysis import Scores, overview
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.experiments.base import Cell, Experiment, register
from holdfast.experiments.measures import ROBUSTNESS
from holdfast.experiments.published import published
from holdfast.experiments.tables import REPLAY
from holdfast.experiments.verdicts import Table

__all__: list[str] = []

BUFFER = 500
TASKS = {"seq-cifar10": 5, "seq-tinyimagenet": 10}
CIFAR, TINY = (f"benchmark={name}" for name in TASKS)


def _grid(benchmark: str, metrics: Sequence[str]) -> tuple[Cell, ...]:
    """One row per method with a buffer of 500, one column per measure."""
    return tuple(
        Cell(
            group=benchmark,
            row=method,
            column=metric,
            metric=metric,
            config=RunConfig.preset(benchmark, method, buffer_size=BUFFER),
            published=published("table1", benchmark, BUFFER, method, metric),
        )
        for method in REPLAY
        for metric in metrics
    )


def _task_probabilities(benchmark: str) -> list[str]:
    return [*(f"task_probability_{task + 1}" for task in range(TASKS[benchmark])), "recency_gap"]


def _gains(table: Table) -> Mapping[str, Mapping[str, float]]:
    """Relative gains over ER in percent, from the means of each method that has all three."""
    scores = {}
    for group in table.groups:
        for row in table.rows(group):
            found = [table.at(group, row, column) for column in ("accuracy", "recency_gap", "ece")]
            means = [nan if verdict is None else verdict.mean for verdict in found]
            if not any(map(isnan, means)):
                scores[row] = Scores(*means)
    try:
        gained = overview(scores)
    except UsageError:
        return {}  # er is not there yet
    return {
        f"{name} gain (%)": {row: getattr(gain, name) for row, gain in gained.items()}
        for name in ("accuracy", "recency", "calibration")
    }


for _experiment in (
    Experiment(
        "task-performance",
        "Accuracy on every task of S-CIFAR-10 as training goes on",
        "Figure 6",
        "With regularizers, early tasks lose less with every task that follows.",
        _grid("seq-cifar10", ["accuracy"]),
        figure="matrices",
        numbers={"figure6": ""},
    ),
    Experiment(
        "overview",
        "Gains over ER on S-TinyImageNet in accuracy, recency and calibration",
        "Figure 1",
        "Regularizers gain on ER in all three respects.",
        _grid("seq-tinyimagenet", ["accuracy", "recency_gap", "ece"]),
        figure="gains",
        derive=_gains,
        numbers={"figure1": ""},
    ),
    Experiment(
        "calibration",
        "Expected calibration error",
        "Figures 4 and 7",
        "Models with regularizers know better how sure they can be.",
        tuple(cell for benchmark in TASKS for cell in _grid(benchmark, ["ece"])),
        figure="reliability",
        numbers={"figure4": CIFAR, "figure7": TINY},
    ),
    Experiment(
        "recency",
        "Average probability given to each task's classes",
        "Figures 5 and 8",
        "ER favours the last task; regularizers spread belief more evenly.",
        tuple(cell for benchmark in TASKS for cell in _grid(benchmark, _task_probabilities(benchmark))),
        figure="recency",
        numbers={"figure5": CIFAR, "figure8": TINY},
    ),
    Experiment(
        "robustness",
        "Accuracy on S-CIFAR-10 under common corruptions",
        "Figure 3",
        "Models with regularizers withstand corrupted images better.",
        _grid("seq-cifar10", ROBUSTNESS),
        figure="robustness",
        numbers={"figure3": ""},
    ),
):
    register(_experiment)
