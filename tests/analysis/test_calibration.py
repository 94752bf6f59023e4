from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.analysis import calibration
from holdfast.errors import UsageError


def oracle(logits: torch.Tensor, labels: torch.Tensor, bins: int, norm: str) -> float:
    from torchmetrics.functional.classification import multiclass_calibration_error  # takes a second

    # torchmetrics computes in float32 and gives a confidence of exactly 1 a bin of its own; the logits stay below that.
    probabilities = torch.softmax(logits.double(), dim=1)
    error = multiclass_calibration_error(probabilities, labels, logits.shape[1], n_bins=bins, norm=norm)
    return 100 * float(error)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    samples=st.integers(1, 300),
    classes=st.integers(2, 12),
    bins=st.integers(1, 30),
    sharpness=st.floats(0.1, 1.5),
    seed=st.integers(0, 2**32),
)
def test_equals_torchmetrics(samples: int, classes: int, bins: int, sharpness: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(samples, classes, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    result = calibration(logits, labels, bins)
    assert result.ece == pytest.approx(oracle(logits, labels, bins, "l1"), abs=2e-4)
    assert result.mce == pytest.approx(oracle(logits, labels, bins, "max"), abs=2e-4)
    assert sum(result.count) == samples
    assert len(result.count) == len(result.confidence) == len(result.accuracy) == result.bins == bins


def two_class_logits(*confidences: float) -> torch.Tensor:
    return torch.tensor([[c, 1 - c] for c in confidences], dtype=torch.float64).log()


def test_a_hand_computed_case() -> None:
    result = calibration(two_class_logits(0.95, 0.95, 0.65, 0.65), torch.tensor([0, 1, 0, 0]), bins=10)
    assert result.count == [0, 0, 0, 0, 0, 0, 2, 0, 0, 2]
    assert result.confidence[6] == pytest.approx(0.65)
    assert result.accuracy[6] == 1
    assert result.accuracy[9] == 0.5
    assert result.ece == pytest.approx(40)  # the mean of 35 and 45
    assert result.mce == pytest.approx(45)


def test_an_edge_belongs_to_the_bin_above_and_one_to_the_last_bin() -> None:
    on_the_edge = calibration(torch.zeros(3, 2), torch.tensor([0, 0, 1]), bins=2)
    assert on_the_edge.count == [0, 3]
    saturated = calibration(torch.tensor([[1000.0, 0.0]]), torch.tensor([0]), bins=15)
    assert saturated.count[-1] == 1
    assert saturated.ece == 0


def test_one_class_only_and_empty_bins() -> None:
    result = calibration(torch.tensor([[3.0, 0.0]] * 5), torch.zeros(5, dtype=torch.long))
    confidence = float(torch.sigmoid(torch.tensor(3.0, dtype=torch.float64)))
    assert result.ece == result.mce == pytest.approx(100 * (1 - confidence))
    assert result.count == [0] * 14 + [5]
    assert result.confidence[:14] == result.accuracy[:14] == [0.0] * 14


def test_accumulates_in_float64() -> None:
    logits = two_class_logits(0.7).float().repeat(200_000, 1)
    assert calibration(logits, torch.zeros(len(logits), dtype=torch.long)).ece == pytest.approx(30, abs=1e-5)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.tensor([[float("nan"), 0.0]]), torch.tensor([0]), "NaN"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), r"0\.\.2"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), r"-1\.\.0"),
        (torch.zeros(2, 3), torch.tensor([0]), "one per row"),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "one sample or more"),
        (torch.zeros(2, 1), torch.tensor([0, 0]), "two classes"),
        (torch.zeros(2), torch.tensor([0, 0]), r"\(samples, classes\)"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "integers"),
    ],
)
def test_bad_input_is_told(logits: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        calibration(logits, labels)


def test_needs_a_bin() -> None:
    with pytest.raises(UsageError, match="bins=0"):
        calibration(torch.zeros(1, 2), torch.tensor([0]), bins=0)
