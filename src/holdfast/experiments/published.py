"""The numbers that papers print, and where.

`published.csv` was transcribed from the tables of Bhat, Zonooz and Arani, "Consistency is the key to further mitigating
catastrophic forgetting in continual learning" (CoLLAs 2022): one row per printed number, `mean` and `std` as printed
(`std` is empty where none is). Its benchmarks carry the variant of a table, such as `seq-cifar100/10-tasks`.

`field.csv` has what other papers print of other methods, with a `source` in each row. Tables that could not be had were
read in reprints, which the source names, or in transcriptions: those of DER with 5120 samples, and of MOCA. Numbers
without a spread were taken over as quoted by others.
"""

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

__all__ = ["PUBLISHED_RUNS", "Published", "published"]

PUBLISHED_RUNS = 3
"""Seeds behind each mean and standard deviation of the paper. Papers with more are judged as if they had as many."""


class Published(NamedTuple):
    """A number as printed; `std` is None where the paper gives none."""

    mean: float
    std: float | None
    source: str = ""
    """The other paper that prints it; empty for the paper itself."""


def published(table: str, benchmark: str, buffer_size: int | None, method: str, metric: str) -> Published | None:
    """The printed number of one cell, or None where there is none. The table of `field.csv` is `field`.

    >>> published("table1", "rot-mnist", 200, "mse", "accuracy")
    Published(mean=90.78, std=0.22, source='')
    """
    return _rows().get((table, benchmark, "" if buffer_size is None else str(buffer_size), method, metric))


@cache
def _rows() -> dict[tuple[str, ...], Published]:
    keys = ("table", "benchmark", "buffer_size", "method", "metric")
    found = {}
    for name in ("published.csv", "field.csv"):
        text = files("holdfast.experiments").joinpath(name).read_text("utf-8")
        for row in csv.DictReader(text.splitlines()):
            std = float(row["std"]) if row["std"] else None
            found[tuple(row[key] for key in keys)] = Published(float(row["mean"]), std, row.get("source", ""))
    return found
