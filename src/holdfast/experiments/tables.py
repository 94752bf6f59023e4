"""The paper's tables: which runs, and where each number stands."""

from __future__ import annotations

from holdfast.config import RunConfig
from holdfast.experiments.base import Cell, Experiment, register
from holdfast.experiments.published import published

__all__ = ["BENCHMARKS", "CLASS_IL", "REGULARIZERS", "REPLAY"]

CLASS_IL = ("seq-cifar10", "seq-cifar100", "seq-tinyimagenet")
BENCHMARKS = (*CLASS_IL, "rot-mnist", "mnist-360")
REGULARIZERS = ("l1", "l2", "linf", "kl", "mse", "mi", "simclr", "byol", "dino", "barlow")
"""In the order of the paper's tables."""
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


register(
    Experiment(
        "table1",
        "Accuracy of ER and ER with each regularizer",
        "Table 1",
        "Consistency improves ER on all five benchmarks; sgd and joint are the bounds.",
        tuple(
            _cell("table1", _buffer(size), method, name, RunConfig.preset(name, method, buffer_size=size))
            for size, methods in ((None, ("joint", "sgd")), (200, REPLAY), (500, REPLAY))
            for method in methods
            for name in BENCHMARKS
        ),
    )
)
register(
    Experiment(
        "long-sequences",
        "Accuracy on S-CIFAR-100 cut into 5, 10 and 20 tasks",
        "Table on longer task sequences",
        "The more tasks share the buffer, the harder for ER; regularizers hold on to more.",
        tuple(
            _cell(
                "table_long_sequences",
                _buffer(500),
                method,
                f"{tasks} tasks",
                RunConfig.preset("seq-cifar100", method, buffer_size=500, tasks=tasks),
                variant=f"/{tasks}-tasks",
            )
            for method in REPLAY
            for tasks in (5, 10, 20)
        ),
        figure="lines",
    )
)
register(
    Experiment(
        "low-buffer",
        "Accuracy on S-CIFAR-10 with 10 to 100 stored samples",
        "Table on low buffer sizes",
        "Regularizers make more of very few stored samples.",
        tuple(
            _cell(
                "table_low_buffer",
                "seq-cifar10",
                method,
                _buffer(size),
                RunConfig.preset("seq-cifar10", method, buffer_size=size),
            )
            for method in REPLAY
            for size in (10, 20, 50, 100)
        ),
        figure="lines",
    )
)
register(
    Experiment(
        "forward-transfer",
        "Forward transfer on R-MNIST",
        "Appendix, table on forward transfer",
        "What was learned helps with rotations not yet seen, most with strict regularizers.",
        tuple(
            _cell(
                "table_forward_transfer",
                "rot-mnist",
                method,
                _buffer(size),
                RunConfig.preset("rot-mnist", method, buffer_size=size),
                "forward_transfer",
            )
            for method in REPLAY
            for size in (200, 500)
        ),
        figure="bars",
    )
)
register(
    Experiment(
        "alpha",
        "ER on S-CIFAR-10 with the replayed loss weighted by alpha",
        "Appendix, table on alpha",
        "Weighting replay more does not mend ER's recency bias.",
        tuple(
            _cell(
                "table_alpha",
                "er, buffer 500",
                f"alpha {alpha}",
                metric,
                RunConfig.preset("seq-cifar10", "er", buffer_size=500, alpha=alpha),
                metric,
                f"/alpha={alpha}",
            )
            for alpha in (1, 2, 5, 10)
            for metric in ("accuracy", "ece", "last_task_probability")
        ),
    )
)
register(
    Experiment(
        "beta",
        "Approximate regularizers on S-TinyImageNet by beta",
        "Appendix, table on beta",
        "A larger weight does not lift approximate regularizers to the strict ones.",
        tuple(
            _cell(
                "table_beta",
                _buffer(500),
                f"beta {beta:g}",
                method,
                RunConfig.preset("seq-tinyimagenet", method, buffer_size=500, beta=beta),
                variant=f"/beta={beta:g}",
            )
            for beta in (0.05, 0.1, 0.5, 1, 1.5, 2, 5, 10, 50)
            for method in ("mi", "simclr", "dino")
        ),
        figure="lines",
    )
)
