import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import numpy as np
import pytest
import torch

from forked import ended, forked
from holdfast.rng import (
    derive_seed,
    generator,
    own_generators,
    restore,
    seeded_globally,
    swapped_globally,
)

NAMES = ("init", "order", "augment", "buffer", "stream")


def test_seeds_are_distinct_over_names_and_seeds():
    seeds = {derive_seed(seed, name) for seed in range(-50, 450) for name in (*NAMES, "", "1", "0:order")}
    assert len(seeds) == 500 * 8


def test_seeds_fit_what_torch_and_numpy_accept():
    for seed in (0, 1, -1, 2**31, 2**63, 10**30):
        derived = derive_seed(seed, "order")
        assert 0 <= derived < 2**63
        torch.Generator().manual_seed(derived)
        np.random.default_rng(derived)


def test_seeds_use_all_their_bits():
    """Each of 63 bits is set in about half of 1,000 seeds: 6 standard deviations are 95."""
    seeds = [derive_seed(seed, "stream") for seed in range(1000)]
    for bit in range(63):
        assert abs(sum(seed >> bit & 1 for seed in seeds) - 500) < 95


def test_seeds_are_what_they_always_were():
    """In every process, on every machine. A change here changes every result: raise `config.PROTOCOL` with it."""
    assert derive_seed(0, "init") == int.from_bytes(bytes.fromhex(INIT_DIGEST)[:8], "little") >> 1


# sha256 of "holdfast:0:init", from `printf holdfast:0:init | sha256sum`
INIT_DIGEST = "0f8fecec0c57ecf14351ae9dd51261b6f62572185619173d11617384f89d7fb5"


def test_same_name_and_seed_give_the_same_stream():
    a, b = (torch.rand(100, generator=generator(5, "order")) for _ in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize("other", [(0, "augment"), (1, "order")])
def test_streams_of_other_names_and_seeds_are_unrelated(other):
    """The correlation of independent streams of 10,000 normals is within 5/100."""
    ours = torch.randn(10_000, generator=generator(0, "order"), dtype=torch.float64)
    theirs = torch.randn(10_000, generator=generator(*other), dtype=torch.float64)
    assert abs(float(torch.corrcoef(torch.stack([ours, theirs]))[0, 1])) < 0.05


def test_generators_do_not_touch_the_global_one():
    before = torch.get_rng_state()
    torch.rand(3, generator=generator(0, "order"))
    assert torch.equal(before, torch.get_rng_state())


def test_seeded_globally_decides_what_is_drawn_inside():
    drawn = []
    for outer in (1, 2):
        torch.manual_seed(outer)
        with seeded_globally(7, "init"):
            drawn.append(torch.nn.Linear(4, 3).weight)
    assert torch.equal(*drawn)
    with seeded_globally(8, "init"):
        assert not torch.equal(drawn[0], torch.nn.Linear(4, 3).weight)


def test_seeded_globally_restores_the_callers_state():
    torch.manual_seed(0)
    expected = torch.rand(5)
    torch.manual_seed(0)
    with seeded_globally(7, "init"):
        torch.rand(100)
    assert torch.equal(torch.rand(5), expected)


def test_seeded_globally_restores_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="negative"), seeded_globally(7, "init"):
        torch.rand(-torch.randint(1, 5, ()))
    assert torch.equal(before, torch.get_rng_state())


def test_seeded_globally_nests():
    with seeded_globally(1, "init"):
        a = torch.rand(2)
        with seeded_globally(2, "init"):
            torch.rand(3)
        b = torch.rand(2)
    with seeded_globally(1, "init"):
        assert torch.equal(torch.rand(4), torch.cat([a, b]))


def test_seeded_globally_leaves_the_other_global_generators_alone(monkeypatch):
    """Those of GPUs (which nothing would restore), of Python and of numpy."""

    def reseeded(seed):
        pytest.fail("the GPUs' generators were seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded)
    python, numpy = random.getstate(), np.random.get_state()[1].copy()
    with seeded_globally(7, "init"):
        torch.rand(3)
    assert random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()


CPU = torch.device("cpu")


def owned(seed):
    return own_generators(seed, "network", CPU)


def test_swapped_globally_continues_where_its_last_block_ended():
    before, own, others = torch.get_rng_state(), owned(3), owned(4)
    expected = torch.rand(6, generator=generator(3, "network"))
    drawn = []
    for _ in range(2):
        with swapped_globally(own):
            drawn.append(torch.rand(3))
        assert torch.equal(torch.get_rng_state(), before)
        with swapped_globally(others):
            torch.rand(5)
    assert torch.equal(torch.cat(drawn), expected)


def test_swapped_globally_shows_whether_anything_was_drawn():
    own = owned(3)
    beginning = own["cpu"].get_state()
    with swapped_globally(own):
        pass
    assert torch.equal(own["cpu"].get_state(), beginning)
    with swapped_globally(own):
        torch.rand(1)
    assert not torch.equal(own["cpu"].get_state(), beginning)


def test_swapped_globally_keeps_what_is_restored_inside():
    """As a run does that continues from a checkpoint."""
    own, saved = owned(3), {"cpu": generator(4, "network").get_state()}
    with swapped_globally(own):
        restore(torch.default_generator, saved["cpu"])
    assert torch.equal(own["cpu"].get_state(), saved["cpu"])


def test_swapped_globally_restores_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), swapped_globally(owned(3)):
        torch.rand(int(1 / 0))
    assert torch.equal(torch.get_rng_state(), before)


def in_threads(count, work):
    """What `work(number)` returns in each of so many threads that begin together."""
    together = Barrier(count)

    def begin(number):
        together.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def test_threads_take_turns():
    """Each draws what it draws alone, and whoever uses the global generator finds it where it was."""

    def seeded(number):
        with seeded_globally(number, "init"):
            return torch.cat([torch.rand(2000) for _ in range(10)])

    def swapped(own):
        with swapped_globally(own):
            return torch.cat([torch.rand(2000) for _ in range(10)])

    def work(number):
        own, drawn = owned(number), []
        for _ in range(15):
            drawn += [seeded(number), swapped(own)]
        return drawn

    before, alone = torch.get_rng_state(), [work(number) for number in range(4)]
    for expected, drawn in zip(alone, in_threads(4, work), strict=True):
        assert all(map(torch.equal, expected, drawn))
    assert torch.equal(torch.get_rng_state(), before)


def test_blocks_nest_in_one_thread():
    with swapped_globally(owned(1)), seeded_globally(2, "init"), swapped_globally(owned(3)):
        assert torch.equal(torch.rand(4), torch.rand(4, generator=generator(3, "network")))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons warn of it where there are threads
def test_a_forked_process_waits_for_no_thread_that_is_not_there():
    inside, done = threading.Event(), threading.Event()

    def hold():
        with seeded_globally(0, "init"):
            inside.set()
            done.wait()

    def begin(code):
        signal.alarm(30)  # no orphan that waits for ever
        with seeded_globally(1, "init"):
            raise SystemExit(code)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    try:
        assert ended([forked(partial(begin, 7))]) == [7]
    finally:
        done.set()
        holder.join()
    with seeded_globally(2, "init"):  # by the thread whose turn it is
        assert ended([forked(partial(begin, 8))]) == [8]


class OnGpu:
    """A generator on a GPU, as far as its state is an object that generators can share."""

    def __init__(self, index, state):
        self.device, self.state = torch.device("cuda", index), state

    def graphsafe_get_state(self):
        return OnGpu(self.device.index, self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state


def test_on_a_gpu_the_state_itself_is_swapped(monkeypatch):
    """That of the GPU the own generator is on; a captured graph holds on to the state, whatever its value."""
    states = [object() for _ in range(3)]
    defaults = OnGpu(0, states[0]), OnGpu(1, states[1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", defaults)
    own = OnGpu(1, states[2])
    for _ in range(2):
        with swapped_globally({"cuda": own}):
            assert [each.state for each in (*defaults, own)] == [states[0], states[2], states[1]]
        assert [each.state for each in (*defaults, own)] == states
