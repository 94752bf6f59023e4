"""The paper's tables and figures: which runs, and where each number stands."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from math import isnan, nan
from typing import Any

from holdfast.analysis import Scores, overview
from holdfast.analysis.claims import CLASS_IL
from holdfast.analysis.comparisons import REPLAY
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.experiments.base import Cell, Experiment, register
from holdfast.experiments.measures import ROBUSTNESS
from holdfast.experiments.published import published
from holdfast.experiments.verdicts import Table

__all__ = ["BENCHMARKS"]

BENCHMARKS = (*CLASS_IL, "rot-mnist", "mnist-360")
CIFAR, TINY = "seq-cifar10", "seq-tinyimagenet"

VARIANTS = {"tasks": "/{:g}-tasks", "alpha": "/alpha={:g}", "beta": "/beta={:g}"}
"""What published.csv adds to a benchmark's name where a table has several values of a setting."""

Settings = Mapping[str, Mapping[str, Any]]
"""The rows or columns of a table by name, each with its settings."""


def _each(setting: str, values: Iterable[Any], name: str = "{}") -> Settings:
    """A row or column for each value of a setting."""
    return {name.format(value): {setting: value} for value in values}


METHODS = _each("method", REPLAY)


def _grid(table: str, group: str, rows: Settings, columns: Settings, **common: Any) -> tuple[Cell, ...]:
    """A cell for each row and column, with the number that published.csv has for it in `table`.

    Settings are those of `RunConfig.preset`, and the `metric`. Unless they say otherwise, 500 samples are stored.
    """
    cells = []
    for (row, of_row), (column, of_column) in product(rows.items(), columns.items()):
        settings = {"metric": "accuracy", "buffer_size": 500, **common, **of_row, **of_column}
        metric = settings.pop("metric")
        variant = "".join(form.format(settings[name]) for name, form in VARIANTS.items() if name in settings)
        config = RunConfig.preset(**settings)
        number = published(table, config.benchmark + variant, config.buffer_size, config.method, metric)
        cells.append(Cell(group, row, column, metric, config, number))
    return tuple(cells)


def _measured(benchmark: str, *metrics: str) -> tuple[Cell, ...]:
    """A row for each method, a column for each measure."""
    return _grid("table1", benchmark, METHODS, _each("metric", metrics), benchmark=benchmark)


def _recency(benchmark: str, tasks: int) -> tuple[Cell, ...]:
    shares = [f"task_probability_{task + 1}" for task in range(tasks)]
    return _measured(benchmark, *shares, "recency_gap")


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


# Rows and columns of the tables.
BOUNDS = _each("method", ("joint", "sgd"))
ON_ALL = _each("benchmark", BENCHMARKS)
LENGTHS = _each("tasks", (5, 10, 20), "{} tasks")
FEW = _each("buffer_size", (10, 20, 50, 100), "buffer {}")
USUAL = _each("buffer_size", (200, 500), "buffer {}")
ALPHAS = _each("alpha", (1, 2, 5, 10), "alpha {}")
BETAS = _each("beta", (0.05, 0.1, 0.5, 1, 1.5, 2, 5, 10, 50), "beta {:g}")
TRUST = _each("metric", ("accuracy", "ece", "last_task_probability"))
WEIGHTED = _each("method", ("mi", "simclr", "dino"))

for _experiment in (
    Experiment(
        "table1",
        "Accuracy of ER and ER with each regularizer",
        "Table 2",
        "Consistency improves ER on all five benchmarks; sgd and joint are the bounds.",
        _grid("table1", "no buffer", BOUNDS, ON_ALL, buffer_size=None)
        + _grid("table1", "buffer 200", METHODS, ON_ALL, buffer_size=200)
        + _grid("table1", "buffer 500", METHODS, ON_ALL),
    ),
    Experiment(
        "long-sequences",
        "Accuracy on S-CIFAR-100 cut into 5, 10 and 20 tasks",
        "Table 3",
        "The more tasks share the buffer, the harder for ER; regularizers hold on to more.",
        _grid("table_long_sequences", "buffer 500", METHODS, LENGTHS, benchmark="seq-cifar100"),
        figure="lines",
    ),
    Experiment(
        "low-buffer",
        "Accuracy on S-CIFAR-10 with 10 to 100 stored samples",
        "Table 4",
        "Regularizers make more of very few stored samples.",
        _grid("table_low_buffer", CIFAR, METHODS, FEW, benchmark=CIFAR),
        figure="lines",
    ),
    Experiment(
        "forward-transfer",
        "Forward transfer on R-MNIST",
        "Table 5",
        "What was learned helps with rotations not yet seen, most with strict regularizers.",
        _grid("table_forward_transfer", "rot-mnist", METHODS, USUAL, benchmark="rot-mnist", metric="forward_transfer"),
    ),
    Experiment(
        "alpha",
        "ER on S-CIFAR-10 with the replayed loss weighted by alpha",
        "Table 6",
        "Weighting replay more does not mend ER's recency bias.",
        _grid("table_alpha", "er, buffer 500", ALPHAS, TRUST, benchmark=CIFAR, method="er"),
    ),
    Experiment(
        "beta",
        "Approximate regularizers on S-TinyImageNet by beta",
        "Table 7",
        "A larger weight does not lift approximate regularizers to the strict ones.",
        _grid("table_beta", "buffer 500", BETAS, WEIGHTED, benchmark=TINY),
        figure="lines",
    ),
    Experiment(
        "task-performance",
        "Accuracy on every task of S-CIFAR-10 as training goes on",
        "Figure 6",
        "With regularizers, early tasks lose less with every task that follows.",
        _measured(CIFAR, "accuracy"),
        figure="matrices",
    ),
    Experiment(
        "overview",
        "Gains over ER on S-TinyImageNet in accuracy, recency and calibration",
        "Figure 1",
        "Regularizers gain on ER in all three respects.",
        _measured(TINY, "accuracy", "recency_gap", "ece"),
        figure="gains",
        derive=_gains,
    ),
    Experiment(
        "calibration",
        "Expected calibration error",
        "Figures 4 and 7",
        "Models with regularizers know better how sure they can be.",
        _measured(CIFAR, "ece") + _measured(TINY, "ece"),
        figure="reliability",
        numbers={"figure4": f"benchmark={CIFAR}", "figure7": f"benchmark={TINY}"},
    ),
    Experiment(
        "recency",
        "Average probability given to each task's classes",
        "Figures 5 and 8",
        "ER favours the last task; regularizers spread belief more evenly.",
        _recency(CIFAR, tasks=5) + _recency(TINY, tasks=10),
        figure="recency",
        numbers={"figure5": f"benchmark={CIFAR}", "figure8": f"benchmark={TINY}"},
    ),
    Experiment(
        "robustness",
        "Accuracy on S-CIFAR-10 under common corruptions",
        "Figure 3",
        "Models with regularizers withstand corrupted images better.",
        _measured(CIFAR, *ROBUSTNESS),
        figure="robustness",
    ),
):
    _whole = {_experiment.source.lower().replace(" ", ""): ""}  # "Table 2" is also called table2
    register(replace(_experiment, numbers=_experiment.numbers or _whole))
