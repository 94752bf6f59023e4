"""Story: a program that learns is killed at random moments, and ends with what it would have learned anyway."""

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forked import trains_in_a_fork
from stories.mortal import killed, learn, result


@cache
def never_killed(folder: Path) -> dict[str, torch.Tensor]:
    """What is learned without any kill, with the buffer in memory."""
    with torch.random.fork_rng():
        return {name: value.clone() for name, value in result(learn(folder, "device")).items()}


@pytest.fixture
def expected(tmp_path_factory):
    return never_killed(tmp_path_factory.getbasetemp() / "never killed")


def assert_survives(folder, storage, kills, seed, expected):
    killed(folder, storage, kills, seed)
    got = load_file(folder / "result.safetensors")
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@trains_in_a_fork
@pytest.mark.parametrize("storage", ["device", "folder"])
def test_killed_three_times(tmp_path, storage, expected):
    assert_survives(tmp_path, storage, 3, 0, expected)


@trains_in_a_fork
@pytest.mark.slow
@pytest.mark.parametrize("storage", ["device", "host", "folder"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_twenty_times(tmp_path, storage, seed, expected):
    assert_survives(tmp_path, storage, 20, seed, expected)
