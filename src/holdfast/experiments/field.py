"""The field: the methods of other papers beside the paper's, each with the number that its source prints."""

from collections.abc import Iterator

from holdfast.config import RunConfig
from holdfast.experiments.base import Cell, Experiment, register
from holdfast.experiments.paper import BENCHMARKS
from holdfast.experiments.published import published
from holdfast.methods import learner_of

__all__ = ["FIELD", "UNBUFFERED"]

UNBUFFERED = ("lwf", "ewc", "si")
FIELD = ("er", "agem", "gem", "icarl", "fdr", "der", "mse", "er-ace", "clser", "esmer", "dualnet", "ballast", "linf")
SIZES = (200, 500)
"""Buffers of which the table has every cell. Of larger ones it has the cells with a published number."""


def _cells() -> Iterator[Cell]:
    for size in (None, *SIZES, 5120):
        for metric, suffix in (("accuracy", ""), ("task_il_accuracy", ", Task-IL")):
            group = ("no buffer" if size is None else f"buffer {size}") + suffix
            for method in UNBUFFERED if size is None else FIELD:
                for benchmark in BENCHMARKS:
                    place = (benchmark, size, method, metric)
                    number = published("field", *place) or published("table1", *place)
                    wanted = metric == "accuracy" and size != 5120 and not _impossible(method, benchmark)
                    if number is not None or wanted:
                        config = RunConfig.preset(benchmark, method, buffer_size=size)
                        yield Cell(group, method, benchmark, metric, config, number)


def _impossible(method: str, benchmark: str) -> bool:
    """Whether the method needs task boundaries, which the benchmark does not have."""
    return benchmark == "mnist-360" and bool(learner_of(method).needs_boundaries)


register(
    Experiment(
        "field",
        "Accuracy of the field: the methods of other papers, linf of this one, and ballast of our own",
        "Tables of the papers that are named below",
        "Methods that store the network's answers or average its weights lead. mse is DER++.",
        tuple(_cells()),
        caveat="Other papers ran other code, settings and numbers of seeds, so a difference need not be a fault. "
        "The published A-GEM fills its memory at the end of each task; here its memory is a reservoir (A-GEM-R).",
    )
)
