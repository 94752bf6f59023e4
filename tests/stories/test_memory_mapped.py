"""Story: pictures of 224 x 224 in a buffer far larger than memory should have to be."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf

BUDGET = 128
"""MB that a buffer in a folder may add to a program, however much it holds."""


def learn(folder: Path, capacity: int, observed: int) -> dict[str, float]:
    """What pictures.py measured, in a process of its own."""
    script = Path(__file__).with_name("pictures.py")
    command = [sys.executable, str(script), str(folder), str(capacity), str(observed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout)


def assert_fits(folder: Path, capacity: int, observed: int) -> dict[str, float]:
    try:
        measured = learn(folder, capacity, observed)
        assert measured["stored"] == capacity
        assert measured["stored_mb"] > capacity * 3 * 224 * 224 / 1e6
        assert measured["memory_beyond_mb"] < BUDGET
        assert measured["checkpoint_mb"] < 1 + 2 * 16 * capacity / 1e6  # which row each slot is in, and no pictures
        assert measured["whole"] is True
        again = hf.Reservoir(capacity, storage=folder / "buffer")
        assert again.offered == observed
        assert again.sample(20).x.shape == (20, 3, 224, 224)
        again.close()
    finally:
        shutil.rmtree(folder)  # pytest would keep it for the next three times
    return measured


def test_a_thousand_pictures(tmp_path):
    """150 MB, more than the budget, to see that memory does not grow with what is stored."""
    assert_fits(tmp_path, 1000, 1200)


@pytest.mark.slow
def test_a_hundred_thousand_pictures(tmp_path):
    """15 GB."""
    assert assert_fits(tmp_path, 100_000, 110_000)["accuracy"] > 85
