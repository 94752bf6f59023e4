"""benchmarks/last_minibatches.py: random numbers as a GPU draws them."""

import importlib
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("last_minibatches")


@pytest.mark.parametrize(
    ("counter", "seed", "numbers"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_numbers_that_its_authors_published(script, counter, seed, numbers):
    found = script.philox([np.array([each], dtype=np.uint64) for each in counter], seed)
    assert tuple(int(each[0]) for each in found) == numbers


def test_a_permutation_has_every_sample_once_and_another_offset_another_order(script):
    first, second = (script.permutation(script.SAMPLES, 7, offset) for offset in (0, script.DRAWS))
    for found in (first, second):
        assert sorted(found) == list(range(script.SAMPLES))
    assert np.mean(first == second) < 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
