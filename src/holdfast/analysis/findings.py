"""Methods compared: each config over its seeds, its gains over er, and the paper's claims about er.

Findings can be written to analysis.json, which a report shows where logits and weights are no longer there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from holdfast.analysis.calibration import Calibration, pool_calibrations
from holdfast.analysis.claims import REFERENCE, Claim, Place, check_claims
from holdfast.analysis.comparisons import comparisons
from holdfast.analysis.corruptions import CORRUPTIONS, SEVERITIES
from holdfast.analysis.overview import Scores, overview
from holdfast.analysis.recency import Recency, mean_recency
from holdfast.analysis.robustness import Robustness, mean_robustness
from holdfast.analysis.runs import RunAnalysis
from holdfast.analysis.transfer import Estimate, PercentEstimate, Transfer, bootstrap, transfer
from holdfast.config import RunConfig
from holdfast.errors import DataError, HoldfastError, UsageError
from holdfast.files import telling
from holdfast.schema import read_json, validated, write_json

__all__ = ["ANALYSIS", "Findings", "Summary", "compare", "read_findings", "summarize", "write_findings"]

ANALYSIS = "analysis.json"
"""The name of the file with the numbers of an analysis."""


@dataclass(frozen=True)
class Summary:
    """One config over its seeds. Estimates are means with bootstrap intervals; None where no seed has the number.

    `calibration` pools the bins of all seeds, and its errors are theirs; `ece` and `mce` are means of each seed's own.
    `recency` and `robustness` hold means over the seeds.
    """

    label: str
    config: RunConfig
    seeds: tuple[int, ...]
    accuracy: PercentEstimate
    ece: PercentEstimate | None
    mce: PercentEstimate | None
    recency_gap: Annotated[Estimate, lambda estimate: estimate.lies(-1, 1)] | None
    mra: PercentEstimate | None
    transfer: Transfer
    calibration: Calibration | None
    recency: Recency | None
    robustness: Robustness | None

    @property
    def method(self) -> str:
        """The method's name."""
        return self.config.method

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = asdict(self)
        del plain["config"]
        return {**plain, "method": self.method, "config": {**self.config.to_dict(), "seed": None}}


@dataclass(frozen=True)
class Findings:
    """Methods compared on one benchmark."""

    title: str
    summaries: tuple[Summary, ...]

    @cached_property
    def gains(self) -> dict[str, dict[str, float | None]]:
        """Relative gains over er in percent, by label, for the methods that can be compared with it.

        A gain in recency is None where tasks share their classes.
        """
        scores = {
            label: Scores(one.accuracy.mean, one.recency_gap.mean if one.recency_gap else None, one.ece.mean)
            for label, one in self._rivals.items()
            if one.ece is not None
        }
        try:
            return {label: asdict(gain) for label, gain in overview(scores, REFERENCE).items()}
        except UsageError:
            return {}  # there is no er, or it has nothing that could be gained upon

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """The paper's claims about er, checked against each other method on the means over seeds."""
        place = Place.of(self.summaries[0].config)
        means: dict[str, dict[str, float]] = {}
        for label, summary in self._rivals.items():
            for metric in ("ece", "recency_gap", "mra"):
                if (value := getattr(summary, metric)) is not None:
                    means.setdefault(metric, {})[label] = value.mean
        found = check_claims({metric: {place: by_label} for metric, by_label in means.items()})
        return tuple(claim for claim in found if claim.checks)

    @property
    def _rivals(self) -> dict[str, Summary]:
        """The methods with a buffer by label; empty unless exactly one of them is er, with which all are compared."""
        found = {one.label: one for one in self.summaries if one.config.buffer_size is not None}
        return found if [one.method for one in found.values()].count(REFERENCE) == 1 and REFERENCE in found else {}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "title": self.title,
            "benchmark": self.summaries[0].config.benchmark,
            "methods": [summary.to_json() for summary in self.summaries],
            "relative_gains_over_er": self.gains,
            "claims": [claim.to_json() for claim in self.claims],
        }


def compare(runs: Iterable[RunAnalysis]) -> list[Findings]:
    """The runs in comparisons: one for each benchmark, setting and buffer size; a summary for each config in it."""
    by_config = {run.config: run for run in runs}
    return [
        Findings(
            comparison.title,
            tuple(
                summarize(variant.label, [by_config[result.config] for result in variant.results])
                for variant in comparison.variants
            ),
        )
        for comparison in comparisons(run.result for run in by_config.values())
    ]


def summarize(label: str, runs: Sequence[RunAnalysis]) -> Summary:
    """One config over its seeds: runs that differ in nothing but the seed."""
    config = runs[0].config
    if any(run.config.change(seed=0) != config.change(seed=0) for run in runs):
        raise UsageError(f"'{label}': runs summed up together must differ in nothing but their seed.")
    calibrations = [run.calibration for run in runs if run.calibration]
    recencies = [run.recency for run in runs if run.recency]
    robust = [run.robustness for run in runs if run.robustness]
    transferred = _transfer(runs)
    if transferred.accuracy is None:
        raise DataError(f"{runs[0].folder}: the accuracies after the last task are incomplete.")
    return Summary(
        label=label,
        config=config,
        seeds=tuple(run.config.seed for run in runs),
        accuracy=transferred.accuracy,
        ece=bootstrap([one.ece for one in calibrations]),
        mce=bootstrap([one.mce for one in calibrations]),
        recency_gap=bootstrap([one.gap for one in recencies]),
        mra=bootstrap([one.mra for one in robust if one.mra is not None]),
        transfer=transferred,
        calibration=pool_calibrations(calibrations) if calibrations else None,
        recency=mean_recency(recencies) if recencies else None,
        robustness=mean_robustness(robust) if robust else None,
    )


def _transfer(runs: Sequence[RunAnalysis]) -> Transfer:
    """Transfer over the tasks; a method that trains on all tasks at once has an accuracy only.

    Forward transfer only where tasks share their classes: of classes it has never seen, a network knows nothing.
    """
    matrices = [run.result.matrix for run in runs]
    if any(len(matrix) != matrix.shape[1] for matrix in matrices):
        return transfer([[[run.result.accuracy]] for run in runs])
    shared = all(run.result.shares_classes for run in runs)
    baselines = [run.result.untrained.tolist() for run in runs] if shared else None
    return transfer([matrix.tolist() for matrix in matrices], baselines)


# --- analysis.json ---


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
