"""Story: a program that learns is killed at random moments, and ends with what it would have learned anyway."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stories.mortal import learn, result


@cache
def never_killed(folder: Path) -> dict[str, torch.Tensor]:
    """What is learned without any kill, with the buffer in memory."""
    with torch.random.fork_rng():
        return {name: value.clone() for name, value in result(learn(folder, "device")).items()}


@pytest.fixture
def expected(tmp_path_factory):
    return never_killed(tmp_path_factory.getbasetemp() / "never killed")


def assert_survives(folder, storage, kills, seed, expected):
    script = Path(__file__).with_name("mortal.py")
    command = [sys.executable, str(script), str(folder), storage, str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    got = load_file(folder / "result.safetensors")
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_killed_three_times(tmp_path, expected):
    """With a folder, which has more to lose than a buffer in memory."""
    assert_survives(tmp_path, "folder", 3, 0, expected)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["device", "host", "folder"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_twenty_times(tmp_path, storage, seed, expected):
    assert_survives(tmp_path, storage, 20, seed, expected)
