"""Every run and how it came about: settings, numbers, versions, device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import isnan, nan
from typing import Any

from holdfast.analysis.comparisons import Variant, variants
from holdfast.config import RunConfig
from holdfast.metrics import mean_std
from holdfast.report.numbers import Numbers, Value
from holdfast.report.tables import METRICS
from holdfast.report.text import count, plus_minus
from holdfast.results import RunResult

__all__ = ["COLUMNS", "VariantRuns", "by_benchmark", "run_numbers"]

RECORDED = ("holdfast", "commit", "torch", "python", "device", "device_type", "threads")
NUMBERS = ("seed", "accuracy", "Task-IL", "forward", "backward", "forgetting", "seconds")
COLUMNS = (*NUMBERS, "device", "versions", "fingerprint")
"""Titles of the columns of `VariantRuns.seeds`."""


@dataclass(frozen=True)
class VariantRuns:
    """One config over its seeds, as text."""

    title: str
    summary: str
    settings: list[tuple[str, str]]
    seeds: list[tuple[str, ...]]


def by_benchmark(results: Iterable[RunResult]) -> dict[str, list[VariantRuns]]:
    """Every config with its seeds, by benchmark."""
    found: dict[str, list[RunResult]] = {}
    for result in results:
        found.setdefault(result.config.benchmark, []).append(result)
    return {name: [_variant_runs(variant) for variant in variants(found[name])] for name in sorted(found)}


def run_numbers(results: Iterable[RunResult]) -> Numbers:
    """A row per run: its settings, its numbers, where it ran."""
    settings = [field.name for field in fields(RunConfig) if field.name != "options"]
    rows = [
        (
            *(_plain(getattr(result.config, name)) for name in settings),
            " ".join(f"{name}={value:g}" for name, value in result.config.options),
            *_numbers(result),
            result.seconds,
            *(_plain(result.environment.get(name)) for name in RECORDED),
            result.config.fingerprint,
        )
        for result in results
    ]
    return Numbers((*settings, "options", *METRICS, "seconds", *RECORDED, "fingerprint"), rows)


def _variant_runs(variant: Variant) -> VariantRuns:
    values = variant.values("accuracy")
    accuracy = f"{plus_minus(*mean_std(values), len(values))} %, " if values else ""
    seconds = sum(result.seconds for result in variant.results)
    settings = variant.config.to_dict().items()
    return VariantRuns(
        title=variant.label,
        summary=f"{accuracy}{count(len(variant.results), 'seed')}, {seconds:,.0f} s",
        settings=[(name.replace("_", " "), _shown(value)) for name, value in settings if name != "seed"],
        seeds=[_seed_row(result) for result in variant.results],
    )


def _seed_row(result: RunResult) -> tuple[str, ...]:
    known = {name: result.environment.get(name, "?") for name in RECORDED}
    commit = f" ({str(known['commit'])[:7]})" if result.environment.get("commit") else ""
    return (
        str(result.config.seed),
        *("" if isnan(number) else f"{number:.2f}" for number in _numbers(result)),
        f"{result.seconds:.1f}",
        f"{known['device']} ({known['device_type']}, threads {known['threads']})",
        f"holdfast {known['holdfast']}{commit}, torch {known['torch']}, Python {known['python']}",
        result.config.fingerprint,
    )


def _numbers(result: RunResult) -> list[float]:
    """The measures of a run; NaN for forward transfer where tasks have classes of their own."""
    given = [float(getattr(result, name)) for name in METRICS]
    return [
        nan if name == "forward_transfer" and not result.shares_classes else value
        for name, value in zip(METRICS, given, strict=True)
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:g}" for name, number in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Value:
    return value if value is None or isinstance(value, str | int | float) else str(value)
