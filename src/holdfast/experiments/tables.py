"""The paper's tables: which runs, and where each number stands."""

from __future__ import annotations

from holdfast.config import RunConfig
from holdfast.experiments.base import Cell, Experiment, register
from holdfast.experiments.published import published

__all__ = ["APPROXIMATE", "BENCHMARKS", "CLASS_IL", "REGULARIZERS", "REPLAY", "STRICT"]

CLASS_IL = ("seq-cifar10", "seq-cifar100", "seq-tinyimagenet")
BENCHMARKS = (*CLASS_IL, "rot-mnist", "mnist-360")
STRICT = ("l1", "l2", "linf", "mse")
APPROXIMATE = ("kl", "mi", "simclr", "byol", "dino", "barlow")
REGULARIZERS = ("l1", "l2", "linf", "kl", "mse", "mi", "simclr", "byol", "dino", "barlow")
"""In the order of the paper's tables."""
REPLAY = ("er", *REGULARIZERS)


def buffer_group(buffer_size: int | None) -> str:
    """The name of a block of the tables."""
    return "no buffer" if buffer_size is None else f"buffer {buffer_size}"


def _table1() -> tuple[Cell, ...]:
    places = [(method, None) for method in ("joint", "sgd")] + [(method, M) for M in (200, 500) for method in REPLAY]
    return tuple(
        Cell(
            group=buffer_group(buffer_size),
            row=method,
            column=benchmark,
            metric="accuracy",
            config=RunConfig.preset(benchmark, method, buffer_size=buffer_size),
            published=published("table1", benchmark, buffer_size, method, "accuracy"),
        )
        for method, buffer_size in places
        for benchmark in BENCHMARKS
    )


def _long_sequences() -> tuple[Cell, ...]:
    return tuple(
        Cell(
            group=buffer_group(500),
            row=method,
            column=f"{tasks} tasks",
            metric="accuracy",
            config=RunConfig.preset("seq-cifar100", method, buffer_size=500, tasks=tasks),
            published=published("table_long_sequences", f"seq-cifar100/{tasks}-tasks", 500, method, "accuracy"),
        )
        for method in REPLAY
        for tasks in (5, 10, 20)
    )


def _by_buffer(table: str, benchmark: str, metric: str, sizes: tuple[int, ...]) -> tuple[Cell, ...]:
    """Methods down, buffer sizes across, on one benchmark."""
    return tuple(
        Cell(
            group=benchmark,
            row=method,
            column=buffer_group(size),
            metric=metric,
            config=RunConfig.preset(benchmark, method, buffer_size=size),
            published=published(table, benchmark, size, method, metric),
        )
        for method in REPLAY
        for size in sizes
    )


def _alpha() -> tuple[Cell, ...]:
    return tuple(
        Cell(
            group="er, buffer 500",
            row=f"alpha {alpha}",
            column=metric,
            metric=metric,
            config=RunConfig.preset("seq-cifar10", "er", buffer_size=500, alpha=alpha),
            published=published("table_alpha", f"seq-cifar10/alpha={alpha}", 500, "er", metric),
        )
        for alpha in (1, 2, 5, 10)
        for metric in ("accuracy", "ece", "last_task_probability")
    )


def _beta() -> tuple[Cell, ...]:
    return tuple(
        Cell(
            group="buffer 500",
            row=f"beta {beta:g}",
            column=method,
            metric="accuracy",
            config=RunConfig.preset("seq-tinyimagenet", method, buffer_size=500, beta=beta),
            published=published("table_beta", f"seq-tinyimagenet/beta={beta:g}", 500, method, "accuracy"),
        )
        for beta in (0.05, 0.1, 0.5, 1, 1.5, 2, 5, 10, 50)
        for method in ("mi", "simclr", "dino")
    )


register(
    Experiment(
        "table1",
        "Accuracy of ER and ER with each regularizer",
        "Table 1",
        "Consistency improves ER on all five benchmarks; sgd and joint are the bounds.",
        _table1(),
    )
)
register(
    Experiment(
        "long-sequences",
        "Accuracy on S-CIFAR-100 cut into 5, 10 and 20 tasks",
        "Table on longer task sequences",
        "The more tasks share the buffer, the harder for ER; regularizers hold on to more.",
        _long_sequences(),
        figure="lines",
    )
)
register(
    Experiment(
        "low-buffer",
        "Accuracy on S-CIFAR-10 with 10 to 100 stored samples",
        "Table on low buffer sizes",
        "Regularizers make more of very few stored samples.",
        _by_buffer("table_low_buffer", "seq-cifar10", "accuracy", (10, 20, 50, 100)),
        figure="lines",
    )
)
register(
    Experiment(
        "forward-transfer",
        "Forward transfer on R-MNIST",
        "Appendix, table on forward transfer",
        "What was learned helps with rotations not yet seen, most with strict regularizers.",
        _by_buffer("table_forward_transfer", "rot-mnist", "forward_transfer", (200, 500)),
        figure="bars",
    )
)
register(
    Experiment(
        "alpha",
        "ER on S-CIFAR-10 with the replayed loss weighted by alpha",
        "Appendix, table on alpha",
        "Weighting replay more does not mend ER's recency bias.",
        _alpha(),
    )
)
register(
    Experiment(
        "beta",
        "Approximate regularizers on S-TinyImageNet by beta",
        "Appendix, table on beta",
        "A larger weight does not lift approximate regularizers to the strict ones.",
        _beta(),
        figure="lines",
    )
)
