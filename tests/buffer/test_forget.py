"""Which samples a buffer holds after some were forgotten, and under other policies than the reservoir's."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from holdfast.buffer import BalancedReservoir, Reservoir, ShardedReservoir, window
from holdfast.errors import UsageError
from holdfast.ranks import Ranks
from holdfast.rng import generator

from .test_reservoir import P_VALUE, numbered, numbers

POLICIES = ["reservoir", "window", "decay", "decay:40"]


def filled(capacity, batches, policy="reservoir", seed=0, **options):
    buffer = Reservoir(capacity, generator=generator(seed, "buffer"), policy=policy, **options)
    add(buffer, 0, batches)
    return buffer


def add(buffer, start, batches):
    for size in batches:
        buffer.add(*numbered(torch.arange(start, start + size)))
        start += size


# --- policies --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 15))
@settings(max_examples=100, deadline=None)
def test_a_window_holds_the_last_samples(batches, capacity):
    buffer, total = filled(capacity, batches, "window"), sum(batches)
    assert buffer.stored == min(total, capacity)
    assert not total or sorted(numbers(buffer.contents())) == list(range(max(0, total - capacity), total))


def test_a_window_reads_nothing_from_the_device():
    uniforms, seen = torch.zeros(4, dtype=torch.float64), torch.tensor(2)
    assert window(uniforms, seen, 3).tolist() == [3, 0, 1, 2]
    assert window(uniforms[:0], seen, 3).tolist() == []


@pytest.mark.parametrize(("policy", "horizon"), [("decay", 5), ("decay:12", 12)])
@pytest.mark.parametrize("batches", [[40], [7, 3, 30]])
def test_a_decaying_reservoir_forgets_exponentially(policy, horizon, batches):
    """A sample that came when all slots were taken is stored at first with capacity / reach, then survives each other
    one with 1 - 1 / reach, where reach counts the samples up to the horizon."""
    capacity, repetitions, length = 5, 300, sum(batches)
    draw, stored = generator(3, "buffer"), Counter()
    for _ in range(repetitions):
        buffer = Reservoir(capacity, generator=draw, policy=policy)
        for ids in torch.arange(length).split(batches):
            buffer.add(ids, ids)
        stored.update(buffer.contents().y.tolist())
    reach = [min(n + 1, horizon) for n in range(length)]
    for n in range(length):
        chance = min(1.0, capacity / reach[n]) if n >= capacity else 1.0
        for later in range(max(n + 1, capacity), length):
            chance *= 1 - 1 / reach[later]
        assert stats.binomtest(stored[n], repetitions, min(chance, 1.0)).pvalue > P_VALUE / length, n


def test_until_the_horizon_it_is_a_reservoir():
    one, other = (filled(6, [10, 25], policy) for policy in ("reservoir", "decay:35"))
    assert numbers(one.contents()) == numbers(other.contents())


@pytest.mark.parametrize("policy", ["lifo", "window:5", "decay:4", "decay:many", "decay:-9"])
def test_policies_that_make_no_sense(policy):
    with pytest.raises(UsageError, match=r"buffer policy|horizon"):
        Reservoir(5, policy=policy)


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_a_saved_buffer_knows_its_policy(place, tmp_path):
    storage = {"storage": tmp_path / "folder"} if place == "folder" else {}
    for policy in POLICIES[1:]:
        buffer = filled(5, [20], policy, **({"storage": tmp_path / policy.replace(":", "")} if storage else {}))
        state = buffer.state_dict()
        with pytest.raises(UsageError, match=f"has the policy '{policy}', this one 'reservoir'"):
            Reservoir(5).load_state_dict(state)
        with pytest.raises(UsageError, match="has the policy 'reservoir'"):
            buffer.load_state_dict(filled(5, [3]).state_dict())
        if storage:
            path = buffer._storage.path
            buffer.commit()
            buffer.close()
            with pytest.raises(UsageError, match="has the policy"):
                Reservoir(5, storage=path)
            buffer = Reservoir(5, storage=path, policy=policy)
        twin = Reservoir(5, policy=policy) if not storage else buffer
        twin.load_state_dict(state)
        assert numbers(twin.contents()) == numbers(buffer.contents())


# --- forgetting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "capacity", "before", "after"),
    [
        ("reservoir", 6, [10, 10], [4, 6]),
        ("reservoir", 6, [20], [10]),
        ("reservoir", 20, [15], [15]),  # nothing was let go yet when some are forgotten
        ("reservoir", 6, [7], [20, 3]),
        ("decay:9", 6, [20], [5, 5]),
    ],
)
def test_what_is_left_is_a_sample_of_the_rest_of_the_stream(policy, capacity, before, after):
    """Every third sample is forgotten; the others are stored as often as in a stream in which none is forgotten.

    Where nothing was let go before, as often as in a stream that never had those samples.
    """
    repetitions, seen, length = 400, sum(before), sum(before) + sum(after)
    draw, twin = generator(11, "buffer"), generator(12, "buffer")
    found, expected = Counter(), Counter()
    for _ in range(repetitions):
        buffer, plain = (Reservoir(capacity, generator=each, policy=policy) for each in (draw, twin))
        for ids in torch.arange(seen).split(before):
            buffer.add(ids, ids)
        buffer.forget(lambda stored: stored.y % 3 == 0)
        rest = torch.arange(seen)
        plain.add(*2 * [rest[rest % 3 > 0] if seen <= capacity else rest])
        for ids in torch.arange(seen, length).split(after):
            buffer.add(ids, ids)
            plain.add(ids, ids)
        found.update(buffer.contents().y.tolist())
        expected.update(plain.contents().y.tolist())
    assert not any(found[n] for n in range(0, seen, 3))
    left = [n for n in range(length) if n >= seen or n % 3]
    table = [[each[n], repetitions - each[n]] for n in left for each in (found, expected)]
    for n, pair in zip(left, zip(table[::2], table[1::2], strict=True), strict=True):
        assert stats.fisher_exact(pair).pvalue > P_VALUE / len(left), n
    if policy == "reservoir":  # all that are left are equally likely
        counts = [found[n] for n in left]
        share = sum(counts) / len(counts) / repetitions
        statistic = sum((count - sum(counts) / len(counts)) ** 2 for count in counts) / (
            repetitions * share * (1 - share)
        )
        assert P_VALUE < stats.chi2.sf(statistic, len(counts) - 1) < 1 - P_VALUE


@pytest.mark.parametrize("batches", [[3], [5], [5, 4], [23]])
@given(marked=st.sets(st.integers(0, 22)), more=st.lists(st.integers(1, 7), max_size=4))
@settings(max_examples=30, deadline=None)
def test_a_window_of_the_rest(batches, marked, more):
    """As if the forgotten samples had never come, in the window of that moment."""
    buffer, seen = filled(5, batches, "window"), sum(batches)
    buffer.forget(torch.tensor([n in marked for n in buffer.contents().y.tolist()]))
    left = [n for n in range(max(0, seen - 5), seen) if n not in marked]
    add(buffer, 100, more)
    expected = (left + list(range(100, 100 + sum(more))))[-5:]
    assert buffer.stored == len(expected)
    assert not expected or sorted(numbers(buffer.contents())) == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("storage", ["device", "folder"])
@given(st.data())
@settings(max_examples=10, deadline=None)
def test_counts_stay_right_and_samples_whole(policy, storage, data):
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "buffer" if storage == "folder" else storage
        buffer, start = Reservoir(6, generator=generator(1, "buffer"), policy=policy, storage=place), 0
        for _ in range(data.draw(st.integers(1, 6))):
            size = data.draw(st.integers(1, 9))
            add(buffer, start, [size])
            start += size
            before = numbers(buffer.contents())
            marked = data.draw(st.sets(st.sampled_from(before)))
            mask = torch.tensor([n in marked for n in before])
            assert buffer.forget(mask) == len(marked)
            assert buffer.stored == len(buffer) == len(before) - len(marked)
            assert buffer.offered == buffer.seen.item()
            if buffer.stored:
                assert sorted(numbers(buffer.contents())) == sorted(set(before) - marked)
                assert set(numbers(buffer.sample(4))) <= set(before) - marked
            twin = Reservoir(6, generator=generator(2, "buffer"), policy=policy)
            if storage == "device":
                twin.load_state_dict(buffer.state_dict())
                assert twin.stored == buffer.stored
                add(twin, start, [8])
                add(buffer, start, [8])
                assert numbers(twin.contents()) == numbers(buffer.contents())
                start += 8
        buffer.close()


def _forgotten(policy, rest):
    """On every rank: two minibatches, the even samples forgotten, another minibatch."""
    ranks = Ranks()
    buffer = ShardedReservoir(7, ranks=ranks, generator=generator(0, "buffer"), policy=policy)
    for start in (0, 20):
        own = start + 10 * ranks.rank
        buffer.add(*numbered(torch.arange(own, own + 10)))
    count = buffer.forget(lambda stored: stored.y % 2 == 0)
    buffer.add(*numbered(torch.arange(40 + rest * ranks.rank, 40 + rest * (1 + ranks.rank))))
    return count, numbers(buffer.contents()), buffer.stored


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_forget_what_one_process_forgets(crew, policy):
    buffer = filled(7, [20, 20], policy)
    count = buffer.forget(lambda stored: stored.y % 2 == 0)
    add(buffer, 40, [30])
    expected = count, numbers(buffer.contents()), buffer.stored
    assert crew.run(2, _forgotten, policy, 15) == [expected] * 2


def test_a_balanced_buffer_fills_up_at_once():
    buffer = BalancedReservoir(6, generator=generator(0, "buffer"))
    for start in (0, 20):
        ids = torch.arange(start, start + 20)
        buffer.add(ids.float(), ids % 3)
    kept = [n for n in buffer.contents().x.tolist() if n % 3]
    assert buffer.forget(lambda stored: stored.y == 0) == 2
    assert buffer.contents().x.tolist() == kept
    buffer.add(torch.tensor([40.0]), torch.tensor([1]))
    assert buffer.contents().x.tolist() == [*kept, 40]
    ids = torch.arange(41, 60)
    buffer.add(ids.float(), ids % 3)
    assert sorted(buffer.contents().y.tolist()) == [0, 0, 1, 1, 2, 2]
    buffer.forget_all()
    assert buffer.stored == 0
    buffer.add(torch.arange(3.0), torch.arange(3))
    assert buffer.contents().y.tolist() == [0, 1, 2]


def test_refilling_a_buffer_with_empty_slots():
    buffer = filled(6, [30])
    buffer.forget(torch.tensor([True, False] * 3))
    buffer.replace(*numbered([1, 2, 3, 4]))
    assert numbers(buffer.contents()) == [1, 2, 3, 4]


def test_a_folder_is_found_as_it_was_saved(tmp_path):
    buffer = filled(6, [30], storage=tmp_path / "folder")
    buffer.commit()
    whole = numbers(buffer.contents())
    buffer.forget(lambda stored: stored.y % 2 == 0)
    buffer.close()
    buffer = Reservoir(6, storage=tmp_path / "folder", generator=generator(0, "buffer"))
    assert numbers(buffer.contents()) == whole  # not saved, so not forgotten
    buffer.forget(lambda stored: stored.y % 2 == 0)
    odd = numbers(buffer.contents())
    buffer.commit()
    buffer.close()
    buffer = Reservoir(6, storage=tmp_path / "folder", generator=generator(0, "buffer"))
    assert numbers(buffer.contents()) == odd == [n for n in whole if n % 2]
    assert buffer.offered == 30
    buffer.forget_all()
    buffer.commit()
    buffer.close()
    buffer = Reservoir(6, storage=tmp_path / "folder")
    assert (buffer.stored, buffer.offered) == (0, 0)


def test_after_forgetting_everything_samples_of_another_form_are_welcome():
    buffer = filled(4, [9])
    buffer.forget_all()
    assert (buffer.stored, buffer.offered, buffer.seen.item()) == (0, 0, 0)
    buffer.forget_all()
    assert buffer.forget(lambda stored: stored.y > 0) == 0
    buffer.add(torch.arange(6.0), {"label": torch.arange(6)})
    assert buffer.stored == 4
    assert buffer.forget(torch.ones(4, dtype=torch.bool)) == 4
    assert (buffer.stored, buffer.offered) == (0, 0)


@pytest.mark.parametrize("mask", [torch.zeros(3, dtype=torch.bool), torch.zeros(4), [True] * 4])
def test_a_mask_has_a_bool_for_every_sample(mask):
    buffer = filled(4, [9])
    with pytest.raises(UsageError, match="a bool for each of the 4 stored samples"):
        buffer.forget(mask)
    assert buffer.stored == 4


def test_a_state_with_too_few_samples_is_refused():
    state = filled(4, [9]).state_dict()
    for stored in (0, 3, 5, -1):
        with pytest.raises(UsageError, match="contradicts itself"):
            Reservoir(4).load_state_dict({**state, "stored": stored})
