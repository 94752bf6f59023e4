"""Findings <-> analysis.json, which a report can show where logits and weights are no longer there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.analysis.corruptions import CORRUPTIONS, SEVERITIES
from holdfast.analysis.findings import Findings, Summary
from holdfast.errors import DataError, HoldfastError
from holdfast.files import telling
from holdfast.schema import read_json, validated, write_json

__all__ = ["ANALYSIS", "read_findings", "write_findings"]

ANALYSIS = "analysis.json"
"""The name of the file with the numbers of an analysis."""


def write_findings(path: Path, findings: Iterable[Findings], **about: Any) -> dict[str, Any]:
    """Write an analysis with what is told `about` it to `path`, whole or not at all; returns what was written."""
    values = {**about, "comparisons": [found.to_json() for found in findings]}
    with telling(HoldfastError, f"{path} could not be written"):
        write_json(path, values)
    return values


def read_findings(path: Path) -> list[Findings]:
    """The comparisons in the file `path`; a DataError if it is damaged or something else."""
    try:
        with telling(DataError, f"{path} cannot be read"):
            values = validated(dict[str, Any], read_json(path), "analysis")
        comparisons = validated(list[dict[str, Any]], values.get("comparisons"), "comparisons")
        return [_findings(comparison, f"comparisons[{number}]") for number, comparison in enumerate(comparisons)]
    except ValueError as error:
        raise DataError(f"{path} is not an analysis that this version reads: {error}. Make it again.") from error


def _findings(values: dict[str, Any], where: str) -> Findings:
    """The schema is that of the classes; a config stands for all seeds. Gains and claims are computed again."""
    methods = validated(list[dict[str, Any]], values.get("methods"), f"{where}.methods")
    for method in methods:
        method["config"] = {**validated(dict[str, Any], method.get("config"), f"{where}.config"), "seed": 0}
    found: Findings = validated(Findings, {**values, "summaries": methods}, where)
    labels = [summary.label for summary in found.summaries]
    _require(0 < len(labels) == len(set(labels)), f"{where} has no methods, or two of one name")
    for summary in found.summaries:
        _check_summary(summary, f"{where}, {summary.label}")
    recencies = [len(summary.recency.task_probabilities) for summary in found.summaries if summary.recency]
    _require(len(set(recencies)) <= 1, f"the methods of {where} have different numbers of tasks")
    robust = [summary.robustness for summary in found.summaries if summary.robustness]
    alike = {(one.source, one.severities, tuple(one.accuracy), one.mra is None) for one in robust}
    _require(len(alike) <= 1, f"the methods of {where} were tested on different corruptions")
    return found


def _check_summary(one: Summary, where: str) -> None:
    """Raise a ValueError where numbers do not belong together: figures are drawn from them."""
    curves = one.transfer.curves
    _require(len(one.seeds) > 0, f"{where} has no seeds")
    _require({len(curve) for curve in curves} == {len(curves)}, f"{where}: its curves are no table")
    if (bins := one.calibration) is not None:
        _require({len(bins.confidence), len(bins.accuracy), len(bins.count)} == {bins.bins}, f"{where}: not all bins")
        _require(sum(bins.count) > 0, f"{where}: its bins are empty")
    if (bias := one.recency) is not None:
        _require(1 < len(bias.task_probabilities) == len(bias.prediction_shares), f"{where}: recency of no tasks")
    if (robust := one.robustness) is not None:
        _require(0 < len(robust.severities) == len(set(robust.severities) & set(SEVERITIES)), f"{where}: severities")
        names = set(robust.accuracy)
        _require(set() < names <= set(CORRUPTIONS) and names == set(robust.per_corruption), f"{where}: corruptions")
        _require(set(robust.per_category) == {CORRUPTIONS[name].category for name in names}, f"{where}: categories")
        lengths = {len(values) for values in robust.accuracy.values()}
        _require(lengths == {len(robust.severities)}, f"{where}: not every severity")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
