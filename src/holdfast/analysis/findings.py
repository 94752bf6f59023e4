"""Methods compared: each config over its seeds, its gains over er, and the paper's claims about er."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from holdfast.analysis.calibration import Calibration, pool_calibrations
from holdfast.analysis.claims import Check, Claim
from holdfast.analysis.comparisons import comparisons
from holdfast.analysis.overview import Scores, gains
from holdfast.analysis.recency import Recency, mean_recency
from holdfast.analysis.robustness import Robustness, mean_robustness
from holdfast.analysis.runs import RunAnalysis
from holdfast.analysis.transfer import Bootstrap, Estimate, Transfer, transfer
from holdfast.config import RunConfig
from holdfast.errors import DataError, UsageError
from holdfast.methods import needs_buffer

__all__ = ["Findings", "Summary", "compare", "summarize"]

REFERENCE = "er"
"""The method all others are measured against."""


@dataclass(frozen=True)
class Summary:
    """One config over its seeds. Estimates are means with bootstrap intervals; None where no seed has the number.

    `calibration` pools the bins of all seeds, and its errors are theirs; `ece` and `mce` are means of each seed's own.
    `recency` and `robustness` hold means over the seeds.
    """

    label: str
    config: RunConfig
    seeds: tuple[int, ...]
    accuracy: Estimate
    ece: Estimate | None
    mce: Estimate | None
    recency_gap: Estimate | None
    mra: Estimate | None
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
        shown = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "config"}
        plain = {
            name: value if value is None or name in ("label", "seeds") else asdict(value)
            for name, value in shown.items()
        }
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
        base = _scores(self._reference)
        if base is None or base.accuracy <= 0 or base.ece >= 100 or base.recency_gap >= 1:
            return {}
        found: dict[str, dict[str, float | None]] = {}
        for rival in self._rivals:
            if (scores := _scores(rival)) is not None:
                found[rival.label] = {**asdict(gains(scores, base))}
                if rival.recency_gap is None:
                    found[rival.label]["recency"] = None
        return found

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """The paper's claims about er, checked against each other method on the means over seeds."""
        questions: list[tuple[str, str, str, Callable[[Summary], Estimate | None], int]] = [
            ("er-is-miscalibrated", "er is the most miscalibrated", "ECE", lambda one: one.ece, 1),
            (
                "er-favours-the-last-task",
                "er is the most biased towards the last task",
                "recency gap",
                lambda one: one.recency_gap,
                1,
            ),
            ("er-is-fragile", "er is the least robust", "mRA", lambda one: one.mra, -1),
        ]
        found = []
        for name, statement, quantity, number, sign in questions:
            own = None if self._reference is None else number(self._reference)
            means = {rival.label: value.mean for rival in self._rivals if (value := number(rival)) is not None}
            if own is None or not means:
                continue
            # The method that speaks most against the claim comes first.
            checks = tuple(
                Check(label, f"{quantity}: er {own.mean:.2f}, {label} {mean:.2f}", sign * mean < sign * own.mean)
                for label, mean in sorted(means.items(), key=lambda item: -sign * item[1])
            )
            found.append(Claim(name, statement, checks))
        return tuple(found)

    @property
    def _reference(self) -> Summary | None:
        """The one summary of er; None if there is none, or if several settings of it leave the choice open."""
        found = [summary for summary in self.summaries if summary.method == REFERENCE]
        return found[0] if len(found) == 1 else None

    @property
    def _rivals(self) -> list[Summary]:
        """The methods the claims are about: er with something added, not the bounds sgd and joint."""
        return [summary for summary in self.summaries if summary.method != REFERENCE and needs_buffer(summary.method)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "title": self.title,
            "benchmark": self.summaries[0].config.benchmark,
            "methods": [summary.to_json() for summary in self.summaries],
            "relative_gains_over_er": self.gains,
            "claims": [
                {"text": claim.statement, "holds": claim.holds, "outcome": claim.outcome, "detail": claim.detail}
                for claim in self.claims
            ],
        }


def _scores(summary: Summary | None) -> Scores | None:
    if summary is None or summary.ece is None:
        return None
    # Without a gap of its own, a method is compared in the other two; its gain in recency is then dropped.
    gap = 0.0 if summary.recency_gap is None else summary.recency_gap.mean
    return Scores(summary.accuracy.mean, gap, summary.ece.mean)


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
        ece=_estimate([one.ece for one in calibrations]),
        mce=_estimate([one.mce for one in calibrations]),
        recency_gap=_estimate([one.gap for one in recencies]),
        mra=_estimate([one.mra for one in robust if one.mra is not None]),
        transfer=transferred,
        calibration=pool_calibrations(calibrations) if calibrations else None,
        recency=mean_recency(recencies) if recencies else None,
        robustness=mean_robustness(robust) if robust else None,
    )


def _estimate(values: Sequence[float]) -> Estimate | None:
    return Bootstrap(len(values))(values) if values else None


def _transfer(runs: Sequence[RunAnalysis]) -> Transfer:
    """Transfer over the tasks; a method that trains on all tasks at once has an accuracy only."""
    matrices = [run.result.matrix for run in runs]
    if any(len(matrix) != matrix.shape[1] for matrix in matrices):
        return transfer([[[run.result.accuracy]] for run in runs])
    return transfer([matrix.tolist() for matrix in matrices], [run.result.untrained.tolist() for run in runs])
