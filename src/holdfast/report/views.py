"""What the page shows, as plain values: tables of cells, claims, runs. No markup here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import isnan
from typing import Any

from holdfast.config import RunConfig
from holdfast.experiments import JUDGED, Check, Claim, Table, Verdict
from holdfast.report.groups import Comparison, Variant, mean_std, variants
from holdfast.report.numbers import Numbers, Value
from holdfast.report.tables import (
    MARKS,
    column_title,
    filled_columns,
    filled_groups,
    ours_text,
    published_text,
)
from holdfast.results import RunResult

__all__ = [
    "Block",
    "CellView",
    "ClaimView",
    "Place",
    "Row",
    "VariantView",
    "claim_view",
    "comparison_block",
    "places",
    "run_numbers",
    "table_blocks",
]

NOTES = {
    "agrees": "agrees with the paper",
    "differs": "differs from the paper",
    "open": "neither agrees nor differs",
    "unpublished": "not in the paper",
}
METRICS = ("accuracy", "task_il_accuracy", "forward_transfer", "backward_transfer", "forgetting")


@dataclass(frozen=True)
class CellView:
    """One cell: ours, the published number, and how they compare."""

    value: str = ""
    """What to sort by; empty without a number."""
    ours: str = ""
    published: str = ""
    status: str = ""
    mark: str = ""
    note: str = ""
    """The mark in words."""


@dataclass(frozen=True)
class Row:
    """A named row of cells."""

    name: str
    cells: list[CellView]


@dataclass(frozen=True)
class Block:
    """A table with methods down and columns across."""

    title: str
    label: str
    columns: list[str]
    rows: list[Row]
    corner: str = "method"
    footer_name: str = ""
    footer: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClaimView:
    """A claim with its outcome, and the numbers behind it."""

    statement: str
    outcome: str
    state: str
    mark: str
    held: int
    total: int
    published: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class VariantView:
    """One config over its seeds: how the runs came about."""

    title: str
    summary: str
    settings: list[tuple[str, str]]
    columns: tuple[str, ...]
    seeds: list[tuple[str, ...]]


@dataclass(frozen=True)
class Place:
    """All variants on a benchmark."""

    title: str
    count: int
    variants: list[VariantView]


def table_blocks(table: Table) -> list[Block]:
    """The blocks of an experiment that have results, and what it derives from its means."""
    blocks = [_table_block(table, group) for group in filled_groups(table)]
    if table.derived:
        columns = list(table.derived)
        names = list(dict.fromkeys(row for column in table.derived.values() for row in column))
        rows = [Row(name, [_derived_cell(table.derived[column].get(name)) for column in columns]) for name in names]
        blocks.append(Block("computed from the means", f"{table.experiment.title}, computed", columns, rows))
    return blocks


def comparison_block(comparison: Comparison) -> Block:
    """The metrics of runs that belong to no experiment."""
    metrics = [name for name in METRICS if any(variant.values(name) for variant in comparison.variants)]
    rows = [
        Row(variant.label, [_metric_cell(variant.values(name)) for name in metrics]) for variant in comparison.variants
    ]
    labels = {"accuracy": "accuracy (%)", "task_il_accuracy": "Task-IL accuracy (%)"}
    columns = [labels.get(name, f"{name.replace('_', ' ')} (points)") for name in metrics]
    return Block(comparison.title, comparison.title, columns, rows)


def claim_view(claim: Claim) -> ClaimView:
    """A claim as it is shown."""
    state = "supported" if claim.holds else "partly" if claim.held else "refuted" if claim.checks else "not-enough-data"
    mark = {"supported": "✓", "partly": "≈", "refuted": "✗"}.get(state, "?")
    published = claim.published_outcome
    return ClaimView(
        claim.statement, claim.outcome, state, mark, claim.held, len(claim.checks), published, claim.checks
    )


def places(results: Iterable[RunResult]) -> list[Place]:
    """Every run, by benchmark and config."""
    by_benchmark: dict[str, list[RunResult]] = {}
    for result in results:
        by_benchmark.setdefault(result.config.benchmark, []).append(result)
    return [
        Place(benchmark, len(found), [_variant_view(variant) for variant in variants(found)])
        for benchmark, found in sorted(by_benchmark.items())
    ]


def run_numbers(results: Iterable[RunResult]) -> Numbers:
    """Every run in a row: its settings, its numbers, where it ran."""
    settings = [field.name for field in fields(RunConfig) if field.name != "options"]
    recorded = ("holdfast", "commit", "torch", "python", "device", "device_type", "threads")
    columns = (*settings, "options", *METRICS, "seconds", *recorded, "fingerprint")
    rows = [
        (
            *(_plain(getattr(result.config, name)) for name in settings),
            " ".join(f"{name}={value:g}" for name, value in result.config.options),
            *(float(getattr(result, name)) for name in METRICS),
            result.seconds,
            *(_plain(result.environment.get(name)) for name in recorded),
            result.config.fingerprint,
        )
        for result in results
    ]
    return Numbers(columns, rows)


def _table_block(table: Table, group: str) -> Block:
    columns = filled_columns(table, group)
    rows = [
        Row(name, [_verdict_cell(table.at(group, name, column)) for column in columns]) for name in table.rows(group)
    ]
    ranks = {rank.column: rank for rank in table.ranks if rank.group == group and rank.n > 2 and not isnan(rank.tau)}
    footer = tuple(f"{ranks[column].tau:.2f} ({ranks[column].n})" if column in ranks else "" for column in columns)
    are_methods = all(v.cell.row == v.cell.config.method for v in table.verdicts if v.cell.group == group)
    return Block(
        title=group,
        label=f"{table.experiment.title}, {group}",
        columns=[column_title(column) for column in columns],
        rows=rows,
        corner="method" if are_methods else "setting",
        footer_name="τ (rows)",
        footer=footer if any(footer) else (),
    )


def _verdict_cell(verdict: Verdict | None) -> CellView:
    if verdict is None:
        return CellView()
    decimals = verdict.measure.decimals
    text = NOTES.get(verdict.status, "")
    if verdict.status in JUDGED:
        text += f": {verdict.reason}"
    return CellView(
        value="" if isnan(verdict.mean) else f"{verdict.mean:.6f}",
        ours=ours_text(verdict),
        published=published_text(verdict.published, decimals),
        status=verdict.status,
        mark=MARKS[verdict.status],
        note=text,
    )


def _derived_cell(value: float | None) -> CellView:
    return CellView() if value is None or isnan(value) else CellView(f"{value:.6f}", f"{value:+.2f}")


def _metric_cell(values: Sequence[float]) -> CellView:
    mean, _ = mean_std(values)
    return CellView() if isnan(mean) else CellView(f"{mean:.6f}", _over_seeds(values))


def _over_seeds(values: Sequence[float]) -> str:
    mean, std = mean_std(values)
    return f"{mean:.2f}" + ("" if isnan(std) else f" ± {std:.2f}") + f" ({len(values)})"


def _variant_view(variant: Variant) -> VariantView:
    settings = [
        (name.replace("_", " "), _shown(value)) for name, value in variant.config.to_dict().items() if name != "seed"
    ]
    columns = ("seed", "accuracy", "Task-IL", "forward", "backward", "forgetting", "seconds", "device", "versions")
    seeds = [_seed_row(result) for result in variant.results]
    values = variant.values("accuracy")
    count = len(variant.results)
    summary = f"{_over_seeds(values)} %, " if values else ""
    summary += f"{count} seed{'s' if count > 1 else ''}, {sum(result.seconds for result in variant.results):,.0f} s"
    return VariantView(variant.label, summary, settings, (*columns, "fingerprint"), seeds)


def _seed_row(result: RunResult) -> tuple[str, ...]:
    known = result.environment
    commit = f" ({str(known['commit'])[:7]})" if known.get("commit") else ""
    versions = f"holdfast {known.get('holdfast', '?')}{commit}, torch {known.get('torch', '?')}"
    versions += f", Python {known.get('python', '?')}"
    device = f"{known.get('device', '?')} ({known.get('device_type', '?')}, threads {known.get('threads', '?')})"
    numbers = (float(getattr(result, name)) for name in METRICS)
    return (
        str(result.config.seed),
        *("" if isnan(number) else f"{number:.2f}" for number in numbers),
        f"{result.seconds:.1f}",
        device,
        versions,
        result.config.fingerprint,
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:g}" for name, number in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Value:
    return value if value is None or isinstance(value, str | int | float) else str(value)
