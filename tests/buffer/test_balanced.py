"""The balanced reservoir against the ranking of the whole stream, and its uniformity within classes."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import holdfast as hf
from holdfast.buffer import BalancedReservoir, Reservoir
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners import LEARNERS, settings_for
from holdfast.testing import check_learner

from .test_reservoir import P_VALUE

FILLING = ["icarl", "gem"]
"""Methods that choose their samples themselves."""

REPLAYING = [name for name, learner in LEARNERS.items() if learner.needs_buffer and name not in FILLING]


def buffer(capacity: int, seed: int = 0) -> BalancedReservoir:
    return BalancedReservoir(capacity, generator=torch.Generator().manual_seed(seed))


def best(keys: list[float], labels: list[int], capacity: int) -> set[int]:
    """The numbers of the samples to store: the first of every class, then the second of every class, and so on."""
    places = {}
    for label in set(labels):
        members = sorted((number for number, each in enumerate(labels) if each == label), key=lambda n: keys[n])
        places |= {number: (rank, label) for rank, number in enumerate(members)}
    return set(sorted(places, key=places.get)[:capacity])


streams = st.lists(st.lists(st.sampled_from([0, 0, 0, 1, 1, 5, 9]), min_size=1, max_size=12), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(streams, st.integers(1, 15), st.integers(0, 99))
def test_what_is_stored_is_the_best_of_the_whole_stream(batches, capacity, seed):
    reservoir, twin = buffer(capacity, seed), torch.Generator().manual_seed(seed)
    keys, labels = [], []
    for batch in batches:
        numbers = torch.arange(len(labels), len(labels) + len(batch))
        keys += torch.rand(len(batch), dtype=torch.float64, generator=twin).tolist()
        labels += batch
        reservoir.add(numbers, torch.tensor(batch))
        stored = reservoir.contents()
        assert set(stored.x.tolist()) == best(keys, labels, capacity)
        assert stored.y.tolist() == [labels[number] for number in stored.x.tolist()]  # nothing is mixed up
        assert reservoir.stored == min(len(labels), capacity)
        assert reservoir.keys[: reservoir.stored].tolist() == [keys[number] for number in stored.x.tolist()]


@settings(max_examples=30, deadline=None)
@given(streams, st.integers(1, 15))
def test_shares_are_equal_unless_a_class_is_stored_whole(batches, capacity):
    reservoir, offered = buffer(capacity), Counter()
    for batch in batches:
        offered.update(batch)
        reservoir.add(torch.zeros(len(batch)), torch.tensor(batch))
    stored = Counter(reservoir.contents().y.tolist())
    most = max(stored.values())
    for label, count in offered.items():
        assert stored[label] == count or stored[label] >= most - 1


def test_a_class_that_comes_late_gets_its_share():
    reservoir = buffer(100)
    reservoir.add(torch.zeros(5000), torch.zeros(5000, dtype=torch.int64))
    reservoir.add(torch.zeros(60), torch.ones(60, dtype=torch.int64))
    assert Counter(reservoir.contents().y.tolist()) == {0: 50, 1: 50}


@pytest.mark.parametrize("size", [7, 60])
def test_every_sample_of_a_class_is_equally_likely(size):
    """Also those that came early, before other classes took room."""
    labels = torch.tensor([0] * 12 + [1] * 20 + [0] * 12 + [2] * 4 + [1, 0] * 6)
    trials, counts = 400, torch.zeros(len(labels))
    for seed in range(trials):
        reservoir = buffer(12, seed)
        for part in torch.split(torch.arange(len(labels)), size):
            reservoir.add(part, labels[part])
        counts[reservoir.contents().x] += 1
    for label in (0, 1):
        observed = counts[labels == label]
        assert observed.sum() == 4 * trials
        assert stats.chisquare(observed.numpy()).pvalue > P_VALUE
    assert (counts[labels == 2] == trials).all()


def test_it_continues_from_its_state():
    one, other = buffer(10), buffer(10, seed=5)
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 3, generator=draw), torch.randint(0, 4, (8,), generator=draw)) for _ in range(8)]
    for batch in batches[:4]:
        one.add(*batch)
    other.load_state_dict(one.state_dict())
    for batch in batches[4:]:
        one.add(*batch)
        other.add(*batch)
    for mine, theirs in zip(one.contents()[:2], other.contents()[:2], strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(one.sample(5).x, other.sample(5).x)


def test_what_it_refuses():
    with pytest.raises(UsageError, match="a balanced buffer is in memory"):
        BalancedReservoir(5, storage=Path("somewhere"))
    with pytest.raises(UsageError, match="a balanced buffer needs labels"):
        buffer(5).check(torch.zeros(3), torch.zeros(3))
    plain, balanced = Reservoir(5), buffer(5)
    for one, two in ((plain, balanced), (balanced, plain)):
        with pytest.raises(UsageError, match="balanced, the other is not"):
            one.load_state_dict(two.state_dict())
    with pytest.raises(UsageError, match="its keys do not fit its 5 slots"):
        balanced.load_state_dict({**balanced.state_dict(), "keys": torch.zeros(4)})


# --- as an option of learners ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", REPLAYING)
def test_every_replay_method_can_be_balanced(method):
    config = RunConfig(
        benchmark="testing",
        method="mse" if method == "consistency" else method,
        buffer_size=12,
        replay_size=6,
        lr=0.05,
        settings=(("balanced", True),),
    )
    assert "balanced" in settings_for(config)
    check_learner(LEARNERS[method], config)


@pytest.mark.parametrize("method", FILLING)
def test_methods_that_choose_samples_themselves_refuse_it(method):
    config = RunConfig.preset("seq-mnist", method, train_limit=50, settings=(("balanced", True),))
    with pytest.raises(UsageError, match="this method chooses its samples itself: leave out balanced"):
        hf.run(config, device="cpu")


def test_runs_say_whether_their_buffer_is_balanced():
    plain = RunConfig.preset("seq-mnist", "er", train_limit=200)
    config = plain.parse(["balanced=true"], settings_for(plain))
    assert config.settings == (("balanced", True),)
    assert config.fingerprint != plain.fingerprint
    assert plain.parse(["balanced=false"], settings_for(plain)) == plain  # it is the default
    assert config.parse(["balanced=false"], settings_for(plain)).settings == (("balanced", False),)
    found = hf.run(config, device="cpu")
    assert any(
        not torch.equal(tensor, hf.run(plain, device="cpu").weights[name]) for name, tensor in found.weights.items()
    )
    assert "balanced" not in settings_for(RunConfig.preset("seq-mnist", "sgd"))
