"""Samples of different length: the same ones are stored and drawn as if all were padded to one length.

The oracle is the ordinary reservoir of samples that are padded to `WIDTH`, and a plain function of a sample's number.
"""

import copy
import gc
import os
import pickle
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast import checkpoint
from holdfast.buffer import BalancedReservoir, Reservoir, ShardedReservoir, packing, ragged
from holdfast.nested import leaves, pad, transform
from holdfast.rng import generator

from .test_folder import ACTIONS, assert_a_fork_leaves_alone, files_limited_to, live_through
from .test_forget import POLICIES

WIDTH = 12
"""More positions than any sample has."""
PADDING = {"tokens": 0, "y": -100, "logits": 0}
STORAGES = ["device", "host", "folder"]


def length(number: int) -> int:
    """How many positions a sample has."""
    return 1 + number * 7 % 9


def batch(numbers, width=None):
    """Samples by their numbers, padded to `width` positions, or to the longest of them: (x, y, logits)."""
    ids = torch.tensor(list(numbers), dtype=torch.int64)
    width = width or max([length(number) for number in ids.tolist()], default=1)
    places = torch.arange(width)
    inside = places < torch.tensor([length(number) for number in ids.tolist()]).view(-1, 1)
    value = 1 + (ids[:, None] * 3 + places) % 50
    tokens = torch.where(inside, value, 0)
    y = torch.where(inside & (places % 3 > 0), value % 9, -100)  # some positions are not supervised
    top = (value[..., None] + torch.arange(2)).half() * inside[..., None]
    return {"tokens": tokens, "id": ids, "flag": ids % 2 == 0}, y, {"values": top, "rest": value.double() * inside}


def make(storage="device", capacity=10, seed=0, padding=PADDING, kind=Reservoir, **options):
    return kind(capacity, generator=generator(seed, "buffer"), storage=storage, padding=padding, **options)


def place(tmp_path, storage):
    return tmp_path / "buffer" if storage == "folder" else storage


def assert_same(drawn, expected):
    """Samples as they should be, padded to the longest of them."""
    numbers = expected.x["id"].tolist()
    width = max(map(length, numbers))
    for mine, theirs, form in zip(drawn, expected, batch(numbers), strict=True):
        parts = zip(*(leaves(each, "part").values() for each in (mine, theirs, form)), strict=True)
        for part, same, formula in parts:
            assert part.dtype == same.dtype
            assert torch.equal(part, same[:, :width] if same.dim() > 1 else same)
            assert torch.equal(part, formula)


def offer(buffers, start, size):
    """The same samples to all; those that cannot be ragged get them padded."""
    for buffer in buffers:
        buffer.add(*batch(range(start, start + size), WIDTH if buffer.padding is None else None))


# --- no difference ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_same_samples_are_stored_and_drawn_as_if_padded(tmp_path, storage, policy):
    one, other = make(place(tmp_path, storage), policy=policy), make(padding=None, policy=policy)
    start = 0
    for step, size in enumerate((3, 1, 8, 0, 30, 5, 2, 7)):
        offer((one, other), start, size)
        start += size
        assert_same(one.sample(5), other.sample(5))
        assert_same(one.contents(), other.contents())
        if step == 4:
            counts = {each.forget(lambda stored: stored.x["flag"]) for each in (one, other)}
            assert len(counts) == 1
            assert_same(one.contents(), other.contents())
    assert one.offered == int(one.seen) == other.offered
    if storage != "folder":
        again = make(policy=policy, seed=9)
        again.load_state_dict(one.state_dict())
        assert_same(again.contents(), other.contents())
        assert_same(again.sample(4), other.sample(4))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_plan_stores_what_is_stored_without_one(tmp_path, storage, policy):
    """While there is room, when it is just enough, when there is none, and after samples were forgotten."""
    planned, other = make(place(tmp_path, storage), policy=policy), make(policy=policy)
    start = 0
    for step, size in enumerate((3, 1, 6, 2, 30, 5, 7)):
        x, y, logits = batch(range(start, start + size))
        start += size
        plan = planned.plan(x, y)
        chosen = [transform(lambda part, rows=plan.rows: part[rows], each) for each in (x, y, logits)]
        planned.reserve(*chosen, plan)
        planned.add(*chosen, plan)
        other.add(x, y, logits)
        if step == 4:
            for each in (planned, other):
                each.forget(lambda stored: stored.x["flag"])
        assert_same(planned.contents(), other.contents())
        assert_same(planned.sample(4), other.sample(4))


@given(
    st.lists(st.integers(0, 9) | st.sampled_from(["sample", "forget", "forget all", "state", "replace"]), max_size=20),
    st.integers(1, 12),
    st.sampled_from(POLICIES),
    st.sampled_from(["device", "folder"]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_happens_it_is_the_padded_buffer(tmp_path_factory, actions, capacity, policy, storage):
    folder = tmp_path_factory.mktemp("any")
    one = make(place(folder, storage), capacity, policy=policy)
    other, start = make("device", capacity, padding=None, policy=policy), 0
    for action in actions:
        match action:
            case int(size):
                offer((one, other), start, size)
                start += size
            case "sample" if other.stored:
                assert_same(one.sample(4), other.sample(4))
            case "forget":
                assert one.forget(lambda stored: stored.x["id"] % 3 == 0) == other.forget(lambda s: s.x["id"] % 3 == 0)
            case "forget all":
                one.forget_all()
                other.forget_all()
            case "state":
                one.load_state_dict(copy.deepcopy(one.state_dict()))
            case "replace" if other.stored:
                for each, width in ((one, None), (other, WIDTH)):
                    each.replace(*batch(range(min(capacity, 3)), width))
        assert (one.stored, one.offered) == (other.stored, other.offered)
        if other.stored:
            assert_same(one.contents(), other.contents())
    one.close()
    shutil.rmtree(folder)


def test_a_balanced_buffer_of_texts():
    """Inputs differ in length, labels and answers have one shape."""
    one, other = (make(padding=padding, kind=BalancedReservoir, capacity=6) for padding in ({"tokens": 0}, None))
    for start in range(0, 40, 8):
        for each, width in ((one, None), (other, WIDTH)):
            x, _, _ = batch(range(start, start + 8), width)
            each.add(x, x["id"] % 3, torch.ones(8, 4) * x["id"][:, None])
        assert torch.equal(one.contents().y, other.contents().y)
        assert torch.equal(one.contents().logits, other.contents().logits)
        drawn, same = one.sample(4), other.sample(4)
        assert torch.equal(drawn.x["tokens"], batch(same.x["id"].tolist())[0]["tokens"])
    assert one.forget(lambda stored: stored.y == 1) == other.forget(lambda stored: stored.y == 1) == 2
    again = make(padding={"tokens": 0}, kind=BalancedReservoir, capacity=6)
    again.load_state_dict(one.state_dict())
    for each in (one, again):
        each.add(batch(range(60, 70))[0], torch.arange(10) % 3, torch.ones(10, 4))
    assert torch.equal(one.contents().x["id"], again.contents().x["id"])


def test_samples_of_padding_alone_and_padding_in_the_middle():
    buffer = Reservoir(4, padding={"x": 0})
    x = torch.tensor([[0, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 4]])
    buffer.add(x[:2], torch.zeros(2))
    assert buffer.contents().x.tolist() == [[0, 0], [0, 3]]
    buffer.add(x[2:], torch.zeros(1))
    assert torch.equal(buffer.contents().x, x)
    assert buffer.state_dict()["lengths"].tolist() == [1, 2, 4]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_any_type_and_any_number_of_dimensions(dtype):
    buffer = Reservoir(9, padding={"a": 1, "y[0]": 0, "x['more']": 1})
    a, deep = torch.zeros(3, 5, 2, 3, dtype=dtype), torch.zeros(3, 5, dtype=dtype)
    a[:, 3:], deep[:, 4:] = 1, 1
    a[1:, 2:], deep[1:, 2:] = 1, 1
    buffer.add({"a": a, "more": {"deep": deep}}, (torch.zeros(3, 5), torch.arange(3)))
    drawn = buffer.contents()
    assert torch.equal(drawn.x["a"], a[:, :4])
    assert torch.equal(drawn.x["more"]["deep"], deep[:, :4])
    assert drawn.y[1].tolist() == [0, 1, 2]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_samples_take_as_many_bytes_as_they_have_content():
    buffer = make(capacity=50)
    offer((buffer,), 0, 50)
    one_position = 8 + 8 + 2 * 2 + 8  # tokens, y, values, rest
    stored = sum(each.untyped_storage().nbytes() for each in buffer._storage._samples.values())
    assert stored == sum(length(number) * one_position + 8 + 1 for number in range(50))
    state = buffer.state_dict()
    assert sum(column.nbytes for column in state["columns"]) == stored


def test_files_take_as_many_bytes_as_samples_have_content(tmp_path):
    buffer = make(tmp_path / "buffer", capacity=20)
    for start in range(0, 60, 4):
        buffer.reserve(*batch(range(start, start + 4)))
        offer((buffer,), start, 4)
    buffer.commit()
    numbers = buffer.contents().x["id"].tolist()
    samples = [buffer._storage._path(each.number) for each in buffer._storage._samples.values()]
    assert sorted(path.stat().st_size for path in samples) == sorted(9 + 28 * length(number) for number in numbers)
    assert len(list((tmp_path / "buffer").glob("*.sample"))) <= 20 + 4  # and files for the samples to come


@pytest.mark.parametrize("storage", STORAGES)
def test_room_for_all_slots_is_refused_with_its_size_before_the_first_step(tmp_path, storage, monkeypatch):
    capacity = 10**13
    buffer = make(place(tmp_path, storage), capacity)
    before, samples = buffer.generator.get_state(), batch(range(5), WIDTH)
    wanted = capacity * (9 + 28 * max(map(length, range(5))))
    with pytest.raises(
        hf.StorageError, match=rf"needs {wanted:,} bytes in the .*, where [\d,]+ are free.*smaller buffer"
    ):
        buffer.reserve(*samples)
    with pytest.raises(hf.StorageError, match=f"needs {wanted:,} bytes"):
        buffer.add(*samples)
    assert (buffer.stored, int(buffer.seen)) == (0, 0)
    assert torch.equal(buffer.generator.get_state(), before)
    monkeypatch.setattr(ragged, "_free_bytes", lambda _: None)  # a system that does not tell
    buffer.add(*samples)
    assert buffer.stored == 5


def test_copies_are_made_when_room_is_reserved(monkeypatch):
    """What follows the update of the weights needs no memory: several minibatches may wait for it."""
    buffer, twin = make(), make(padding=None)
    first, second, third = (batch(range(start, start + 4)) for start in (0, 4, 8))
    for samples in (first, second):
        buffer.reserve(*samples)
    with monkeypatch.context() as patch:
        patch.setattr(packing.Packing, "split", lambda *_: pytest.fail("memory is taken"))
        buffer.add(*second)
        buffer.add(*first)
    buffer.add(*third)
    for start in (4, 0, 8):
        offer((twin,), start, 4)
    assert_same(buffer.contents(), twin.contents())
    assert not buffer._storage._copies


@pytest.mark.parametrize("padding", [PADDING, None])
def test_room_on_a_disk_is_reserved_for_several_minibatches(tmp_path, monkeypatch, padding):
    """As many as are accumulated for one update."""
    buffer, twin = (make(storage, padding=padding, capacity=20) for storage in (tmp_path / "buffer", "device"))
    width = None if padding else WIDTH
    samples = [batch(range(start, start + 4), width) for start in (0, 4, 8, 12)]
    for each in samples[:3]:
        buffer.check(*each[:2])
        buffer.reserve(*each)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("no room was reserved"))
        for each in samples[:3]:
            buffer.add(*each)
    buffer.add(*samples[3])
    for each in samples:
        twin.add(*each)
    assert torch.equal(buffer.contents().y, twin.contents().y)
    del each, samples
    gc.collect()
    last = batch(range(16, 18), width)
    buffer.reserve(*last)
    assert list(buffer._storage._announced.values()) == [2]


def test_a_minibatch_that_changed_after_room_was_reserved_is_stored_as_it_is():
    buffer, x = Reservoir(3, padding={"x": 0}), torch.ones(2, 4)
    buffer.reserve(x, torch.zeros(2))
    x += 1
    buffer.add(x, torch.zeros(2))
    assert buffer.contents().x.unique().tolist() == [2]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_made_while_a_minibatch_waits_goes_on_like_the_original(duplicate):
    buffer, samples = make(), batch(range(4, 8))
    offer((buffer,), 0, 4)
    buffer.reserve(*samples)
    twin = duplicate(buffer)
    for each in (buffer, twin):
        each.add(*samples)
        offer((each,), 8, 20)
    assert torch.equal(buffer.contents().y, twin.contents().y)
    assert torch.equal(buffer.sample(5).y, twin.sample(5).y)


def test_copies_of_a_step_that_failed_go_with_its_minibatch():
    buffer = make()
    offer((buffer,), 0, 2)
    samples, others = batch(range(2, 6)), batch(range(20, 22))
    buffer.reserve(*samples)
    buffer.reserve(*others)
    del samples
    gc.collect()
    buffer.reserve(*others)
    assert len(buffer._storage._copies) == 1
    buffer.load_state_dict(buffer.state_dict())
    buffer.add(*others)
    assert buffer.contents().x["id"].tolist() == [0, 1, 20, 21]


@pytest.mark.parametrize("storage", STORAGES)
def test_what_was_reserved_for_a_step_that_failed_binds_nobody(tmp_path, storage):
    buffer = make(place(tmp_path, storage))
    buffer.reserve(*batch(range(5)))
    x, y, _ = batch(range(3))
    buffer.check(x, y)
    buffer.reserve(x, y)
    buffer.add(x, y)
    assert buffer.contents().logits is None
    assert torch.equal(buffer.contents().y, y)


def test_reserved_answers_that_require_a_gradient_are_stored_without():
    buffer = Reservoir(3, padding={"x": 0, "logits": 0})
    logits = torch.ones(2, 4, 3, requires_grad=True) * 2
    buffer.reserve(torch.ones(2, 4), torch.zeros(2), logits)
    buffer.add(torch.ones(2, 4), torch.zeros(2), logits)
    assert not buffer.sample(2).logits.requires_grad
    assert buffer.sample(2).logits.unique().tolist() == [2]


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        ({"token": 0}, r"padding names 'token', but the tensors of a minibatch are x\['tokens'\], x\['id'\]"),
        ({"logits": 0}, "padding must name a tensor of x or y"),
        ({"id": 0}, r"x\['id'\] has padding, so its shape must be \(samples, positions, ...\), not \(3,\)"),
        ({"x": 0}, r"x\['id'\] has padding"),
        ({}, "padding must name a tensor of x or y"),
    ],
)
def test_padding_that_does_not_fit_the_samples(padding, message):
    buffer = make(padding=padding)
    for use in (lambda: buffer.check(*batch(range(3))[:2]), lambda: buffer.add(*batch(range(3)))):
        with pytest.raises(hf.UsageError, match=message):
            use()
    assert buffer.stored == 0


@pytest.mark.parametrize("stored", [False, True])
def test_samples_that_do_not_fit_change_nothing(stored):
    buffer = make()
    if stored:
        offer((buffer,), 0, 4)
    x, y, logits = batch(range(4, 8))
    state = buffer.generator.get_state()
    with pytest.raises(
        hf.UsageError, match=r"same number of positions in a minibatch, but x\['tokens'\] has 6, y has 9"
    ):
        buffer.add(x | {"tokens": x["tokens"][:, :6]}, y, logits)
    with pytest.raises(hf.UsageError, match=r"x\['tokens'\] has padding, so its shape"):
        buffer.add(x | {"tokens": x["tokens"][:, :0]}, y[:, :0], logits)
    if stored:
        with pytest.raises(hf.UsageError, match=r"logits\['values'\] is \(any, 1\) float16, stored is \(any, 2\)"):
            buffer.add(x, y, logits | {"values": logits["values"][..., :1]})
        with pytest.raises(hf.UsageError, match="logits must be given for every sample or for none"):
            buffer.add(x, y)
        with pytest.raises(hf.UsageError, match=r"logits is \(any, 2\) float16, stored is none"):
            buffer.add(x, y, logits["values"])
    assert torch.equal(buffer.generator.get_state(), state)
    assert buffer.stored == 4 * stored


def test_a_buffer_of_one_shape_says_how_to_store_others():
    buffer = make(padding=None)
    buffer.add(*batch(range(3), 5))
    with pytest.raises(hf.UsageError, match=r"x\['tokens'\] is \(7,\) int64, stored is \(5,\).*padding="):
        buffer.add(*batch(range(3), 7))


def test_states_of_another_padding():
    plain, one, other = make(padding=None), make(), make(padding=PADDING | {"y": 0})
    plain.add(*batch(range(3), WIDTH))
    offer((one, other), 0, 3)
    for mine, theirs in ((plain, one), (one, plain), (one, other), (other, one)):
        before = mine.contents()
        with pytest.raises(hf.UsageError, match="the saved buffer has the padding"):
            mine.load_state_dict(theirs.state_dict())
        assert torch.equal(mine.contents().y, before.y)
    empty = make(padding=None)
    with pytest.raises(hf.UsageError, match="the saved buffer has the padding"):
        one.load_state_dict(empty.state_dict())


@pytest.mark.parametrize("storage", ["device", "folder"])
def test_states_that_make_no_sense(tmp_path, storage):
    buffer = make(place(tmp_path, storage))
    offer((buffer,), 0, 6)
    good, lengths = copy.deepcopy(buffer.state_dict()), buffer.state_dict()["lengths"]
    for changes in (
        {"lengths": lengths[:5]},
        {"lengths": lengths + 1},
        {"lengths": -lengths},
        {"lengths": lengths.float()},
        {"lengths": None},
        {"padding": None},
        {"padding": {}},
        {"padding": {"y": -100}},
        {"padding": {**good["padding"], "x['flag']": 0}},
        {"columns": [column.new_zeros(1, *column.shape[2:]) for column in good["columns"]]},
        {"stamps": torch.arange(3)},
        {"sums": torch.zeros(2, 6, dtype=torch.int32)},
        {"stamps": torch.zeros(6, dtype=torch.int64)},
    ):
        if not changes.keys() <= good.keys():
            continue
        with pytest.raises(hf.HoldfastError):
            buffer.load_state_dict({**good, **changes})
        assert buffer.contents().x["id"].tolist() == list(range(6))
    for key in good:
        with pytest.raises(hf.HoldfastError):
            buffer.load_state_dict({name: value for name, value in good.items() if name != key})
    buffer.load_state_dict(good)


# --- saved and restored ----------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_contents_and_nothing_else(tmp_path):
    buffer, file = make(capacity=40), tmp_path / "kept.safetensors"
    offer((buffer,), 0, 40)
    checkpoint.write(file, "buffer", buffer.state_dict())
    again = make(capacity=40, seed=3)
    again.load_state_dict(checkpoint.read(file, "buffer").state)
    offer((buffer, again), 40, 30)
    twin = make(padding=None, capacity=40)
    offer((twin,), 0, 40)
    offer((twin,), 40, 30)
    for each in (buffer, again):
        assert_same(each.contents(), twin.contents())
    assert file.stat().st_size < 40 * (9 + 28 * 5) + 15_000  # the generators' state among it


def test_widened_answers(tmp_path):
    for storage in STORAGES:
        buffer = Reservoir(4, storage=place(tmp_path, storage), padding={"x": 0, "logits": 0})
        x = torch.tensor([[1, 2, 3], [4, 0, 0]])
        buffer.add(x, torch.zeros(2), torch.arange(12.0).view(2, 3, 2))
        buffer.widen(3)
        assert buffer.contents().logits.tolist() == [
            [[0, 1, -1], [2, 3, 1], [4, 5, 3]],
            [[6, 7, 5], [0, 0, 0], [0, 0, 0]],
        ]
        buffer.add(x, torch.zeros(2), torch.ones(2, 3, 3))
        buffer.widen(2)
        assert buffer.contents().logits.shape == (4, 3, 3)


def test_widened_answers_stay_in_their_slots(tmp_path):
    """Slots are not filled in order where a sample of a minibatch takes the place of another one."""
    for seed in range(5):
        one, other = (make(padding=each, capacity=3, seed=seed) for each in ({"tokens": 0, "logits": 0}, None))
        for each, width in ((one, None), (other, WIDTH)):
            x, _, logits = batch(range(8), width)
            each.add(x, x["id"], logits["values"])
        one.widen(4)
        assert torch.equal(one.contents().y, other.contents().y)
        assert torch.equal(one.sample(2).y, other.sample(2).y)


@given(st.lists(st.integers(0, 15) | ACTIONS, min_size=5, max_size=30), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_a_folder_killed_at_any_moment_continues_from_the_last_checkpoint(tmp_path_factory, actions, capacity):
    """Every second time, room is reserved before."""

    def add(buffers, size):
        if size % 2:
            buffers[0].reserve(*batch(range(buffers[0].offered, buffers[0].offered + size)))
        offer(buffers, buffers[0].offered, size)

    folder = tmp_path_factory.mktemp("any") / "buffer"
    buffer, oracle = live_through(actions, folder, capacity, make, add, assert_same)
    if oracle.stored:
        assert_same(buffer.contents(), oracle.contents())
    buffer.commit()
    assert len(list(folder.glob("*.sample"))) == buffer.stored
    buffer.close()
    shutil.rmtree(folder.parent)


def test_from_memory_to_a_folder_but_not_back(tmp_path):
    memory, folder = make(), make(tmp_path / "buffer", seed=3)
    offer((memory,), 0, 40)
    offer((folder,), 7, 3)
    folder.load_state_dict(memory.state_dict())
    with pytest.raises(hf.UsageError, match="this one in memory"):
        memory.load_state_dict(folder.state_dict())
    offer((memory, folder), 40, 8)
    assert_same(folder.contents(), memory.contents())


def test_a_full_disk_while_a_state_from_memory_is_loaded_changes_nothing(tmp_path):
    memory, folder = make(), make(tmp_path / "buffer")
    offer((memory,), 0, 40)
    offer((folder,), 7, 3)
    with files_limited_to(100), pytest.raises(hf.StorageError, match="File too large"):
        folder.load_state_dict(memory.state_dict())
    assert folder.contents().x["id"].tolist() == [7, 8, 9]
    folder.load_state_dict(memory.state_dict())
    assert_same(folder.contents(), memory.contents())


# --- folders that suffer ---------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path):
    buffer = make(tmp_path / "buffer")
    offer((buffer,), 0, 30)
    buffer.commit()
    buffer.close()
    return tmp_path / "buffer"


@pytest.mark.parametrize("way", ["cut", "longer", "flipped", "missing", "empty"])
def test_every_damaged_file_is_noticed(kept, way):
    files = sorted(kept.glob("*.sample"))
    assert len(files) == 10
    for file in (files[0], files[-1]):
        whole = file.read_bytes()
        match way:
            case "cut" | "empty":
                file.write_bytes(whole[:-1] if way == "cut" else b"")
            case "longer":
                file.write_bytes(whole + b"x")
            case "flipped":
                file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
            case "missing":
                file.unlink()
        with pytest.raises(hf.StorageError, match=r"does not hold|damaged: 1 of 10 samples .* intact copy"):
            make(kept)
        file.write_bytes(whole)
    make(kept).close()


def test_a_file_damaged_while_the_buffer_is_in_use(kept):
    buffer = make(kept)
    file = min(kept.glob("*.sample"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with pytest.raises(hf.StorageError, match="is damaged: it is too short"):
        buffer.contents()
    file.write_bytes(whole)
    buffer.contents()


def test_a_full_disk_is_noticed_when_room_is_reserved_and_nothing_is_lost(tmp_path):
    buffer, twin = make(tmp_path / "buffer"), make()
    offer((buffer, twin), 0, 3)
    with files_limited_to(100), pytest.raises(hf.StorageError, match="File too large"):
        buffer.reserve(*batch(range(3, 8)))
    offer((buffer, twin), 3, 5)
    assert_same(buffer.contents(), twin.contents())


def test_a_disk_that_is_full_although_there_was_room(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    buffer, twin = make(tmp_path / "buffer"), make()
    offer((buffer, twin), 0, 3)
    with files_limited_to(150), pytest.raises(hf.StorageError, match="File too large"):
        offer((buffer,), 3, 5)
    assert buffer.offered == 3
    assert_same(buffer.contents(), twin.contents())
    buffer.commit()
    offer((buffer,), 3, 5)
    assert buffer.stored == 8


def test_a_closed_buffer_and_a_copy_are_refused(tmp_path):
    buffer = make(tmp_path / "buffer")
    offer((buffer,), 0, 3)
    with pytest.raises(hf.StorageError, match="cannot be copied or pickled"):
        copy.deepcopy(buffer)
    with pytest.raises(hf.StorageError, match="in use by another buffer"):
        make(tmp_path / "buffer")
    buffer.close()
    for use in (lambda: offer((buffer,), 3, 3), lambda: buffer.sample(2), buffer.contents, buffer.commit):
        with pytest.raises(hf.StorageError, match="was closed; a new learner"):
            use()
    assert make(tmp_path / "buffer").stored == 0


@pytest.mark.parametrize("way", ["removed", "moved", "replaced", "one file"])
def test_a_folder_that_is_gone_cannot_be_saved(kept, tmp_path, way):
    buffer, elsewhere = make(kept), tmp_path / "elsewhere"
    state = buffer.state_dict()
    match way:
        case "removed":
            shutil.rmtree(kept)
        case "moved" | "replaced":
            kept.rename(elsewhere)
            if way == "replaced":
                shutil.copytree(elsewhere, kept)
        case "one file":
            min(kept.glob("*.sample")).unlink()
    for use in (buffer.state_dict, buffer.commit, lambda: buffer.commit(state)):
        with pytest.raises(hf.StorageError, match=r"was removed, moved or replaced.*Put the folder back"):
            use()
    if way == "moved":
        elsewhere.rename(kept)
        buffer.commit()


def test_a_state_that_is_given_out_is_on_the_disk(tmp_path, monkeypatch):
    buffer, flushed, real = make(tmp_path / "buffer"), set(), os.fsync
    offer((buffer,), 0, 3)
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.add(os.fstat(handle).st_ino) or real(handle))
    buffer.state_dict()
    paths = [tmp_path / "buffer", *(buffer._storage._path(each.number) for each in buffer._storage._samples.values())]
    assert {path.stat().st_ino for path in paths} <= flushed
    flushed.clear()
    buffer.state_dict()
    assert len(flushed) == 1  # the folder alone


def test_a_folder_of_the_other_kind(kept, tmp_path):
    with pytest.raises(hf.UsageError, match="the saved buffer has the padding"):
        make(kept, padding=None)
    plain = make(tmp_path / "plain", padding=None)
    plain.add(*batch(range(3), WIDTH))
    plain.commit()
    plain.close()
    with pytest.raises(hf.UsageError, match="the saved buffer has the padding None"):
        make(tmp_path / "plain")


def test_files_of_the_other_kind_that_were_never_committed_are_removed(tmp_path):
    for padding, width in ((None, WIDTH), (PADDING, None), (None, WIDTH)):
        buffer = make(tmp_path / "buffer", padding=padding)
        buffer.add(*batch(range(3), width))
        buffer.close()
    buffer = make(tmp_path / "buffer")
    offer((buffer,), 0, 3)
    buffer.commit()
    assert not list((tmp_path / "buffer").glob("*.rows"))
    assert len(list((tmp_path / "buffer").glob("*.sample"))) == 3


def test_a_forked_process_leaves_the_samples_alone(tmp_path):
    assert_a_fork_leaves_alone(make(tmp_path / "b", 4, padding={"x": 0}), torch.arange(4)[:, None] + 1)
    assert make(tmp_path / "b", 4, padding={"x": 0}).contents().x.tolist() == [[1], [2], [3], [4]]


# --- several ranks ---------------------------------------------------------------------------------------------------


def _sharded(steps, storage, state=None):
    """On every rank: minibatches of different lengths and sizes, draws between, samples forgotten; what is left."""
    buffer = make(storage, 7, kind=ShardedReservoir, seed=0 if state is None else 5)
    rank, draws = buffer.ranks.rank, []
    if state is not None:
        buffer.load_state_dict(state)
    for start, sizes in steps:
        own = start + sum(sizes[:rank])
        buffer.add(*batch(range(own, own + sizes[rank])))
        draws.append(buffer.sample(2))
    buffer.forget(lambda stored: stored.x["id"] % 4 == 0)
    buffer.add(*batch([90 + rank]))
    return draws, buffer.contents(), buffer.state_dict()


@pytest.mark.parametrize("storage", ["device", "host"])
def test_ranks_together_are_one_buffer(crew, storage):
    steps = [(0, [3, 1]), (4, [1, 6]), (11, [5, 5]), (21, [4, 0])]

    def ordinary(seed, state=None):
        whole, draws = make(padding=None, capacity=7, seed=seed), []
        if state is not None:
            whole.load_state_dict(state)
        for start, sizes in steps:
            offer((whole,), start, sum(sizes))
            draws.append(whole.sample(4))
        whole.forget(lambda stored: stored.x["id"] % 4 == 0)
        whole.add(*batch([90, 91], WIDTH))
        return draws, whole

    draws, whole = ordinary(0)
    (one, contents, state), (two, same, _) = crew.run(2, _sharded, steps, storage)
    for each in (contents, same):
        assert_same(each, whole.contents())
    for expected, mine, theirs in zip(draws, one, two, strict=True):
        for own, rows in ((mine, slice(0, 2)), (theirs, slice(2, 4))):
            assert_same(own, type(expected)(*(_rows(part, rows) for part in expected)))
    single = make(capacity=7)
    single.load_state_dict(state)
    assert_same(single.contents(), whole.contents())
    _, further = ordinary(0, whole.state_dict())
    for _, contents, _ in crew.run(2, _sharded, steps, storage, state):
        assert_same(contents, further.contents())


def test_ranks_hold_nothing_but_stored_samples(alone):
    buffer, samples = make(kind=ShardedReservoir), [batch(range(start, start + 4)) for start in (0, 4, 8)]
    for each in samples:
        buffer.reserve(*each)
        buffer.add(*each)
        assert not buffer._storage._copies
    assert buffer.stored == 10


def _rows(part, rows):
    return {name: each[rows] for name, each in part.items()} if isinstance(part, dict) else part[rows]


def _made(paddings):
    rank = int(os.environ.get("RANK", torch.distributed.get_rank()))
    try:
        make(padding=paddings[rank], kind=ShardedReservoir)
    except hf.HoldfastError as error:
        return str(error)


def test_ranks_with_other_paddings_are_refused(crew):
    one, two = crew.run(2, _made, [{"x": 0}, {"x": 1}])
    assert one == two
    assert "the ranks differ in what they bring" in one


# --- minibatches of a common length ----------------------------------------------------------------------------------


def test_minibatches_are_padded_to_the_longest_of_them():
    short, long = batch([0, 1]), batch([5, 8])
    x, old = pad([short[0], long[0]], PADDING, "x")
    assert torch.equal(x["tokens"], batch([0, 1], 9)[0]["tokens"])
    assert old["tokens"] is long[0]["tokens"]
    assert x["id"] is short[0]["id"]
    y, _ = pad([short[1], long[1]], PADDING, "y")
    assert torch.equal(y, batch([0, 1], 9)[1])
    (logits, _), plain = pad([short[2], long[2]], PADDING, "logits"), pad([short[0], long[0]], None, "x")
    assert torch.equal(logits["values"], batch([0, 1], 9)[2]["values"])
    assert plain == [short[0], long[0]]


def test_the_most_exact_name_of_a_tensor_counts():
    x = {"a": torch.ones(1, 1), "b": torch.ones(1, 1)}
    longer = {name: torch.ones(1, 2) for name in x}
    padded, _ = pad([x, longer], {"x": 7, "b": 8, "x['b']": 9}, "x")
    assert padded["a"].tolist() == [[1, 7]]
    assert padded["b"].tolist() == [[1, 9]]


# --- learners --------------------------------------------------------------------------------------------------------


def learner(storage, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(60, 4), torch.nn.Linear(4, 9))
    options = {"class_dim": -1, "answers": hf.TopK(3), "padding": {"x": 0, "y": -100}, "regularizer": "kl"}
    optimizer = torch.optim.Adam(model.parameters())
    return hf.ConsistencyReplay(model, optimizer, buffer_size=6, storage=storage, seed=seed, **options)


def texts(step):
    x, y, _ = batch(range(5 * step + 1, 5 * step + 5))  # the labels of samples of one position are all -100
    return x["tokens"], y


@pytest.mark.parametrize("storage", ["host", "folder"])
def test_learners_learn_the_same_and_continue_exactly(tmp_path, storage):
    whole, file = learner("device"), tmp_path / "kept.safetensors"
    losses = [whole.observe(*texts(step)) for step in range(12)]
    one = learner(place(tmp_path, storage))
    got = [one.observe(*texts(step)) for step in range(5)]
    one.save(file)
    one.observe(*texts(5))
    one.buffer.close()
    one = learner(place(tmp_path, storage), seed=9)
    one.load(file)
    assert got + [one.observe(*texts(step)) for step in range(5, 12)] == losses
    for mine, theirs in zip(one.buffer.contents(), whole.buffer.contents(), strict=True):
        for part, same in zip(leaves(mine, "part").values(), leaves(theirs, "part").values(), strict=True):
            assert torch.equal(part, same)


@pytest.mark.parametrize("storage", STORAGES)
def test_no_room_is_noticed_before_the_weights_move(tmp_path, storage, monkeypatch):
    one, twin = learner(place(tmp_path, storage)), learner("device")
    with monkeypatch.context() as patch:
        patch.setattr(ragged, "_free_bytes", lambda _: 100)
        with pytest.raises(hf.StorageError, match=r"needs [\d,]+ bytes in .*, where 100 are free"):
            one.observe(*texts(0))
    for step in range(4):
        assert one.observe(*texts(step)) == twin.observe(*texts(step))
