"""Methods compared: each config over its seeds, its gains over er, and the paper's claims about er."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any

from holdfast.analysis.calibration import Calibration, pool_calibrations
from holdfast.analysis.claims import REFERENCE, Claim, Place, check_claims
from holdfast.analysis.comparisons import comparisons
from holdfast.analysis.overview import Scores, overview
from holdfast.analysis.recency import Recency, mean_recency
from holdfast.analysis.robustness import Robustness, mean_robustness
from holdfast.analysis.runs import RunAnalysis
from holdfast.analysis.transfer import Estimate, PercentEstimate, Transfer, bootstrap, transfer
from holdfast.config import RunConfig
from holdfast.errors import DataError, UsageError
from holdfast.methods import needs_buffer

__all__ = ["Findings", "Summary", "compare", "summarize"]


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
        """By label, er and what adds to it, without the bounds sgd and joint; empty unless there is one kind of er."""
        found = {one.label: one for one in self.summaries if needs_buffer(one.method)}
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
