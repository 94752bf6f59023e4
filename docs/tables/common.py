"""What the tables share: where numbers are read, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from holdfast.experiments import Results
from holdfast.report import gather

DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS.parent / "results"
SPACE = "\u00a0"  # a space at which no line ends


@cache
def measured(name: str) -> Any:
    """The numbers in NAME.json, which is beside its picture or in docs/."""
    path = DOCS / "pictures" / f"{name}.json"
    return json.loads((path if path.exists() else DOCS / path.name).read_text("utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file that has one in each line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@cache
def committed() -> Results:
    """All results of the repository, read once, as many tables need them."""
    return gather([RESULTS])


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 1, words: int = 0) -> str:
    """A Markdown table: names in the first columns, words in the last ones, and numbers in those between."""
    numbers = len(heads) - names - words
    rule = f"|{names * '---|'}{numbers * '---:|'}{words * '---|'}"
    return "\n".join([_row(heads), rule, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, if there are several."""
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def typeset(number: str) -> str:
    """A formatted number with the sign that a printed page has for minus."""
    return number.replace("-", "−")
