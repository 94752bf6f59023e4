"""The hunt itself notices what it is for."""

import contextlib
import os
import pickle
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from holdfast.errors import UsageError

from . import hunt
from .hunt import Stuck, altered, damaged, outcome


def test_a_right_read_and_an_error_for_people_both_pass():
    error = UsageError("something is wrong; do this.")

    def refuse():
        raise error

    assert outcome(lambda: 3) == 3
    assert outcome(refuse) is error


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RecursionError(), AssertionError()])
def test_other_exceptions_fail(error):
    def refuse():
        raise error

    with pytest.raises(type(error)):
        outcome(refuse)


def test_an_error_that_says_nothing_fails():
    def refuse():
        raise UsageError("")

    with pytest.raises(AssertionError, match="must say something"):
        outcome(refuse)


def test_large_allocations_fail():
    with pytest.raises(MemoryError):
        outcome(np.empty, 2 * hunt.ROOM, np.uint8)


def test_waiting_fails(monkeypatch):
    monkeypatch.setattr(hunt, "PATIENCE", 1)
    with pytest.raises(Stuck):
        outcome(time.sleep, 10)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/nowhere/at/all",)


@pytest.mark.parametrize(
    "act",
    [
        lambda path: path.write_text("x"),
        lambda path: os.system("true"),
        lambda path: path.mkdir(),
        lambda path: _quietly(pickle.loads, pickle.dumps(Evil())),
    ],
)
def test_side_effects_fail(act, tmp_path):
    with pytest.raises(AssertionError, match="did this"):
        outcome(act, tmp_path / "new")


def _quietly(function, argument):
    with contextlib.suppress(OSError):
        function(argument)


@pytest.mark.parametrize("strategy", [damaged(b"0123456789"), altered({"a": [1, {"b": None}]})])
def test_damage_is_damage_most_of_the_time(strategy):
    made = []

    @settings(max_examples=100, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(value):
        made.append(value)

    collect()
    assert len(set(made)) > 20
    assert sum(value != b"0123456789" for value in made) > 0.9 * len(made)
