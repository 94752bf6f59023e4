from __future__ import annotations

import pytest

from holdfast.analysis import Scores, gains, overview
from holdfast.errors import UsageError

ER = Scores(accuracy=10.0, recency_gap=0.95, ece=75.0)


def test_a_hand_computed_case() -> None:
    result = gains(Scores(accuracy=15.0, recency_gap=0.75, ece=50.0), ER)
    assert result.accuracy == pytest.approx(50)  # 10 -> 15
    assert result.recency == pytest.approx(400)  # .05 -> .25
    assert result.calibration == pytest.approx(100)  # 25 -> 50


def test_the_reference_gains_nothing_and_worse_is_negative() -> None:
    same = gains(ER, ER)
    assert (same.accuracy, same.recency, same.calibration) == (0, 0, 0)
    worse = gains(Scores(5.0, 0.96, 80.0), ER)
    assert max(worse.accuracy, worse.recency, worse.calibration) < 0


def test_overview_leaves_the_reference_out() -> None:
    result = overview({"er": ER, "linf": Scores(20.0, 0.5, 40.0), "mse": ER})
    assert list(result) == ["linf", "mse"]
    assert result["linf"] == gains(Scores(20.0, 0.5, 40.0), ER)


def test_a_missing_reference_is_told() -> None:
    with pytest.raises(UsageError, match="'err': did you mean 'er'"):
        overview({"er": ER}, reference="err")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (Scores(0.0, 0.5, 50.0), "accuracy is 0"),
        (Scores(10.0, 1.0, 50.0), "recency gap is 0"),
        (Scores(10.0, 0.5, 100.0), "ECE is 0"),
        (Scores(float("nan"), 0.5, 50.0), "finite"),
    ],
)
def test_an_undefined_gain_is_told(reference: Scores, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gains(ER, reference)
