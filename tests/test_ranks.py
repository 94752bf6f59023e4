"""Processes that act as one. Functions that begin with `_` run on every rank."""

import logging
import os
import signal
import sys
import threading
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import ranks as module
from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.ranks import Ranks
from holdfast.rng import generator


def failure(function):
    """Type and message of the error for people that `function` raises."""
    try:
        function()
    except HoldfastError as error:
        return type(error).__name__, str(error)
    return None


# --- meetings --------------------------------------------------------------------------------------------------------


def _met(counts):
    ranks = Ranks()
    with ranks.together("meet") as meeting:
        meeting.count, meeting.form = counts[ranks.rank], "alike"
    return ranks.rank, ranks.size, meeting.counts


@pytest.mark.parametrize("world", [1, 2, 4])
def test_everyone_learns_what_everyone_brings(crew, world):
    counts = [7, 0, 3, 2**40][:world]
    assert crew.run(world, _met, counts) == [(rank, world, counts) for rank in range(world)]


def _meeting(actions, forms, culprit):
    ranks = Ranks()

    def meet():
        with ranks.together(actions[ranks.rank]) as meeting:
            meeting.form = forms[ranks.rank]
            if ranks.rank == culprit:
                raise CheckpointError("the disk is full.")

    return failure(meet)


def test_what_fails_on_one_rank_fails_on_all_with_the_same_type(crew):
    answers = crew.run(4, _meeting, ["save"] * 4, [""] * 4, 2)
    assert answers[2] == ("CheckpointError", "the disk is full.")
    for rank in (0, 1, 3):
        assert answers[rank] == ("CheckpointError", "rank 2 failed: the disk is full.")


def test_ranks_that_do_different_things_are_told(crew):
    answers = crew.run(2, _meeting, ["draw", "add"], ["", ""], None)
    kind, message = answers[0]
    assert answers[1] == answers[0]
    assert kind == "UsageError"
    assert "the ranks differ in what they do: rank 0: draw; rank 1: add." in message


def test_ranks_that_bring_different_things_are_told(crew):
    answers = crew.run(2, _meeting, ["add", "add"], ["größe 3", ""], None)
    assert answers[0] == answers[1]
    assert "what they bring: rank 0: größe 3; rank 1: ." in answers[0][1]


def _disagreed_and_met():
    (kind, _), ranks = _meeting(["draw", "add"], ["", ""], None), Ranks()
    with ranks.together("go on") as meeting:
        meeting.count = ranks.rank
    return kind, meeting.counts


def test_after_a_disagreement_the_ranks_are_still_in_step(crew):
    assert crew.run(2, _disagreed_and_met) == [("UsageError", [0, 1])] * 2


# --- rows ------------------------------------------------------------------------------------------------------------


def _shipped(origin, destination, width):
    ranks = Ranks()
    origin, destination = torch.tensor(origin, dtype=torch.int64), torch.tensor(destination, dtype=torch.int64)
    numbers = torch.arange(len(origin), dtype=torch.uint8)[:, None].repeat(1, width)
    return ranks.ship(numbers[origin == ranks.rank], origin, destination).tolist()


journeys = st.integers(1, 4).flatmap(
    lambda world: st.tuples(
        st.just(world), st.lists(st.tuples(st.integers(0, world - 1), st.integers(0, world - 1)), max_size=12)
    )
)


@given(journeys, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_rows_arrive_whole_and_in_order(crew, journey, width):
    world, pairs = journey
    answers = crew.run(world, _shipped, [a for a, _ in pairs], [b for _, b in pairs], width)
    for rank, rows in enumerate(answers):
        assert rows == [[number] * width for number, (_, end) in enumerate(pairs) if end == rank]


def _gathered():
    ranks = Ranks()
    return [row.tolist() for row in ranks.gather(torch.arange(ranks.rank * 3, dtype=torch.uint8))]


def test_bytes_of_any_length_are_gathered(crew):
    assert crew.run(4, _gathered) == [[list(range(0)), list(range(3)), list(range(6)), list(range(9))]] * 4


def _still_held():
    """Of 100 tensors that were told to the other ranks, how many PyTorch holds on to when all have been told."""
    ranks, interval, held = Ranks(), sys.getswitchinterval(), 0
    sys.setswitchinterval(60)  # other threads get the interpreter only while this one waits
    try:
        for _ in range(100):
            numbers = torch.arange(3)
            before = sys.getrefcount(numbers)
            ranks._gather(numbers)
            held += sys.getrefcount(numbers) > before
    finally:
        sys.setswitchinterval(interval)
    return held


def test_no_thread_needs_the_interpreter_for_what_was_sent(crew):
    """One that did would abort a program that ends now."""
    assert crew.run(2, _still_held) == [0, 0]


# --- generators ------------------------------------------------------------------------------------------------------


def _continued(states):
    draw = torch.Generator()
    Ranks().restore(draw, states)
    return torch.rand(4, generator=draw).tolist()


def test_generators_continue_where_the_same_ranks_were_and_newcomers_go_their_own_way(crew):
    states = [generator(seed, "augment").get_state() for seed in range(2)]
    expected = [torch.rand(4, generator=generator(seed, "augment")).tolist() for seed in range(2)]
    assert crew.run(2, _continued, states) == expected
    four = crew.run(4, _continued, states)
    assert four[:2] == expected
    assert crew.run(4, _continued, states) == four
    assert max(Counter(number for numbers in four for number in numbers).values()) == 1


# --- alone, and left alone -------------------------------------------------------------------------------------------


def test_without_a_process_group_it_says_how_to_get_one():
    with pytest.raises(UsageError, match="start the program with torchrun"):
        Ranks()


def test_one_rank_is_a_job_as_well(alone):
    assert _met([5]) == (0, 1, [5])
    assert _shipped([0, 0], [0, 0], 2) == [[0, 0], [1, 1]]
    with pytest.raises(CheckpointError, match=r"^the disk is full\.$"), Ranks().together("save"):
        raise CheckpointError("the disk is full.")


def test_errors_that_are_not_for_people_pass(alone):
    with pytest.raises(ZeroDivisionError), Ranks().together("divide"):
        1 / 0  # noqa: B018


def _deserted():
    ranks = Ranks()
    if ranks.rank == 1:
        dist.destroy_process_group()
        return None
    return failure(lambda: _met([1, 2]))


def test_a_rank_that_is_gone_is_an_error_for_people(crew):
    (kind, message), _ = crew.run(2, _deserted)
    crew.disband()
    assert kind == "TrainingError"
    assert message.startswith("lost contact with the other ranks (")
    assert "Start the job again from its last checkpoint." in message


# --- a rank that does not come ---------------------------------------------------------------------------------------


def told(act, limit=0.3):
    """What this rank says while it acts, with a limit of less than a minute."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    patience, module.PATIENCE = module.PATIENCE, limit
    module.log.addHandler(handler)
    try:
        act()
    finally:
        module.log.removeHandler(handler)
        module.PATIENCE = patience
    return said


def _late(stopped):
    """Rank 1 comes to the second meeting 1.2 seconds late, because it took a rest or was stopped as by Ctrl-Z."""
    ranks = Ranks()
    # Another process wakes it up: all threads of this one rest.
    if ranks.rank == 1 and stopped and os.fork() == 0:
        time.sleep(1.2)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)

    def act():
        with ranks.together("meet"):
            pass
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP) if stopped else time.sleep(1.2)
        with ranks.together("meet again"):
            pass

    said = told(act)
    if ranks.rank == 1 and stopped:
        os.wait()
    return said


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_that_waits_for_long_says_so_once(crew, stopped):
    said, nothing = crew.run(2, _late, stopped)
    assert nothing == []
    assert len(said) == 1
    assert said[0].startswith("rank 0 has waited 0 seconds for the other ranks. One of them was stopped, takes fewer")


def _threads():
    """How many more threads there are once ranks are no longer used."""
    before = set(threading.enumerate())
    made = [Ranks() for _ in range(3)]
    added = set(threading.enumerate()) - before
    made.clear()
    for thread in added:
        thread.join(10)
    return len(added), sum(thread.is_alive() for thread in added)


def test_who_watches_ends_with_the_ranks(crew):
    assert crew.run(2, _threads) == [(3, 0)] * 2
