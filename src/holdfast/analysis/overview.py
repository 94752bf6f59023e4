"""The paper's overview: what a method gains over experience replay in accuracy, recency and calibration."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from holdfast.errors import UsageError
from holdfast.registry import unknown_name

__all__ = ["Gains", "Scores", "gains", "overview", "relative_gain"]


@dataclass(frozen=True)
class Scores:
    """What the overview compares: `accuracy` and `ece` in percent, `recency_gap` (last minus first) in [-1, 1].

    The gap is None where tasks share their classes.
    """

    accuracy: float
    recency_gap: float | None
    ece: float


@dataclass(frozen=True)
class Gains:
    """Relative gains in percent of the reference's own quality; above 0 is better than the reference.

    The gain in recency is None where one of the two has no recency gap.
    """

    accuracy: float
    recency: float | None
    calibration: float


def gains(method: Scores, reference: Scores) -> Gains:
    """The relative gains of `method` over `reference`: (method - reference) / reference of three scores, in percent.

    Accuracy is compared as it is. Recency bias and calibration error are turned around first, so that more is better:
    evenness is 1 minus the recency gap (average probability of the last task minus that of the first), reliability
    100 minus the ECE.

    >>> gains(Scores(60.0, 0.1, 20.0), Scores(50.0, 0.5, 60.0))
    Gains(accuracy=20.0, recency=80.0, calibration=100.0)
    """
    gaps = method.recency_gap, reference.recency_gap
    return Gains(
        accuracy=relative_gain("accuracy", method.accuracy, reference.accuracy),
        recency=None if None in gaps else relative_gain("1 - recency gap", *(1 - (gap or 0.0) for gap in gaps)),
        calibration=relative_gain("100 - ECE", 100 - method.ece, 100 - reference.ece),
    )


def overview(scores: Mapping[str, Scores], reference: str = "er") -> dict[str, Gains]:
    """The gains of every method in `scores` over the method named `reference`, which itself is left out."""
    if reference not in scores:
        raise unknown_name("reference method", reference, list(scores))
    return {name: gains(score, scores[reference]) for name, score in scores.items() if name != reference}


def relative_gain(quantity: str, method: float, reference: float) -> float:
    """How much larger a quantity is than that of the reference, which must be above 0, in percent of the reference."""
    if not (isfinite(method) and isfinite(reference)):
        raise UsageError(f"{quantity} must be a finite number to be compared, got {method} against {reference}.")
    if reference <= 0:
        raise UsageError(f"the reference's {quantity} is {reference:g}; a relative gain needs it above 0.")
    return 100 * (method - reference) / reference
