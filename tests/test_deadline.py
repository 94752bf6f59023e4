"""When time is short, some runs of a fleet wait, so that others end."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleets import run_fleet
from holdfast.config import RunConfig
from holdfast.sweep import deadline
from holdfast.sweep.deadline import Deadline
from holdfast.training import run


@pytest.fixture
def clock(monkeypatch):
    """The time, as a list of one number that a test moves."""
    now = [1000.0]
    monkeypatch.setattr(deadline, "monotonic", lambda: now[0])
    return now


def advance(watched, clock, runs, turns, seconds):
    """Each run that does not wait makes a step in every turn, which takes so many seconds per run."""
    for _ in range(turns):
        for name, each in runs.items():
            if name not in watched.waiting and each.step < each.whole:
                each.step += 1
                each.fraction = each.step / each.whole
                clock[0] += seconds
                watched.stepped(name, each)
                if each.step == each.whole:
                    watched.ended(name)


def of_steps(**runs):
    return {name: SimpleNamespace(step=done, whole=whole, fraction=0.0) for name, (done, whole) in runs.items()}


def test_runs_that_all_end_in_time_do_not_wait(clock):
    watched, runs = Deadline(clock[0] + 4 * 110), of_steps(a=(0, 100), b=(0, 100), c=(0, 100), d=(0, 100))
    advance(watched, clock, runs, 50, 1.0)
    assert not watched.waiting
    assert not watched.has_time_for_another()


def test_the_run_with_the_most_left_waits_first(clock):
    watched, runs = Deadline(clock[0] + 300), of_steps(a=(20, 100), b=(0, 100), c=(40, 100), d=(0, 120))
    advance(watched, clock, runs, 5, 1.0)
    assert watched.waiting == {"d"}, "80 + 100 + 60 steps in 300 seconds; with 120 more, it is too many"
    advance(watched, clock, runs, 120, 1.0)
    assert {name for name, each in runs.items() if each.step == each.whole} == {"a", "b", "c"}
    assert clock[0] <= 1300
    assert not watched.waiting, "what cannot end in time goes on when nothing else does"


def test_one_more_waits_if_the_runs_become_slower(clock):
    watched, runs = Deadline(clock[0] + 430), of_steps(a=(0, 100), b=(2, 100), c=(4, 100), d=(6, 100))
    advance(watched, clock, runs, 20, 1.0)
    assert not watched.waiting
    advance(watched, clock, runs, 20, 1.3)
    assert watched.waiting == {"a"}
    advance(watched, clock, runs, 60, 1.3)
    assert [name for name, each in runs.items() if each.step == each.whole] == ["b", "c", "d"]
    assert clock[0] <= 1430


def test_a_run_that_is_left_alone_is_known_to_be_slower(clock):
    watched, runs = Deadline(clock[0] + 66), of_steps(a=(50, 100), b=(0, 1000))
    advance(watched, clock, runs, 5, 1.0)
    for _ in range(45):
        assert watched.waiting == {"b"}
        advance(watched, clock, runs, 1, deadline.SLOWER[1] / deadline.SLOWER[2])
    assert runs["a"].step == 100
    assert clock[0] <= 1066


def test_if_none_can_end_none_waits(clock):
    watched, runs = Deadline(clock[0] + 50), of_steps(a=(0, 100), b=(0, 100))
    advance(watched, clock, runs, 20, 1.0)
    assert not watched.waiting
    assert not watched.has_time_for_another()


def test_a_run_is_started_only_if_it_can_end(clock):
    watched, runs = Deadline(clock[0] + 300), of_steps(a=(0, 100))
    assert watched.has_time_for_another(), "nothing is known yet"
    advance(watched, clock, runs, 20, 1.0)
    assert watched.has_time_for_another(), "180 steps in 280 seconds"
    advance(watched, clock, runs, 79, 1.0)
    clock[0] += 120
    assert not watched.has_time_for_another(), "101 steps in 81 seconds"
    advance(watched, clock, runs, 1, 1.0)
    assert watched.has_time_for_another(), "nothing else to do"


def test_a_run_that_cannot_end_is_not_started_in_the_last_minute(clock):
    watched, runs = Deadline(clock[0] + 150), of_steps(a=(0, 100))
    assert Deadline(clock[0] + 10).has_time_for_another(), "else a sweep of many short calls would never begin"
    advance(watched, clock, runs, 85, 1.0)
    clock[0] += 10
    advance(watched, clock, runs, 15, 1.0)
    assert not watched.has_time_for_another(), "100 steps in 40 seconds"
    clock[0] -= 30
    assert watched.has_time_for_another(), "it will be on its way when the next call continues it"
    clock[0] += 80
    assert watched.has_time_for_another(), "nobody stopped the fleet"


def test_without_a_deadline_nothing_waits(clock):
    watched, runs = Deadline(), of_steps(a=(0, 10), b=(0, 10_000))
    advance(watched, clock, runs, 30, 1e6)
    assert not watched.waiting
    assert watched.has_time_for_another()


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_the_work_left_is_that_of_turns_one_after_the_other(left):
    """A slow loop: in each turn, every run that has steps left makes one."""
    work, going = 0.0, sorted(left)
    while going := [steps for steps in going if steps > 0]:
        work += len(going) * deadline.SLOWER.get(len(going), 1.0)
        going = [steps - 1 for steps in going]
    assert deadline._work(sorted(left)) == pytest.approx(work)


def test_a_fleet_ends_one_run_where_there_is_no_time_for_two(tmp_path, clock, monkeypatch):
    """Eight steps each, a second a step: side by side both would end after 16 seconds, but time ends after 14."""
    monkeypatch.setattr(deadline, "CHECK", 4.0)
    monkeypatch.setattr(deadline, "SLOWER", {})
    monkeypatch.setattr("holdfast.sweep.runner.REPORT", -1.0)
    configs = [
        RunConfig.preset("rot-mnist", method, buffer_size=50, tasks=2, train_limit=512, batch_size=128)
        for method in ("er", "mse", "sgd")
    ]
    ends, begins = {}, {}

    def watch(_runner, event):
        if event.kind == "moved":
            clock[0] += 1
        elif event.kind == "started":
            begins[event.config] = clock[0] - 1000
        elif event.kind == "done":
            ends[event.config] = clock[0] - 1000

    found = run_fleet(configs, tmp_path, size=2, until=clock[0] + 14, watch=watch)
    assert [ends[config] <= 14 for config in configs] == [True, False, False]
    assert begins[configs[2]] >= ends[configs[1]], "a third run would end nobody any sooner"
    for config, result in found.items():
        expected = run(config, device="cpu")
        assert all(torch.equal(expected.weights[name], tensor) for name, tensor in result.weights.items())
