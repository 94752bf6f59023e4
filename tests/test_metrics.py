"""Metrics against the formulas of the protocol in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import metrics

NAN = math.nan


@st.composite
def matrices(draw):
    """(R, b) of 2 to 7 tasks with the cells a run measures: what was seen and the next task; the last row is whole."""
    tasks = draw(st.integers(2, 7))
    percent = st.floats(0, 100)
    rows = [[draw(percent) if j <= i + 1 else NAN for j in range(tasks)] for i in range(tasks)]
    return rows, [draw(percent) for _ in range(tasks)]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@given(matrices())
def test_formulas(given):
    rows, untrained = given
    tasks = len(rows)
    matrix = tensor(rows)
    assert metrics.accuracy(matrix) == pytest.approx(sum(rows[-1]) / tasks)
    expected = sum(rows[j - 1][j] - untrained[j] for j in range(1, tasks)) / (tasks - 1)
    assert metrics.forward_transfer(matrix, tensor(untrained)) == pytest.approx(expected, abs=1e-9)
    expected = sum(rows[-1][j] - rows[j][j] for j in range(tasks - 1)) / (tasks - 1)
    assert metrics.backward_transfer(matrix) == pytest.approx(expected, abs=1e-9)
    best = [max(row[j] for row in rows if not math.isnan(row[j])) for j in range(tasks)]
    expected = sum(best[j] - rows[-1][j] for j in range(tasks - 1)) / (tasks - 1)
    assert metrics.forgetting(matrix) == pytest.approx(expected, abs=1e-9)


def test_by_hand():
    matrix = tensor([[90.0, 20.0, NAN], [70.0, 80.0, 30.0], [60.0, 85.0, 95.0]])
    untrained = tensor([10.0, 15.0, 5.0])
    assert metrics.accuracy(matrix) == pytest.approx(80.0)
    assert metrics.forward_transfer(matrix, untrained) == pytest.approx((5 + 25) / 2)
    assert metrics.backward_transfer(matrix) == pytest.approx((-30 + 5) / 2)
    assert metrics.forgetting(matrix) == pytest.approx((30 + 0) / 2)


def test_a_network_that_knows_nothing_forgets_nothing():
    matrix = torch.zeros(3, 3, dtype=torch.float64)
    assert metrics.forgetting(matrix) == 0
    assert metrics.backward_transfer(matrix) == 0


def test_one_task_has_an_accuracy_only():
    matrix, untrained = tensor([[42.0]]), tensor([10.0])
    assert metrics.accuracy(matrix) == 42
    assert math.isnan(metrics.forward_transfer(matrix, untrained))
    assert math.isnan(metrics.backward_transfer(matrix))
    assert math.isnan(metrics.forgetting(matrix))


def test_one_stage_over_several_tasks_has_an_accuracy_only():
    """As joint training has: there is no order in which tasks could be transferred to or forgotten."""
    matrix, untrained = tensor([[90.0, 80.0, 70.0]]), tensor([10.0, 10.0, 10.0])
    assert metrics.accuracy(matrix) == 80
    assert math.isnan(metrics.forward_transfer(matrix, untrained))
    assert math.isnan(metrics.backward_transfer(matrix))
    assert math.isnan(metrics.forgetting(matrix))
