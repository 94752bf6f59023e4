"""Results out of thin air, with numbers the tests choose."""

import pytest
import torch

from holdfast import results
from holdfast.config import RunConfig
from holdfast.results import RunResult


def made_up(config: RunConfig, accuracy: float, *, seconds: float = 10.0, logits=None) -> RunResult:
    """A result of two tasks whose mean accuracy is `accuracy`."""
    matrix = torch.tensor([[80.0, 20.0], [accuracy - 5, accuracy + 5]], dtype=torch.float64)
    return RunResult(
        config=config,
        matrix=matrix,
        task_matrix=matrix,
        untrained=torch.tensor([10.0, 10.0], dtype=torch.float64),
        seconds=seconds,
        timing={"training": 9.0, "steps": 4},
        environment={"device_type": "cpu"},
        logits=logits or {},
    )


@pytest.fixture
def store(tmp_path):
    """store(config, accuracy) saves a made-up result under tmp_path / 'out' and returns its folder."""

    def save(config, accuracy=50.0, **rest):
        return results.save(made_up(config, accuracy, **rest), tmp_path / "out")

    return save


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"
