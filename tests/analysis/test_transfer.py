from __future__ import annotations

import numpy as np
import pytest

from holdfast.analysis import transfer
from holdfast.errors import UsageError

FULL = [[80.0, 20.0, 10.0], [60.0, 90.0, 30.0], [50.0, 70.0, 95.0]]
BASELINE = [10.0, 12.0, 14.0]


def test_one_seed_by_hand() -> None:
    result = transfer([FULL], [BASELINE])
    assert result.accuracy is not None
    assert result.accuracy.mean == pytest.approx((50 + 70 + 95) / 3)
    assert result.accuracy.low is None
    assert result.forward_transfer is not None
    assert result.forward_transfer.mean == pytest.approx(((20 - 12) + (30 - 14)) / 2)
    assert result.backward_transfer is not None
    assert result.backward_transfer.mean == pytest.approx(((50 - 80) + (70 - 90)) / 2)
    assert result.forgetting is not None
    assert result.forgetting.mean == pytest.approx((30 + 20) / 2)


def test_curves_follow_a_task_through_training() -> None:
    result = transfer([FULL, FULL])
    first = [point.mean for point in result.curves[0] if point is not None]
    assert first == [80, 60, 50]
    assert result.forward_transfer is None


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_cells_that_were_not_evaluated(missing: float | None) -> None:
    lower = [[80.0, missing, missing], [60.0, 90.0, missing], [50.0, 70.0, 95.0]]
    result = transfer([FULL, lower], [BASELINE, BASELINE])
    assert result.curves[1][0] is None
    assert result.curves[1][1] is not None
    assert result.forward_transfer is None
    assert result.backward_transfer is not None
    assert result.backward_transfer.mean == pytest.approx(-25)
    assert result.forgetting is not None


def test_a_single_task() -> None:
    result = transfer([[[70.0]], [[80.0]]], [[10.0], [10.0]])
    assert result.accuracy is not None
    assert result.accuracy.mean == 75
    assert result.forward_transfer is result.backward_transfer is result.forgetting is None


def test_the_interval_is_that_of_a_plain_bootstrap() -> None:
    values = [61.0, 64.0, 58.0, 70.0, 66.0, 63.0]
    rng = np.random.default_rng(123)
    means = [rng.choice(values, len(values)).mean() for _ in range(20_000)]
    estimate = transfer([[[value]] for value in values], level=0.9).accuracy
    assert estimate is not None
    assert estimate.mean == pytest.approx(np.mean(values))
    assert estimate.low == pytest.approx(np.quantile(means, 0.05), abs=0.2)
    assert estimate.high == pytest.approx(np.quantile(means, 0.95), abs=0.2)


def test_seeded_and_wider_at_a_higher_level() -> None:
    matrices = [[[value]] for value in (61.0, 64.0, 58.0, 70.0)]
    assert transfer(matrices, seed=1) == transfer(matrices, seed=1)
    narrow, wide = transfer(matrices, level=0.5).accuracy, transfer(matrices, level=0.99).accuracy
    assert narrow is not None
    assert wide is not None
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high  # type: ignore[operator]


def test_equal_seeds_have_an_interval_of_no_width() -> None:
    estimate = transfer([FULL] * 3).forgetting
    assert estimate is not None
    assert estimate.low == pytest.approx(25)
    assert estimate.high == pytest.approx(25)


@pytest.mark.parametrize(
    ("matrices", "baselines", "message"),
    [
        ([], None, "at least one accuracy matrix"),
        ([[]], None, "at least one task"),
        ([[[1.0, 2.0]]], None, "1 x 1"),
        ([FULL, [[1.0]]], None, "3 x 3"),
        ([[[101.0]]], None, "0..100, got 101"),
        ([[[-1.0]]], None, "got -1"),
        ([FULL], [[1.0]], "one row of 3"),
        ([FULL], [BASELINE, BASELINE], "per seed"),
    ],
)
def test_bad_input_is_told(matrices: list, baselines: list | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        transfer(matrices, baselines)


def test_a_level_outside_zero_and_one_is_told() -> None:
    with pytest.raises(UsageError, match="level"):
        transfer([FULL], level=95)
