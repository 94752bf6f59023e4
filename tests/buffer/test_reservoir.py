from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from holdfast.buffer import Reservoir, distinct, place, reservoir
from holdfast.buffer.reservoir import LARGE
from holdfast.errors import UsageError
from holdfast.rng import generator

P_VALUE = 1e-4
"""Seeds are fixed, so a test that passes goes on passing; one in 10,000 right programs would fail at first."""


def sequential(uniforms, seen, capacity):
    """The protocol's rule as a plain loop: {slot: index of the sample that is in it in the end}."""
    slots = {}
    for index, uniform in enumerate(uniforms):
        n = seen + index
        slot = n if n < capacity else int(uniform * (n + 1))
        if slot < capacity:
            slots[slot] = index
    return slots


def placed(uniforms, seen, capacity):
    """The same from `place`."""
    slots = place(torch.tensor(uniforms, dtype=torch.float64), torch.tensor(seen), capacity)
    assert slots.shape == (len(uniforms),)
    assert slots.dtype == torch.int64
    kept = [(slot, index) for index, slot in enumerate(slots.tolist()) if slot != capacity]
    assert len(kept) == len(dict(kept)), "two samples in one slot"
    return dict(kept)


def numbered(ids, classes=3):
    """Samples that tell their number in all three parts."""
    ids = torch.as_tensor(ids)
    x = torch.stack([ids % 256, ids // 256 % 256, ids // 65536], dim=1).to(torch.uint8).view(-1, 3, 1)
    return x, ids.clone(), ids[:, None].double() + torch.arange(classes) / 10


def numbers(draw):
    """The samples' numbers; each part of a sample must tell the same one."""
    x = draw.x.view(-1, 3).long() @ torch.tensor([1, 256, 65536])
    assert torch.equal(x, draw.y), "image and label of different samples in one slot"
    assert torch.equal(draw.logits, numbered(draw.y, draw.logits.shape[1])[2]), "label and logits of different samples"
    return draw.y.tolist()


def filled(capacity, batches, seed=0):
    buffer = Reservoir(capacity, generator=generator(seed, "buffer"))
    start = 0
    for size in batches:
        buffer.add(*numbered(torch.arange(start, start + size)))
        start += size
    return buffer


# --- place -----------------------------------------------------------------------------------------------------------

uniform = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53])


@given(st.lists(uniform, min_size=0, max_size=40), st.integers(0, 60) | st.integers(0, 2**40), st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_place_is_the_sequential_rule_slot_for_slot(uniforms, seen, capacity):
    assert placed(uniforms, seen, capacity) == sequential(uniforms, seen, capacity)


@pytest.mark.parametrize("capacity", [1, 2, 7])
@pytest.mark.parametrize("seen", [0, 1, 6, 7, 8, 100])
@pytest.mark.parametrize("size", [1, 5, 20])
def test_place_on_random_uniforms(capacity, seen, size):
    draw = generator(capacity * 1000 + seen, "uniforms")
    for _ in range(20):
        uniforms = torch.rand(size, generator=draw, dtype=torch.float64).tolist()
        assert placed(uniforms, seen, capacity) == sequential(uniforms, seen, capacity)


def test_place_lets_the_later_sample_win():
    # n = 2, 3, 4 with slots int(u * (n + 1)): 1, 1, 0
    assert place(torch.tensor([0.4, 0.3, 0.1], dtype=torch.float64), torch.tensor(2), 2).tolist() == [2, 1, 0]


def test_place_lets_a_replaced_newcomer_go_within_the_first_batch():
    # n = 0 and 1 fill the slots; n = 2 with j = 0 replaces the first comer of the same batch.
    assert place(torch.tensor([0.9, 0.9, 0.1], dtype=torch.float64), torch.tensor(0), 2).tolist() == [2, 1, 0]


@given(
    st.lists(uniform | st.sampled_from([0.0, 0.25, 0.25 + 1e-6]), max_size=40),
    st.integers(-20, 20) | st.integers(0, 2**40),
    st.integers(LARGE + 1, 2**40),
)
@settings(max_examples=300, deadline=None)
def test_place_in_many_slots_is_the_same_rule(uniforms, after, capacity):
    """Of so many that something for each of them would not fit into memory."""
    seen = max(0, capacity + after)
    assert placed(uniforms, seen, capacity) == sequential(uniforms, seen, capacity)


def test_place_keeps_its_inputs():
    uniforms, seen = torch.rand(5, dtype=torch.float64), torch.tensor(3)
    before = uniforms.clone()
    place(uniforms, seen, 2)
    assert torch.equal(uniforms, before)
    assert seen == 3


# --- what is kept ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 15), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_the_buffer_holds_what_the_sequential_rule_says_whole(batches, capacity, seed):
    """Same uniforms, a plain list of slots; every slot's three parts come from one sample."""
    twin = generator(seed, "buffer")
    slots, start = {}, 0
    for size in batches:
        uniforms = torch.rand(size, dtype=torch.float64, generator=twin).tolist()
        slots |= {slot: start + index for slot, index in sequential(uniforms, start, capacity).items()}
        start += size
    buffer = filled(capacity, batches, seed)
    assert not slots or numbers(buffer.contents()) == [slots[slot] for slot in range(len(slots))]
    assert buffer.stored == len(slots) == min(start, capacity)
    assert buffer.offered == buffer.seen.item() == start


def test_until_it_is_full_it_keeps_everything_in_order():
    assert numbers(filled(10, [4, 3]).contents()) == list(range(7))
    assert numbers(filled(10, [4, 3, 3]).contents()) == list(range(10))


@pytest.mark.parametrize(("capacity", "batches"), [(5, [40]), (5, [8] * 5), (5, [1] * 15), (1, [7, 33]), (8, [3] * 10)])
def test_every_position_of_the_stream_is_kept_equally_often(capacity, batches):
    """Inclusion counts over many streams: chi-square against capacity/n each, neither too far nor too near."""
    repetitions, length = 600, sum(batches)
    draw, kept = generator(7, "buffer"), Counter()
    for _ in range(repetitions):
        buffer = Reservoir(capacity, generator=draw)
        for ids in torch.arange(length).split(batches):
            buffer.add(ids, ids)
        contents = buffer.contents().y.tolist()
        assert len(set(contents)) == capacity
        kept.update(contents)
    observed = torch.tensor([kept[position] for position in range(length)], dtype=torch.float64)
    share = capacity / length
    # The samples of one stream compete for slots, so the counts' variance is n/(n - 1) times the binomial one.
    variance = repetitions * share * (1 - share) * length / (length - 1)
    statistic = ((observed - repetitions * share) ** 2).sum() / variance
    assert P_VALUE < stats.chi2.sf(float(statistic), length - 1) < 1 - P_VALUE


def test_batches_of_any_size_keep_as_many_of_the_first_half_as_one_by_one():
    """Against the sequential algorithm itself: the distribution of how many early samples survive."""
    capacity, length, repetitions = 6, 30, 500

    def survivors(batches, seed):
        draw, counts = generator(seed, "buffer"), Counter()
        for _ in range(repetitions):
            buffer = Reservoir(capacity, generator=draw)
            for ids in torch.arange(length).split(batches):
                buffer.add(ids, ids)
            counts[int((buffer.contents().y < length // 2).sum())] += 1
        return counts

    def by_the_loop(seed):
        draw, counts = generator(seed, "loop"), Counter()
        for _ in range(repetitions):
            uniforms = torch.rand(length, dtype=torch.float64, generator=draw).tolist()
            counts[sum(index < length // 2 for index in sequential(uniforms, 0, capacity).values())] += 1
        return counts

    batched, looped = survivors([13, 13, 4], 1), by_the_loop(2)
    table = [[counts[k] for k in range(1, capacity)] for counts in (batched, looped)]
    assert stats.chi2_contingency(table).pvalue > P_VALUE
    # And both against what uniform sampling without replacement gives.
    expected = stats.hypergeom(length, length // 2, capacity).pmf(range(capacity + 1)) * repetitions
    for counts in (batched, looped):
        assert stats.chisquare([counts[k] for k in range(capacity + 1)], expected).pvalue > P_VALUE


def test_a_long_stream_keeps_its_uniform_reach():
    """`seen` counts beyond what float32 holds; new samples still get in with probability capacity / seen."""
    buffer = Reservoir(1000, generator=generator(0, "buffer"))
    ids = torch.arange(1000)
    buffer.add(ids, ids)
    buffer.seen += 2**25
    buffer.offered += 2**25
    for _ in range(10):
        buffer.add(torch.full((100_000,), -1), torch.full((100_000,), -1))
    expected = 1000 * 10**6 / (2**25 + 10**6)  # about 29 of the last million
    assert abs(int((buffer.contents().y == -1).sum()) - expected) < 5 * expected**0.5


# --- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stored", "n", "expected"), [(5, 3, 3), (5, 5, 5), (5, 9, 5), (1, 1, 1), (1, 8, 1)])
def test_draws_are_distinct_and_as_many_as_there_are(stored, n, expected):
    buffer = filled(8, [stored])
    drawn = numbers(buffer.sample(n))
    assert len(drawn) == len(set(drawn)) == expected
    assert set(drawn) <= set(range(stored))


def test_draws_never_show_what_was_not_kept():
    """The spare row, where samples that are not kept are written, stays out of sight."""
    buffer = filled(4, [50])
    kept = set(numbers(buffer.contents()))
    for _ in range(50):
        assert set(numbers(buffer.sample(4))) == kept


def test_draws_are_uniform_in_every_position():
    buffer, counts, n = filled(10, [25]), Counter(), 4
    kept = numbers(buffer.contents())
    for _ in range(1500):
        counts.update(enumerate(numbers(buffer.sample(n))))
    for position in range(n):
        assert stats.chisquare([counts[position, number] for number in kept]).pvalue > P_VALUE


def test_two_draws_are_independent():
    """The share of samples that two draws of 5 out of 10 have in common is hypergeometric."""
    buffer = filled(10, [10])
    common = Counter(len(set(numbers(buffer.sample(5))) & set(numbers(buffer.sample(5)))) for _ in range(800))
    expected = stats.hypergeom(10, 5, 5).pmf(range(6)) * 800
    observed = [common[0] + common[1], common[2], common[3], common[4] + common[5]]
    wanted = [expected[:2].sum(), expected[2], expected[3], expected[4:].sum()]
    assert stats.chisquare(observed, wanted).pvalue > P_VALUE


@pytest.mark.parametrize("count", [1, 20, LARGE])
def test_draws_from_up_to_so_many_samples_are_permutations(count):
    """What seeds mean there does not change: stored results depend on it."""
    one, other = generator(2, "buffer"), generator(2, "buffer")
    for n in (1, 7, count):
        assert torch.equal(distinct(count, n, one), torch.randperm(count, generator=other)[:n])
    assert torch.equal(one.get_state(), other.get_state())


@pytest.mark.parametrize("n", [1, 32, 6250, 6251, LARGE + 1, LARGE + 9])
def test_draws_from_many_samples_are_distinct_and_uniform(n):
    """Of 6250 numbers drawn with replacement, some 200 would come again."""
    count = LARGE + 1
    drawn = distinct(count, n, generator(1, "buffer"))
    assert drawn.dtype == torch.int64
    assert len(drawn) == len(set(drawn.tolist())) == min(n, count)
    assert 0 <= drawn.min() <= drawn.max() < count
    if n > 1:
        assert stats.kstest(drawn.double().numpy() / count, "uniform").pvalue > P_VALUE
        order = stats.spearmanr(drawn.numpy(), range(len(drawn)))
        assert order.pvalue > P_VALUE, "early and late ones differ"


def test_a_draw_takes_no_memory_for_what_is_not_drawn():
    drawn = distinct(2**40, 1000, generator(0, "buffer"))
    assert len(set(drawn.tolist())) == 1000
    assert stats.kstest(drawn.double().numpy() / 2**40, "uniform").pvalue > P_VALUE


def test_of_many_samples_every_sequence_is_equally_likely(monkeypatch):
    """The way of drawing from many, of few: all ordered pairs, where a number often comes again, and each third."""
    monkeypatch.setattr(reservoir, "LARGE", 0)
    random, count, repetitions = generator(4, "buffer"), 48, 20_000
    drawn = [tuple(distinct(count, 3, random).tolist()) for _ in range(repetitions)]
    assert all(len(set(each)) == 3 for each in drawn)
    pairs, thirds = Counter(each[:2] for each in drawn), Counter(each[2] for each in drawn)
    counts = [pairs[i, j] for i in range(count) for j in range(count) if i != j]
    assert sum(counts) == repetitions
    for observed in (counts, [thirds[i] for i in range(count)]):
        assert P_VALUE < stats.chisquare(observed).pvalue < 1 - P_VALUE


def test_a_large_buffer_continues_where_it_was():
    whole, other = (Reservoir(LARGE + 50, generator=generator(seed, "buffer")) for seed in (0, 1))
    ids = torch.arange(LARGE + 40)
    whole.add(ids, ids)
    whole.sample(9)
    other.load_state_dict({**whole.state_dict(), "columns": [each.clone() for each in whole.state_dict()["columns"]]})
    for _ in range(5):
        draws = [each.sample(40).y for each in (whole, other)]
        assert torch.equal(*draws)
        assert len(set(draws[0].tolist())) == 40
        for each in (whole, other):
            each.add(ids[:30] + each.offered, ids[:30] + each.offered)
    assert torch.equal(whole.contents().y, other.contents().y)
    assert whole.stored == len(set(whole.contents().y.tolist())) == whole.capacity


@pytest.mark.parametrize("n", [0, -1])
def test_a_draw_must_ask_for_something(n):
    with pytest.raises(UsageError, match="at least 1 sample"):
        filled(5, [5]).sample(n)


def test_an_empty_buffer_says_so():
    buffer = Reservoir(5)
    assert buffer.stored == 0
    for read in (lambda: buffer.sample(3), buffer.contents):
        with pytest.raises(UsageError, match="buffer is empty"):
            read()


def test_nothing_offered_is_nothing_stored():
    buffer = filled(5, [0])
    assert buffer.stored == 0
    with pytest.raises(UsageError, match="buffer is empty"):
        buffer.sample(1)


# --- what goes in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity):
    with pytest.raises(UsageError, match=f"buffer size must be at least 1, not {capacity}"):
        Reservoir(capacity)


@pytest.mark.parametrize("capacity", [9.5, float("inf"), float("nan")])
def test_capacity_must_be_a_whole_number(capacity):
    with pytest.raises(UsageError, match=f"a whole number, not {capacity}"):
        Reservoir(capacity)


def test_capacity_may_be_computed():
    assert Reservoir(0.1 * 100).capacity == 10


def test_without_logits_there_are_none():
    buffer = Reservoir(3)
    buffer.add(torch.zeros(2, 4), torch.zeros(2))
    assert buffer.sample(2).logits is None
    assert buffer.contents().logits is None


@pytest.mark.parametrize(
    ("x", "y", "logits", "message"),
    [
        (torch.zeros(2, 5), torch.zeros(2), torch.zeros(2, 3), "x is (5,) float32, stored is (4,) float32"),
        (torch.zeros(2, 4, 1), torch.zeros(2), torch.zeros(2, 3), "x is (4, 1) float32, stored is (4,) float32"),
        (torch.zeros(2, 4), torch.zeros(2, 1), torch.zeros(2, 3), "y is (1,) float32, stored is () float32"),
        (torch.zeros(2, 4), torch.zeros(2), torch.zeros(2, 6), "logits is (6,) float32, stored is (3,) float32"),
        (torch.zeros(2, 4).double(), torch.zeros(2), torch.zeros(2, 3), "x is (4,) float64, stored is (4,) float32"),
        (torch.zeros(2, 4), torch.zeros(2).long(), torch.zeros(2, 3), "y is () int64, stored is () float32"),
        (torch.zeros(2, 4), torch.zeros(2), torch.zeros(2, 3).bfloat16(), "logits is (3,) bfloat16, stored is (3,)"),
        (torch.zeros(2, 4), torch.zeros(2), None, "logits must be given for every sample or for none"),
        (torch.zeros(2, 4), torch.zeros(1), torch.zeros(2, 3), "one row per sample each, not 2, 1, 2"),
        (torch.zeros(2, 4), torch.zeros(2), torch.zeros(3, 3), "one row per sample each, not 2, 2, 3"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(x, y, logits, message):
    buffer = Reservoir(5, generator=generator(0, "buffer"))
    buffer.add(torch.ones(3, 4), torch.ones(3), torch.ones(3, 3))
    state = buffer.generator.get_state()
    with pytest.raises(UsageError) as caught:
        buffer.add(x, y, logits)
    assert message in str(caught.value)
    assert (buffer.stored, buffer.seen.item()) == (3, 3)
    assert all(bool((part == 1).all()) for part in buffer.contents())
    assert torch.equal(buffer.generator.get_state(), state)


def test_a_refused_first_batch_leaves_the_buffer_open():
    buffer = Reservoir(5)
    with pytest.raises(UsageError, match="one row per sample"):
        buffer.add(torch.zeros(3, 4), torch.zeros(2))
    buffer.add(torch.zeros(3, 7), torch.zeros(3), torch.zeros(3, 2))
    assert buffer.contents().x.shape == (3, 7)


def test_logits_given_later_only_are_refused():
    buffer = Reservoir(5)
    buffer.add(torch.zeros(1, 4), torch.zeros(1))
    with pytest.raises(UsageError, match="every sample or for none"):
        buffer.add(torch.zeros(1, 4), torch.zeros(1), torch.zeros(1, 2))


def test_stored_parts_are_detached_copies():
    x = torch.zeros(3, 2, requires_grad=True)
    y = torch.zeros(3)
    logits = torch.ones(3, 2, requires_grad=True) * 1
    buffer = Reservoir(3)
    buffer.add(x, y, logits)
    with torch.no_grad():
        x += 5
        y += 5
        logits += 5
    for draw in (buffer.contents(), buffer.sample(3)):
        assert draw.x.max() == draw.y.max() == 0
        assert draw.logits.max() == 1
        assert not any(part.requires_grad for part in draw)


def test_draws_are_copies():
    buffer = filled(4, [4])
    draw = buffer.sample(4)
    draw.x.zero_()
    draw.y.zero_()
    draw.logits.zero_()
    assert numbers(buffer.contents()) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int64])
def test_inputs_keep_their_type_and_shape(dtype):
    buffer = Reservoir(2)
    buffer.add(torch.ones(2, 3, 4, 5, dtype=dtype), torch.tensor([1, 2]), torch.zeros(2, 7))
    draw = buffer.sample(2)
    assert draw.x.shape == (2, 3, 4, 5)
    assert (draw.x.dtype, draw.y.dtype, draw.logits.dtype) == (dtype, torch.int64, torch.float32)


def test_storage_is_on_the_generators_device():
    buffer = filled(2, [2])
    assert buffer.device == buffer.seen.device == buffer.contents().x.device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_storage_is_on_the_gpu_if_the_generator_is():
    buffer = Reservoir(2, generator=generator(0, "buffer", "cuda"))
    buffer.add(torch.ones(4, 3, device="cuda"), torch.ones(4, device="cuda"))
    assert buffer.contents().x.device.type == buffer.sample(2).y.device.type == buffer.seen.device.type == "cuda"


# --- the same again --------------------------------------------------------------------------------------------------


def test_same_seed_same_contents_and_draws():
    one, two, other = (filled(6, [5, 20, 9], seed) for seed in (3, 3, 4))
    assert numbers(one.contents()) == numbers(two.contents()) != numbers(other.contents())
    assert [numbers(one.sample(3)) for _ in range(5)] == [numbers(two.sample(3)) for _ in range(5)]


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    filled(3, [10]).sample(2)
    buffer = Reservoir(2)
    buffer.add(torch.zeros(5, 1), torch.zeros(5))
    assert torch.equal(before, torch.get_rng_state())


# --- samples of several tensors --------------------------------------------------------------------------------------


def nested(ids):
    """Samples that tell their number in five tensors of different shapes and types."""
    x, y, logits = numbered(ids)
    return {"image": x, "more": (y.double(), [y[:, None].float()])}, {"label": y}, logits


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 15), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_samples_of_several_tensors_are_kept_as_those_of_one(batches, capacity, seed):
    plain, buffer = filled(capacity, batches, seed), Reservoir(capacity, generator=generator(seed, "buffer"))
    for ids in torch.arange(sum(batches)).split(batches):
        buffer.add(*nested(ids))
    for kept, same in ((buffer.contents(), plain.contents()), (buffer.sample(5), plain.sample(5))):
        assert list(kept.x) == ["image", "more"]
        assert torch.equal(kept.x["image"], same.x)
        assert torch.equal(kept.y["label"], same.y)
        assert torch.equal(kept.logits, same.logits)
        first, (second,) = kept.x["more"]
        assert torch.equal(first, same.y.double())
        assert torch.equal(second, same.y[:, None].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x | {"image": x["image"].float()}, "x['image'] is (3, 1) float32, stored is (3, 1) uint8"),
        (lambda x: x | {"image": x["image"][:, :2]}, "x['image'] is (2, 1) uint8, stored is (3, 1) uint8"),
        (lambda x: x | {"more": (x["more"][0], [x["more"][1][0][:, 0]])}, "x['more'][1][0] is () float32, stored is"),
        (lambda x: {"image": x["image"]}, "x['more'][0] is missing, stored is () float64; x['more'][1][0] is missing"),
        (lambda x: x | {"extra": x["image"]}, "x['extra'] is (3, 1) uint8, stored is none"),
        (lambda x: x["image"], "x is (3, 1) uint8, stored is none"),
        (lambda x: x | {"more": (x["more"][0][:-1], x["more"][1])}, "one row per sample each, not 3, 2, 3, 3, 3"),
    ],
)
def test_another_form_is_refused_and_changes_nothing(change, message):
    buffer = Reservoir(5, generator=generator(0, "buffer"))
    buffer.add(*nested(torch.arange(3)))
    state, (x, y, logits) = buffer.generator.get_state(), nested(torch.arange(3))
    with pytest.raises(UsageError) as caught:
        buffer.add(change(x), y, logits)
    assert message in str(caught.value)
    if "one row" not in message:
        with pytest.raises(UsageError) as caught:
            buffer.check(change(x), y)
        assert message in str(caught.value)
    buffer.check(x, y)
    assert (buffer.stored, buffer.seen.item()) == (3, 3)
    assert torch.equal(buffer.generator.get_state(), state)


def test_the_form_is_part_of_the_state():
    buffer, other = (Reservoir(5, generator=generator(seed, "buffer")) for seed in (0, 1))
    for ids in torch.arange(20).split(4):
        buffer.add(*nested(ids))
    other.load_state_dict(buffer.state_dict())
    for ids in (torch.arange(20, 30), torch.arange(30, 40)):
        draws = [each.sample(3) for each in (buffer, other)]
        assert torch.equal(draws[0].x["more"][1][0], draws[1].x["more"][1][0])
        assert torch.equal(draws[0].x["image"], draws[1].x["image"])
        buffer.add(*nested(ids))
        other.add(*nested(ids))
    plain = filled(5, [4])
    with pytest.raises(UsageError, match="do not fit the buffer"):
        plain.load_state_dict(buffer.state_dict())


@pytest.mark.parametrize("before", [0, 3, 50])
@pytest.mark.parametrize("count", [1, 4, 6])
def test_replace_stores_exactly_these_samples(before, count):
    buffer = Reservoir(6, generator=torch.Generator().manual_seed(0))
    if before:
        buffer.add(torch.arange(before), torch.zeros(before, dtype=torch.int64))
    x, y = torch.arange(100, 100 + count), torch.arange(count)
    buffer.replace(x, y)
    assert torch.equal(buffer.contents().x, x)
    assert torch.equal(buffer.contents().y, y)
    assert buffer.stored == buffer.offered == int(buffer.seen) == count
    copy = Reservoir(6)
    copy.load_state_dict(buffer.state_dict())
    assert torch.equal(copy.contents().x, x)
    assert set(buffer.sample(6).x.tolist()) == set(x.tolist())


def test_replace_refuses_more_than_fit():
    with pytest.raises(UsageError, match="7 samples do not fit into a buffer of 6"):
        Reservoir(6).replace(torch.arange(7), torch.arange(7))
