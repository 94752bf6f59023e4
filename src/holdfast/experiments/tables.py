"""The paper's tables: which runs, and where each number stands."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.analysis.claims import CLASS_IL
from holdfast.analysis.comparisons import REGULARIZERS
from holdfast.config import RunConfig
from holdfast.experiments.base import Cell, Experiment, register
from holdfast.experiments.published import published

__all__ = ["BENCHMARKS", "REPLAY"]

BENCHMARKS = (*CLASS_IL, "rot-mnist", "mnist-360")
REPLAY = ("er", *REGULARIZERS)


def _cell(
    table: str, group: str, row: str, column: str, config: RunConfig, metric: str = "accuracy", variant: str = ""
) -> Cell:
    """A cell with the number that published.csv has in `table` for this benchmark (and `variant`) and method."""
    number = published(table, config.benchmark + variant, config.buffer_size, config.method, metric)
    return Cell(group, row, column, metric, config, number)


def _buffer(size: int | None) -> str:
    """The name of a block or column of the tables."""
    return "no buffer" if size is None else f"buffer {size}"


def _main() -> Iterator[Cell]:
    for size, methods in ((None, ("joint", "sgd")), (200, REPLAY), (500, REPLAY)):
        for method in methods:
            for name in BENCHMARKS:
                config = RunConfig.preset(name, method, buffer_size=size)
                yield _cell("table1", _buffer(size), method, name, config)


def _long_sequences() -> Iterator[Cell]:
    for method in REPLAY:
        for tasks in (5, 10, 20):
            config = RunConfig.preset("seq-cifar100", method, buffer_size=500, tasks=tasks)
            place = (_buffer(500), method, f"{tasks} tasks")
            yield _cell("table_long_sequences", *place, config, variant=f"/{tasks}-tasks")


def _low_buffer() -> Iterator[Cell]:
    for method in REPLAY:
        for size in (10, 20, 50, 100):
            config = RunConfig.preset("seq-cifar10", method, buffer_size=size)
            yield _cell("table_low_buffer", "seq-cifar10", method, _buffer(size), config)


def _forward_transfer() -> Iterator[Cell]:
    for method in REPLAY:
        for size in (200, 500):
            config = RunConfig.preset("rot-mnist", method, buffer_size=size)
            yield _cell("table_forward_transfer", "rot-mnist", method, _buffer(size), config, "forward_transfer")


def _alpha() -> Iterator[Cell]:
    for alpha in (1, 2, 5, 10):
        for metric in ("accuracy", "ece", "last_task_probability"):
            config = RunConfig.preset("seq-cifar10", "er", buffer_size=500, alpha=alpha)
            place = ("er, buffer 500", f"alpha {alpha}", metric)
            yield _cell("table_alpha", *place, config, metric, f"/alpha={alpha}")


def _beta() -> Iterator[Cell]:
    for beta in (0.05, 0.1, 0.5, 1, 1.5, 2, 5, 10, 50):
        for method in ("mi", "simclr", "dino"):
            config = RunConfig.preset("seq-tinyimagenet", method, buffer_size=500, beta=beta)
            place = (_buffer(500), f"beta {beta:g}", method)
            yield _cell("table_beta", *place, config, variant=f"/beta={beta:g}")


for _experiment in (
    Experiment(
        "table1",
        "Accuracy of ER and ER with each regularizer",
        "Table 2",
        "Consistency improves ER on all five benchmarks; sgd and joint are the bounds.",
        tuple(_main()),
        numbers={"table2": ""},
    ),
    Experiment(
        "long-sequences",
        "Accuracy on S-CIFAR-100 cut into 5, 10 and 20 tasks",
        "Table 3",
        "The more tasks share the buffer, the harder for ER; regularizers hold on to more.",
        tuple(_long_sequences()),
        figure="lines",
        numbers={"table3": ""},
    ),
    Experiment(
        "low-buffer",
        "Accuracy on S-CIFAR-10 with 10 to 100 stored samples",
        "Table 4",
        "Regularizers make more of very few stored samples.",
        tuple(_low_buffer()),
        figure="lines",
        numbers={"table4": ""},
    ),
    Experiment(
        "forward-transfer",
        "Forward transfer on R-MNIST",
        "Table 5",
        "What was learned helps with rotations not yet seen, most with strict regularizers.",
        tuple(_forward_transfer()),
        numbers={"table5": ""},
    ),
    Experiment(
        "alpha",
        "ER on S-CIFAR-10 with the replayed loss weighted by alpha",
        "Table 6",
        "Weighting replay more does not mend ER's recency bias.",
        tuple(_alpha()),
        numbers={"table6": ""},
    ),
    Experiment(
        "beta",
        "Approximate regularizers on S-TinyImageNet by beta",
        "Table 7",
        "A larger weight does not lift approximate regularizers to the strict ones.",
        tuple(_beta()),
        figure="lines",
        numbers={"table7": ""},
    ),
):
    register(_experiment)
