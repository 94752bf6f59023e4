"""Every run and how it came about: settings, numbers, versions, device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from math import nan
from typing import Any

from holdfast.config import RunConfig
from holdfast.report.numbers import Numbers, Value, plain_text
from holdfast.report.tables import METRICS
from holdfast.results import RunResult

__all__ = ["by_benchmark", "run_numbers"]

RECORDED = ("holdfast", "commit", "torch", "python", "device", "device_type", "threads")
NUMBERS = ("seed", *METRICS, "seconds")
"""Columns that are shown even where all runs are alike."""


def by_benchmark(results: Iterable[RunResult]) -> list[dict[str, Any]]:
    """Of each benchmark: its `name`, what its runs have in `common`, `columns` and `rows` of what sets them apart."""
    found: dict[str, list[RunResult]] = {}
    for result in results:
        found.setdefault(result.config.benchmark, []).append(result)
    return [_benchmark_runs(name, run_numbers(found[name])) for name in sorted(found)]


def run_numbers(results: Iterable[RunResult]) -> Numbers:
    """A row per run: its settings, its numbers, where it ran. Forward transfer only where tasks share their classes."""
    settings = [field.name for field in fields(RunConfig) if field.name != "options"]
    rows = []
    for result in results:
        given: dict[str, float] = {name: float(getattr(result, name)) for name in METRICS}
        given["forward_transfer"] = given["forward_transfer"] if result.shares_classes else nan
        options = " ".join(f"{name}={value:g}" for name, value in result.config.options)
        chosen = (_plain(getattr(result.config, name)) for name in settings)
        where = (_plain(result.environment.get(name)) for name in RECORDED)
        rows.append((*chosen, options, *given.values(), result.seconds, *where, result.config.fingerprint))
    return Numbers((*settings, "options", *METRICS, "seconds", *RECORDED, "fingerprint"), rows)


def _benchmark_runs(name: str, numbers: Numbers) -> dict[str, Any]:
    columns = dict(zip(numbers.columns, zip(*numbers.rows, strict=True), strict=True))
    alike = {column: values[0] for column, values in columns.items() if len(set(values)) == 1}
    common = [(c, plain_text(value)) for c, value in alike.items() if c not in NUMBERS and value not in (None, "")]
    shown = [column for column in columns if column in (*NUMBERS, "method", "fingerprint") or column not in alike]
    rows = list(zip(*([plain_text(value) for value in columns[column]] for column in shown), strict=True))
    common = [pair for pair in common if pair[0] not in shown]
    return {"name": name, "common": common, "columns": shown, "rows": rows}


def _plain(value: Any) -> Value:
    return value if value is None or isinstance(value, str | int | float) else str(value)
