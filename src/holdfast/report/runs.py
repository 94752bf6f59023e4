"""Every run and how it came about: settings, numbers, versions, device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any

from holdfast.config import RunConfig
from holdfast.report.numbers import Numbers, Value
from holdfast.report.tables import METRICS
from holdfast.results import RunResult

__all__ = ["BenchmarkRuns", "by_benchmark", "run_numbers"]

RECORDED = ("holdfast", "commit", "torch", "python", "device", "device_type", "threads")
NUMBERS = ("seed", *METRICS, "seconds")
"""Columns that are shown even where all runs are alike."""


@dataclass(frozen=True)
class BenchmarkRuns:
    """The runs on one benchmark: what they have in common, and a table of what sets them apart."""

    name: str
    common: Sequence[tuple[str, str]]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def by_benchmark(results: Iterable[RunResult]) -> list[BenchmarkRuns]:
    """Every run, by benchmark."""
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


def _benchmark_runs(name: str, numbers: Numbers) -> BenchmarkRuns:
    columns = dict(zip(numbers.columns, zip(*numbers.rows, strict=True), strict=True))
    alike = {column: values[0] for column, values in columns.items() if len(set(values)) == 1}
    common = [(c, _text(value)) for c, value in alike.items() if c not in NUMBERS and value not in (None, "")]
    shown = [column for column in columns if column in (*NUMBERS, "method", "fingerprint") or column not in alike]
    rows = list(zip(*([_text(value) for value in columns[column]] for column in shown), strict=True))
    return BenchmarkRuns(name, [pair for pair in common if pair[0] not in shown], shown, rows)


def _text(value: Value) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Value:
    return value if value is None or isinstance(value, str | int | float) else str(value)
