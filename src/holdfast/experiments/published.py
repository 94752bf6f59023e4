"""The numbers the paper prints, and where.

`published.csv` was transcribed from the tables of Bhat, Zonooz and Arani, "Consistency is the key to further mitigating
catastrophic forgetting in continual learning" (CoLLAs 2022): one row per printed number, `mean` and `std` as printed
(`std` is empty where none is). Its benchmarks carry the variant of a table, such as `seq-cifar100/10-tasks`.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

__all__ = ["PUBLISHED_RUNS", "Published", "published"]

PUBLISHED_RUNS = 3
"""Seeds behind each published mean and standard deviation."""


class Published(NamedTuple):
    """A number as printed; `std` is None where the paper gives none."""

    mean: float
    std: float | None


def published(table: str, benchmark: str, buffer_size: int | None, method: str, metric: str) -> Published | None:
    """The printed number of one cell, or None where the paper has none.

    >>> published("table1", "rot-mnist", 200, "mse", "accuracy")
    Published(mean=90.78, std=0.22)
    """
    return _rows().get((table, benchmark, "" if buffer_size is None else str(buffer_size), method, metric))


@cache
def _rows() -> dict[tuple[str, ...], Published]:
    text = files("holdfast.experiments").joinpath("published.csv").read_text("utf-8")
    keys = ("table", "benchmark", "buffer_size", "method", "metric")
    return {
        tuple(row[key] for key in keys): Published(float(row["mean"]), float(row["std"]) if row["std"] else None)
        for row in csv.DictReader(text.splitlines())
    }
