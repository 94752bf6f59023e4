from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import softmax

from holdfast.analysis import recency
from holdfast.errors import UsageError


def test_against_scipy() -> None:
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    tasks = [[4, 0], [1, 5], [2, 3]]
    probabilities = softmax(logits.double().numpy(), axis=1)
    result = recency(logits, tasks)
    expected = [np.mean([sum(row[c] for c in task) for row in probabilities]) for task in tasks]
    assert result.task_probabilities == pytest.approx(expected)
    assert result.gap == pytest.approx(expected[2] - expected[0])
    shares = [np.mean([np.argmax(row) in task for row in probabilities]) for task in tasks]
    assert result.prediction_shares == pytest.approx(shares)
    assert sum(result.task_probabilities) == pytest.approx(1)
    assert sum(result.prediction_shares) == pytest.approx(1)


def test_a_model_that_only_knows_the_last_task() -> None:
    logits = torch.tensor([[0.0, 0.0, 50.0, 50.0]]).repeat(7, 1)
    result = recency(logits, [[0, 1], [2, 3]])
    assert result.gap == pytest.approx(1)
    assert result.prediction_shares == [0, 1]


def test_one_task_has_no_gap_and_spare_outputs_keep_their_probability() -> None:
    result = recency(torch.zeros(3, 4), [[0, 1]])
    assert result.gap == 0
    assert result.task_probabilities == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("logits", "tasks", "message"),
    [
        (torch.full((2, 3), float("nan")), [[0], [1]], "NaN"),
        (torch.zeros(0, 3), [[0], [1]], "one sample"),
        (torch.zeros(3), [[0], [1]], "samples, classes"),
        (torch.zeros(2, 3), [[0], [3]], r"0\.\.2"),
        (torch.zeros(2, 3), [[-1], [1]], r"0\.\.2"),
        (torch.zeros(2, 3), [[0, 1], [1]], "twice"),
        (torch.zeros(2, 3), [[0], []], "at least one class"),
        (torch.zeros(2, 3), [], "at least one task"),
    ],
)
def test_bad_input_is_told(logits: torch.Tensor, tasks: list[list[int]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recency(logits, tasks)
