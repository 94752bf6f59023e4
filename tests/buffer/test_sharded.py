"""One reservoir over several ranks. Functions that begin with `_` run on every rank.

The oracle is the ordinary reservoir, which test_reservoir.py holds to the sequential rule.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from holdfast.buffer import Reservoir, ShardedReservoir, sharded
from holdfast.buffer.layout import Column
from holdfast.buffer.packing import pack, unpack
from holdfast.buffer.reservoir import LARGE
from holdfast.errors import UsageError
from holdfast.ranks import Ranks
from holdfast.rng import generator
from test_ranks import failure

from .test_reservoir import P_VALUE, numbered, numbers

# --- samples as bytes ------------------------------------------------------------------------------------------------

TYPES = [torch.uint8, torch.bool, torch.int64, torch.float32, torch.bfloat16, torch.float64, torch.complex64]
columns = st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=4)


@given(st.integers(0, 4), columns)
@settings(max_examples=200, deadline=None)
def test_any_parts_come_back_from_bytes_as_they_were(rows, forms):
    draw = generator(0, "parts")
    parts = [(200 * torch.rand(rows, *shape, generator=draw)).to(dtype) for dtype, shape in forms]
    packed = pack(parts)
    assert packed.dtype == torch.uint8
    assert packed.nbytes == sum(part.nbytes for part in parts)
    for part, again in zip(parts, unpack(packed, [Column(part.shape[1:], part.dtype) for part in parts]), strict=True):
        assert again.dtype == part.dtype
        assert torch.equal(again, part)


def test_parts_that_are_views_are_packed_by_value():
    x = torch.arange(12).view(3, 4)
    (again,) = unpack(pack([x.T]), [Column((3,), x.dtype)])
    assert torch.equal(again, x.T)


# --- the same contents, draws and future as one reservoir ------------------------------------------------------------


def _offered(capacity, seed, steps, state=None):
    """Numbered samples offered by all ranks, and draws between; contents and draws of this rank."""
    ranks = Ranks()
    buffer = ShardedReservoir(capacity, ranks=ranks, generator=generator(seed, "buffer"))
    if state is not None:
        buffer.load_state_dict(state)
    draws = []
    for sizes, wanted in steps:
        start = buffer.offered + sum(sizes[: ranks.rank])
        buffer.add(*numbered(torch.arange(start, start + sizes[ranks.rank])))
        if wanted and buffer.stored:
            draws.append(numbers(buffer.sample(wanted[ranks.rank])))
    assert buffer.offered == buffer.seen.item()
    return numbers(buffer.contents()) if buffer.stored else [], draws, buffer.state_dict()


def _ordinary(capacity, seed, steps, state=None):
    """The same by one ordinary reservoir, which draws what all ranks draw together, as far as it has it."""
    buffer = Reservoir(capacity, generator=generator(seed, "buffer"))
    if state is not None:
        buffer.load_state_dict(state)
    draws = []
    for sizes, wanted in steps:
        start = buffer.offered
        buffer.add(*numbered(torch.arange(start, start + sum(sizes))))
        if wanted and buffer.stored:
            draws.append(numbers(buffer.sample(sum(min(n, buffer.stored) for n in wanted))))
    return numbers(buffer.contents()) if buffer.stored else [], draws, buffer.state_dict()


def assert_same_state(one, other):
    assert {name: one[name] for name in ("capacity", "offered")} == {
        name: other[name] for name in ("capacity", "offered")
    }
    assert torch.equal(one["generator"], other["generator"])
    assert torch.equal(one["seen"], other["seen"])
    for mine, theirs in zip(one["columns"], other["columns"], strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def assert_equals_one_process(crew, world, capacity, seed, steps, state=None):
    contents, draws, after = _ordinary(capacity, seed, steps, state)
    answers = crew.run(world, _offered, capacity, seed, steps, state)
    for rank, (own_contents, own_draws, own_after) in enumerate(answers):
        assert own_contents == contents
        assert_same_state(own_after, after)
        for drawn in own_draws:
            assert len(drawn) == len(set(drawn)), f"rank {rank} drew a sample twice"
    for step, drawn in enumerate(draws):
        dealt = [number for _, own_draws, _ in answers for number in own_draws[step]]
        assert dealt == [drawn[i % len(drawn)] for i in range(len(dealt))]
    return after


sizes = st.integers(1, 4).flatmap(
    lambda world: st.tuples(
        st.just(world),
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 6), min_size=world, max_size=world),
                st.none() | st.lists(st.integers(1, 9), min_size=world, max_size=world),
            ),
            min_size=1,
            max_size=5,
        ),
    )
)


@given(sizes, st.integers(1, 15), st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_the_ranks_together_are_one_ordinary_reservoir(crew, job, capacity, seed):
    """Contents in every slot, draws in order, and the state that decides the future, for any sizes on any rank."""
    world, steps = job
    assert_equals_one_process(crew, world, capacity, seed, steps)


@pytest.mark.parametrize("world", [2, 4])
def test_a_long_stream_on_equal_ranks(crew, world):
    assert_equals_one_process(crew, world, 50, 1, [([8] * world, [6] * world)] * 60)


def _many(size, steps):
    """A buffer large enough to be drawn from in another way: draws of this rank, and contents."""
    buffer = ShardedReservoir(LARGE + 100, generator=generator(0, "buffer"))
    draws = []
    for step in range(steps):
        start = buffer.offered + buffer.ranks.rank * (size if step else LARGE // 2)
        ids = torch.arange(start, start + (size if step else LARGE // 2))
        buffer.add(ids, ids)
        draws.append(buffer.sample(size).y.tolist())
    return draws, buffer.contents().y


def test_a_large_buffer_is_that_of_one_process(crew):
    size, steps = 40, 5
    whole, draws = Reservoir(LARGE + 100, generator=generator(0, "buffer")), []
    for step in range(steps):
        ids = torch.arange(whole.offered, whole.offered + (2 * size if step else LARGE))
        whole.add(ids, ids)
        draws.append(whole.sample(2 * size).y.tolist())
    one, other = crew.run(2, _many, size, steps)
    assert [mine + theirs for mine, theirs in zip(one[0], other[0], strict=True)] == draws
    assert torch.equal(one[1], whole.contents().y)
    assert torch.equal(other[1], whole.contents().y)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1), (1, 4), (2, 2)])
def test_a_state_continues_on_another_number_of_ranks(crew, before, after):
    """The second half of a stream, offered by other ranks, ends where one process ends that never stopped."""
    per_step = 8
    first, second = ([([per_step // world] * world, [3] * world)] * 10 for world in (before, after))
    state = crew.run(before, _offered, 20, 3, first)[-1][2]
    assert_same_state(state, _ordinary(20, 3, first)[2])
    assert_equals_one_process(crew, after, 20, 99, second, state)


def test_an_ordinary_reservoir_continues_what_ranks_began(crew):
    steps = [([4, 4], [3, 3])] * 10
    _, _, state = crew.run(2, _offered, 20, 3, steps)[0]
    continued, whole = _ordinary(20, 99, steps, state), _ordinary(20, 3, steps + steps)
    assert continued[0] == whole[0]
    assert_same_state(continued[2], whole[2])


def _empty_state():
    return ShardedReservoir(7).state_dict()


def test_the_state_of_an_empty_buffer_is_that_of_an_empty_buffer(crew):
    for state in crew.run(2, _empty_state):
        assert_same_state(state, Reservoir(7).state_dict())
    assert_equals_one_process(crew, 2, 7, 5, [([3, 3], None)], state)


def _gathered_in_pieces():
    buffer = ShardedReservoir(20, generator=generator(0, "buffer"))
    buffer.add(*numbered(torch.arange(15)))
    sharded.CHUNK = 100  # a sample has 3 + 8 + 24 bytes
    try:
        return numbers(buffer.contents())
    finally:
        sharded.CHUNK = 2**26


def test_contents_gathered_in_pieces_are_whole(crew):
    whole = Reservoir(20, generator=generator(0, "buffer"))
    whole.add(*numbered(torch.arange(15).repeat(2)))  # both ranks offer 0..14
    assert crew.run(2, _gathered_in_pieces) == [numbers(whole.contents())] * 2


# --- where samples are -----------------------------------------------------------------------------------------------


def _shard(capacity, size):
    buffer = ShardedReservoir(capacity)
    start = buffer.ranks.rank * size
    buffer.add(*numbered(torch.arange(start, start + size)))
    rows = buffer._storage.columns[1][:-1]  # but the spare one
    return rows.tolist(), buffer.stored


def test_the_capacity_is_counted_once_and_spread_evenly(crew):
    answers = crew.run(4, _shard, 10, 8)
    assert [stored for _, stored in answers] == [10] * 4
    assert [len(rows) for rows, _ in answers] == [3, 3, 2, 2]
    kept = [number for rows, _ in answers for number in rows]
    assert len(set(kept)) == 10
    assert set(kept) <= set(range(32))


def test_more_ranks_than_slots(crew):
    assert_equals_one_process(crew, 4, 2, 0, [([3] * 4, [2] * 4)] * 5)


# --- statistics ------------------------------------------------------------------------------------------------------


def _survivors(capacity, batches, repetitions):
    """What is left of each of many streams of `batches`, which are shared evenly between the ranks."""
    ranks, draw, kept = Ranks(), generator(7, "buffer"), Counter()
    for _ in range(repetitions):
        buffer = ShardedReservoir(capacity, ranks=ranks, generator=draw)
        for ids in torch.arange(sum(batches)).split(batches):
            own = ids.tensor_split(ranks.size)[ranks.rank]
            buffer.add(own, own)
        kept.update(buffer.contents().y.tolist())
    return kept


@pytest.mark.parametrize(
    ("world", "capacity", "batches"), [(2, 5, [9] * 3), pytest.param(4, 6, [8, 8, 14], marks=pytest.mark.slow)]
)
def test_every_sample_of_the_whole_stream_is_kept_equally_often(crew, world, capacity, batches):
    repetitions, length = 100, sum(batches)
    kept, *others = crew.run(world, _survivors, capacity, batches, repetitions)
    assert all(other == kept for other in others)
    assert kept.total() == repetitions * capacity
    observed = torch.tensor([kept[position] for position in range(length)], dtype=torch.float64)
    share = capacity / length
    # The samples of one stream compete for slots, so the counts' variance is n/(n - 1) times the binomial one.
    variance = repetitions * share * (1 - share) * length / (length - 1)
    statistic = ((observed - repetitions * share) ** 2).sum() / variance
    assert P_VALUE < stats.chi2.sf(float(statistic), length - 1) < 1 - P_VALUE


def _drawn(n, repetitions):
    buffer = ShardedReservoir(12, generator=generator(5, "buffer"))
    buffer.add(*numbered(torch.arange(8 * buffer.ranks.rank, 8 * buffer.ranks.rank + 8)))
    return [numbers(buffer.sample(n)) for _ in range(repetitions)], numbers(buffer.contents())


@pytest.mark.parametrize(("world", "n"), [(2, 4), (4, 5)])
def test_each_ranks_draws_are_uniform_over_all_shards(crew, world, n):
    """In every position of every rank's draw; with n = 5 the four ranks want more than the 12 there are."""
    repetitions = 120
    answers = crew.run(world, _drawn, n, repetitions)
    for draws, kept in answers:
        for position in range(n):
            counts = Counter(drawn[position] for drawn in draws)
            assert stats.chisquare([counts[number] for number in kept]).pvalue > P_VALUE
    for step in range(repetitions):
        together = Counter(number for draws, _ in answers for number in draws[step])
        often = [together[number] for number in answers[0][1]]
        assert max(often) - min(often) <= 1, "some samples are drawn more often than others by more than one"


# --- what does not fit together --------------------------------------------------------------------------------------


def _made(capacities, seeds):
    rank = Ranks().rank
    return failure(lambda: ShardedReservoir(capacities[rank], generator=generator(seeds[rank], "buffer")))


@pytest.mark.parametrize(
    ("capacities", "seeds", "message"),
    [
        ([5, 6], [0, 0], "rank 0: a buffer of 5 samples"),
        ([5, 5], [0, 1], "rank 1: a buffer of 5 samples, random state"),
    ],
)
def test_ranks_with_other_sizes_or_seeds_are_refused_on_every_rank(crew, capacities, seeds, message):
    one, other = crew.run(2, _made, capacities, seeds)
    assert one == other
    assert one[0] == "UsageError"
    assert message in one[1]


def test_a_size_that_is_wrong_on_one_rank_is_refused_on_every_rank(crew):
    one, other = crew.run(2, _made, [5, 0], [0, 0])
    assert one == ("UsageError", "rank 1 failed: buffer size must be at least 1, not 0.")
    assert other == ("UsageError", "buffer size must be at least 1, not 0.")


def _refused(first, then):
    """What comes of `then` on each rank after `first` was added by all; and whether anything was changed by it."""
    buffer = ShardedReservoir(5, generator=generator(0, "buffer"))
    rank = buffer.ranks.rank
    if first is not None:
        buffer.add(*first)
    before = buffer.state_dict()
    error = failure(lambda: then[rank](buffer))
    after = buffer.state_dict()
    assert_same_state(before, after)
    buffer.add(*numbered(torch.arange(3)))
    return error, buffer.offered


class Add:
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, buffer):
        buffer.add(*self.parts)


class Sample:
    def __init__(self, n):
        self.n = n

    def __call__(self, buffer):
        buffer.sample(self.n)


class Contents:
    def __call__(self, buffer):
        buffer.contents()


WELL = numbered(torch.arange(2))


@pytest.mark.parametrize(
    ("first", "then", "messages"),
    [
        (None, [Add(*WELL), Add(WELL[0].int(), *WELL[1:])], ["bring: rank 0: samples of x (3, 1) uint8"] * 2),
        (None, [Add(*WELL), Add(*WELL[:2])], ["what they bring"] * 2),
        (WELL, [Add(*WELL), Add(*WELL[:2])], ["rank 1 failed: logits must be given", "logits must be given"]),
        (WELL, [Add(*WELL), Add(WELL[0][:1], *WELL[1:])], ["rank 1 failed: x, y, logits must", "one row per sample"]),
        (WELL, [Add(WELL[0].float(), *WELL[1:])] * 2, ["x is (3, 1) float32, stored is (3, 1) uint8"] * 2),
        (WELL, [Sample(2), Sample(0)], ["rank 1 failed: at least 1 sample", "at least 1 sample"]),
        (WELL, [Sample(2), Add(*WELL)], ["what they do: rank 0: draw samples; rank 1: add samples"] * 2),
        (None, [Sample(2), Sample(2)], ["the buffer is empty"] * 2),
        (None, [Contents(), Contents()], ["the buffer is empty"] * 2),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(crew, first, then, messages):
    for (error, offered), message in zip(crew.run(2, _refused, first, then), messages, strict=True):
        assert error[0] == "UsageError"
        assert message in error[1]
        assert offered == 6 + (0 if first is None else 4)


def _loaded(states):
    buffer = ShardedReservoir(5, generator=generator(0, "buffer"))
    buffer.add(*numbered(torch.arange(4)))
    before = buffer.state_dict()
    error = failure(lambda: buffer.load_state_dict(states[buffer.ranks.rank]))
    assert_same_state(before, buffer.state_dict())
    return error


def test_states_that_do_not_fit_are_refused_on_every_rank_and_change_nothing(crew):
    good, other, larger = (_ordinary(capacity, seed, [([4], None)])[2] for capacity, seed in ((5, 1), (5, 2), (6, 1)))
    one, two = crew.run(2, _loaded, [good, other])
    assert one == two
    assert "what they bring: rank 0: 4 samples offered" in one[1]
    one, two = crew.run(2, _loaded, [good, larger])
    assert two[1].startswith("the saved buffer has 6 slots, this one 5")
    assert one[1] == f"rank 1 failed: {two[1]}"
    broken = {**good, "generator": good["generator"][:16]}
    one, two = crew.run(2, _loaded, [broken, good])
    assert "the saved random state is not one of a generator" in one[1]
    assert "rank 0 failed" in two[1]


# --- one rank, in this process ---------------------------------------------------------------------------------------


def test_without_a_process_group_it_says_how_to_get_one():
    with pytest.raises(UsageError, match="start the program with torchrun"):
        ShardedReservoir(5)


def test_a_job_of_one_rank_is_an_ordinary_reservoir(alone):
    steps = [([size], [4]) for size in (3, 0, 9, 12)]
    (contents, draws, after), expected = _offered(7, 0, steps), _ordinary(7, 0, steps)
    assert (contents, draws) == expected[:2]
    assert_same_state(after, expected[2])
    again = _offered(7, 1, steps, after)
    assert_same_state(again[2], _ordinary(7, 1, steps, after)[2])


def test_fields_of_other_kinds_of_states_are_left_alone(alone):
    buffer, state = ShardedReservoir(7), _ordinary(7, 0, [([5], None)])[2]
    buffer.load_state_dict({**state, "rows": "x", "stamps": None, "lengths": 3})
    assert numbers(buffer.contents()) == list(range(5))


def test_samples_without_logits_and_draws_that_are_copies(alone):
    buffer = ShardedReservoir(5)
    x = torch.ones(3, 2, requires_grad=True)
    buffer.add(x, torch.arange(3))
    draw = buffer.sample(3)
    assert draw.logits is None
    assert not draw.x.requires_grad
    draw.x.zero_()
    assert buffer.contents().x.min() == 1


def _nested(storage):
    buffer = ShardedReservoir(6, generator=generator(0, "buffer"), storage=storage)
    x = torch.arange(4) + 4 * buffer.ranks.rank
    for _ in range(5):
        buffer.add({"left": x, "right": (x * 2.0,)}, x)
    return buffer.sample(3), buffer.contents()


@pytest.mark.parametrize("storage", ["device", "host"])
def test_samples_made_of_several_tensors(crew, storage):
    whole = Reservoir(6, generator=generator(0, "buffer"))
    x = torch.arange(8)
    for _ in range(5):
        whole.add({"left": x, "right": (x * 2.0,)}, x)
    drawn = whole.sample(6)
    (one, contents), (two, _) = crew.run(2, _nested, storage)
    assert torch.equal(torch.cat([one.x["left"], two.x["left"]]), drawn.x["left"])
    assert torch.equal(torch.cat([one.x["right"][0], two.x["right"][0]]), drawn.x["right"][0])
    assert torch.equal(contents.x["right"][0], whole.contents().x["right"][0])


def test_a_folder_is_refused(alone, tmp_path):
    with pytest.raises(UsageError, match="is in memory: give storage='device' or 'host', no folder"):
        ShardedReservoir(5, storage=tmp_path)


def test_the_generator_is_on_the_cpu(alone):
    class Elsewhere(torch.Generator):
        device = torch.device("meta")

    with pytest.raises(UsageError, match="share a generator on the CPU, not one on meta"):
        ShardedReservoir(5, generator=Elsewhere())
