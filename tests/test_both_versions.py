"""The comparison of two versions: what it computes from its readings."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "both_versions.py"
spec = importlib.util.spec_from_file_location("both_versions", PATH)
both_versions = importlib.util.module_from_spec(spec)
spec.loader.exec_module(both_versions)


def reading(seconds, weights="a"):
    return {"cpu": seconds, "wall": 2 * seconds, "weights": weights}


def test_the_ratio_is_the_median_over_rounds():
    """One round that other programs disturbed does not count; neither does a machine that slows down."""
    speeds, ratios = (1.0, 2.0, 3.0, 4.0, 5.0), (1.1, 1.1, 1.1, 9.0, 1.1)
    rounds = [
        {"old": [reading(speed)] * 2, "new": [reading(speed * ratio)] * 2}
        for speed, ratio in zip(speeds, ratios, strict=True)
    ]
    found = both_versions.summarise(rounds)
    assert found["cpu"]["ratio"] == pytest.approx(1.1)
    low, high = found["wall"]["interval95"]
    assert low == pytest.approx(1.1)
    assert high >= 1.1
    assert found["same"]


def test_other_weights_are_told():
    rounds = [{"old": [reading(1.0)] * 2, "new": [reading(1.0), reading(1.0, "b")]}]
    assert not both_versions.summarise(rounds)["same"]
