"""Tables of numbers for files, as CSV and JSON; one of them has every run and how it came about."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any
from urllib.parse import quote

from holdfast.config import RunConfig
from holdfast.results import FROM_MATRICES, RunResult

__all__ = ["Numbers", "Value", "by_benchmark", "run_numbers"]

Value = str | int | float | None

RECORDED = ("holdfast", "commit", "torch", "python", "device", "device_type", "threads")
OWN = ("settings", "options")
"""Of a method and its regularizer, as pairs of name and value."""
NUMBERS = ("seed", *FROM_MATRICES, "seconds")
"""Columns that are shown even where all runs are alike."""


@dataclass(frozen=True)
class Numbers:
    """A table of plain values. A missing value is None or NaN; both become an empty cell."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Value, ...]]

    def csv(self) -> str:
        """RFC 4180 with a heading; text that a spreadsheet would run as a formula gets an apostrophe."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_cell(value) for value in row] for row in self.rows)
        return text.getvalue()

    def plain(self) -> list[dict[str, Value]]:
        """An object per row, None where a value is missing."""
        rows = ([None if value != value else value for value in row] for row in self.rows)
        return [dict(zip(self.columns, row, strict=True)) for row in rows]

    def json(self) -> str:
        """A list of objects, one per row."""
        return json.dumps(self.plain(), indent=1) + "\n"

    def data_uri(self) -> str:
        """The CSV as an address that a page can offer for download without a server."""
        return "data:text/csv;charset=utf-8," + quote(self.csv(), safe=",;:+-./()")


def _text(value: Value) -> str:
    """The value with at most six digits; empty where it is missing."""
    if value is None or value != value:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _cell(value: Value) -> str:
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else _text(value)


def by_benchmark(results: Iterable[RunResult]) -> list[dict[str, Any]]:
    """Of each benchmark: its `name`, what its runs have in `common`, `columns` and `rows` of what sets them apart."""
    found: dict[str, list[RunResult]] = {}
    for result in results:
        found.setdefault(result.config.benchmark, []).append(result)
    return [_benchmark_runs(name, run_numbers(found[name])) for name in sorted(found)]


def run_numbers(results: Iterable[RunResult]) -> Numbers:
    """A row per run: its settings, its numbers, where it ran. Forward transfer only where tasks share their classes."""
    shared = [field.name for field in fields(RunConfig) if field.name not in OWN]
    rows = []
    for result in results:
        given: dict[str, float] = {name: float(getattr(result, name)) for name in FROM_MATRICES}
        given["forward_transfer"] = given["forward_transfer"] if result.shares_classes else nan
        chosen = (_plain(getattr(result.config, name)) for name in shared)
        own = (_assignments(getattr(result.config, kind)) for kind in OWN)
        where = (_plain(result.environment.get(name)) for name in RECORDED)
        rows.append((*chosen, *own, *given.values(), result.seconds, *where, result.config.fingerprint))
    return Numbers((*shared, *OWN, *FROM_MATRICES, "seconds", *RECORDED, "fingerprint"), rows)


def _assignments(pairs: Iterable[tuple[str, Value]]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in pairs)


def _benchmark_runs(name: str, numbers: Numbers) -> dict[str, Any]:
    columns = dict(zip(numbers.columns, zip(*numbers.rows, strict=True), strict=True))
    alike = {column: values[0] for column, values in columns.items() if len(set(values)) == 1}
    common = [(c, _text(value)) for c, value in alike.items() if c not in NUMBERS and value not in (None, "")]
    shown = [column for column in columns if column in (*NUMBERS, "method", "fingerprint") or column not in alike]
    rows = list(zip(*([_text(value) for value in columns[column]] for column in shown), strict=True))
    common = [pair for pair in common if pair[0] not in shown]
    return {"name": name, "common": common, "columns": shown, "rows": rows}


def _plain(value: Any) -> Value:
    return value if value is None or isinstance(value, str | int | float) else str(value)
