"""Where a buffer's samples are makes no difference; those in a folder survive whatever ends the process."""

import copy
import gc
import json
import os
import pickle
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from forked import ended, forked
from holdfast import checkpoint
from holdfast.buffer.folder import RowFile
from holdfast.nested import leaves
from holdfast.rng import generator, seeded_globally

STREAM = torch.Generator().manual_seed(5)
IMAGES = torch.randint(0, 256, (400, 3, 4, 2), dtype=torch.uint8, generator=STREAM)


def batch(start, size, form="image"):
    """Samples of a stream, by where they are in it."""
    ids = torch.arange(start, start + size)
    x = IMAGES[ids % len(IMAGES)]
    match form:
        case "image":
            return x, ids, (ids[:, None] + torch.arange(5)).bfloat16()
        case "plain":
            return x[:, 0, 0, 0].bool(), x[:, 0].to(torch.complex64)
        case "nested":
            return {"left": x[..., 0], "right": (x[..., 1].float(), ids)}, ids, ids[:, None].double()


def make(place, capacity=10, seed=0):
    return hf.Reservoir(capacity, generator=generator(seed, "buffer"), storage=place)


def flat(draw):
    return leaves([part for part in draw if part is not None], "draw").values()


def assert_same(one, other):
    for mine, theirs in zip(flat(one), flat(other), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def assert_continue_alike(one, other):
    """Same contents, and the same draws and replacements from now on."""
    assert one.offered == other.offered == int(one.seen)
    if one.stored:
        assert_same(one.contents(), other.contents())
    for _ in range(3):
        for buffer in (one, other):
            buffer.add(*batch(buffer.offered, 4))
        assert_same(one.sample(6), other.sample(6))
    assert_same(one.contents(), other.contents())


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "buffer"


# --- no difference ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["image", "plain", "nested"])
@pytest.mark.parametrize("place", ["host", "folder"])
@pytest.mark.parametrize("capacity", [1, 10, 1000])
def test_draws_and_contents_are_those_of_device_memory(folder, place, capacity, form):
    one, other = make("device", capacity), make(folder if place == "folder" else place, capacity)
    start = 0
    for size in (3, 1, 8, 0, 30, 30, 30, 2):
        for buffer in (one, other):
            buffer.add(*batch(start, size, form))
        start += size
        assert_same(one.sample(5), other.sample(5))
        assert_same(one.contents(), other.contents())


def offset(x):
    """The same numbers, beginning anywhere in the memory of another tensor."""
    return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)


def strided(x):
    """The same numbers, each row among others."""
    return torch.stack([x, x], dim=x.dim())[..., 0]


def transposed(x):
    """The same numbers, column by column."""
    return x.reshape(len(x), -1).T.contiguous().T.view(x.shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("form", [offset, strided, transposed, torch.conj], ids=lambda form: form.__name__)
@pytest.mark.parametrize("place", ["device", "host", "folder"])
@pytest.mark.parametrize("rows", [1, 5])
def test_where_a_minibatch_is_in_memory_makes_no_difference(folder, place, form, dtype, rows):
    x = IMAGES[:rows].view(rows, 24).to(dtype)
    y = IMAGES[:rows, 0, 0, 0].to(dtype)
    buffer = make(folder if place == "folder" else place)
    buffer.add(form(x), form(y), form(x))
    assert_same(buffer.contents(), (x, y, x))


@pytest.mark.parametrize("most", [1, 24, 37, 10_000])
def test_systems_may_read_and_write_less_than_they_are_asked_for(folder, monkeypatch, most):
    """A call moves two gigabytes at most, and may be interrupted."""
    read, write = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda handle, size, at: read(handle, min(size, most), at))
    monkeypatch.setattr(os, "pwrite", lambda handle, content, at: write(handle, content[:most], at))
    one, other = make("device", 30), make(folder, 30)
    for start in range(0, 90, 30):
        for buffer in (one, other):
            buffer.add(*batch(start, 30))
        assert_same(one.sample(7), other.sample(7))
    assert_same(one.contents(), other.contents())
    other.commit()
    other.close()
    assert_same(one.contents(), make(folder, 30).contents())


def test_a_file_cut_short_while_the_buffer_is_in_use(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 10))
    os.truncate(folder / "1-int64.rows", 33)
    with pytest.raises(hf.StorageError, match=r"1-int64.rows is damaged: it is too short.*intact copy"):
        buffer.contents()


def test_files_grow_with_what_is_stored(folder):
    buffer = make(folder, 1_000_000)
    buffer.add(*batch(0, 3))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2000
    buffer.add(*batch(3, 100))
    assert (folder / "0-3x4x2-uint8.rows").stat().st_size == 103 * 24


def test_draws_are_copies(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 10))
    buffer.sample(10).x.zero_()
    assert_same(buffer.contents(), batch(0, 10))


def test_a_place_that_is_none():
    with pytest.raises(hf.UsageError, match="'device', 'host' or the Path of a folder, not 'hots'"):
        make("hots")


# --- opened again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 4, 300])
def test_a_folder_opened_again_continues_where_it_was_kept(folder, count):
    buffer, twin = make(folder), make("device")
    for each in (buffer, twin):
        each.add(*batch(0, count))
    buffer.commit()
    buffer.add(*batch(count, 50))  # not kept
    buffer.close()
    assert_continue_alike(make(folder, seed=7), twin)


def test_a_folder_that_was_never_kept_starts_anew(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 40))
    buffer.close()
    again = make(folder)
    assert again.stored == 0
    twin = make("device")
    for each in (again, twin):
        each.add(*batch(0, 3))
    assert_continue_alike(again, twin)


def test_a_folder_that_was_moved(folder, tmp_path):
    buffer = make(folder)
    buffer.add(*batch(0, 30))
    buffer.commit()
    contents = buffer.contents()
    buffer.close()
    folder.rename(tmp_path / "elsewhere")
    assert_same(make(tmp_path / "elsewhere").contents(), contents)


# --- states ----------------------------------------------------------------------------------------------------------

ACTIONS = st.sampled_from(["save", "save half", "fail to save", "roll back", "kill", "kill, load only", "sample"])


def live_through(actions, folder, capacity, make, add, assert_same):
    """A buffer in a folder, and one in memory whose states are copied whole, after all that happened to both.

    Numbers are samples added. In the end the process is killed, and continues from its last checkpoint.
    """
    buffer, oracle = make(folder, capacity), make("device", capacity)
    saved, expected, kept = None, None, copy.deepcopy(oracle.state_dict())
    for action in [*actions, "kill"]:
        match action:
            case int(size):
                add((buffer, oracle), size)
            case "sample" if oracle.stored:
                assert_same(buffer.sample(3), oracle.sample(3))
            case "save" | "save half":
                saved, expected = copy.deepcopy(buffer.state_dict()), copy.deepcopy(oracle.state_dict())
                if action == "save":  # else killed between writing the checkpoint and telling the buffer
                    buffer.commit(saved)
                    kept = expected
            case "fail to save":
                buffer.state_dict()
            case "roll back" if saved is not None:
                buffer.load_state_dict(saved)
                oracle.load_state_dict(expected)
            case "kill" | "kill, load only":
                buffer.close()
                buffer, oracle = make(folder, capacity), make("device", capacity)
                oracle.load_state_dict(kept)
                assert buffer.offered == oracle.offered
                assert not oracle.stored or assert_same(buffer.contents(), oracle.contents()) is None
                if saved is not None:
                    buffer.load_state_dict(saved)
                    oracle.load_state_dict(expected)
                if saved is not None and action == "kill":  # what Learner.load does
                    buffer.commit()
                    kept = expected
    return buffer, oracle


@given(st.lists(st.integers(0, 15) | ACTIONS, min_size=5, max_size=40), st.integers(1, 12))
@example([9, "save", 15, 15, "save half", "kill, load only", 15, 15], 5)
@settings(max_examples=100, deadline=None)
def test_killed_at_any_moment_it_continues_from_the_last_checkpoint(tmp_path_factory, actions, capacity):
    def add(buffers, size):
        for each in buffers:
            each.add(*batch(each.offered, size))

    folder = tmp_path_factory.mktemp("any") / "buffer"
    buffer, oracle = live_through(actions, folder, capacity, make, add, assert_same)
    assert_continue_alike(buffer, oracle)
    buffer.close()
    shutil.rmtree(folder.parent)


def test_a_state_does_not_copy_the_samples(folder):
    buffer = make(folder, 300)
    buffer.add(*batch(0, 300))
    state = buffer.state_dict()
    assert [len(column) for column in state["columns"]] == [0, 0, 0]
    assert len(state["rows"]) == len(state["stamps"]) == 300


def test_rows_are_used_again(folder):
    """At most twice the capacity, and the minibatch at hand, though every checkpoint pins what it refers to."""
    buffer, twin = make(folder, 20), make("device", 20)
    for step in range(300):
        for each in (buffer, twin):
            each.add(*batch(step * 5, 5))
            each.seen.fill_(20)  # as if the stream had just begun: most samples are kept
            each.offered = 20
        if step % 7 == 0:
            buffer.commit()
        assert len(buffer._storage._referenced) <= 2 * 20 + 5
    assert_same(buffer.contents(), twin.contents())


def test_a_checkpoint_that_is_not_the_last(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 10))
    old = copy.deepcopy(buffer.state_dict())
    buffer.commit(old)
    buffer.add(*batch(10, 100))
    buffer.commit()
    buffer.add(*batch(110, 1000))
    twin = make("device")
    for start, size in ((0, 10), (10, 100), (110, 1000)):
        twin.add(*batch(start, size))
    with pytest.raises(hf.StorageError, match=r"does not hold the samples of this state.*written or loaded last"):
        buffer.load_state_dict(old)
    assert_continue_alike(buffer, twin)


def test_a_state_that_makes_no_sense(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 10))
    state = copy.deepcopy(buffer.state_dict())
    for rows in (state["rows"] - 1, state["rows"] + 1000, state["rows"].flip(0)):
        with pytest.raises(hf.StorageError, match="does not hold the samples of this state"):
            buffer.load_state_dict({**state, "rows": rows})
    with pytest.raises(hf.UsageError, match="contradicts itself"):
        buffer.load_state_dict({**state, "rows": state["rows"][:3]})
    assert_same(buffer.contents(), batch(0, 10))


def test_from_memory_to_a_folder_but_not_back(folder):
    memory, other = make("device"), make("host")
    memory.add(*batch(0, 40))
    buffer = make(folder, seed=3)
    buffer.add(*batch(7, 3))
    buffer.load_state_dict(memory.state_dict())
    other.load_state_dict(memory.state_dict())
    with pytest.raises(hf.UsageError, match=r"in the folder .*, this one in memory; make it with storage=Path\("):
        memory.load_state_dict(buffer.state_dict())
    assert_continue_alike(buffer, memory)
    assert other.offered == 40


# --- learners --------------------------------------------------------------------------------------------------------


def learner(place, kind=hf.ConsistencyReplay, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(24, 5))
    options = {"augment": lambda x: x.float() / 255, "seed": seed, "storage": place}
    return kind(model, torch.optim.Adam(model.parameters()), buffer_size=12, **options)


def minibatches(count):
    return [(IMAGES[8 * step : 8 * step + 8], torch.arange(8) % 5) for step in range(count)]


@pytest.mark.parametrize("kind", [hf.ConsistencyReplay, hf.ExperienceReplay])
@pytest.mark.parametrize("place", ["host", "folder"])
def test_learners_learn_the_same_and_continue_exactly(tmp_path, kind, place):
    place = tmp_path / "buffer" if place == "folder" else place
    whole, file = learner("device", kind), tmp_path / "kept.safetensors"
    losses = [whole.observe(x, y) for x, y in minibatches(20)]
    got = []
    one = learner(place, kind)
    for step, (x, y) in enumerate(minibatches(20)):
        got.append(one.observe(x, y))
        if step % 6 == 3:
            one.save(file, {"step": step + 1})
        if step == 11:  # two steps after a checkpoint
            one.buffer.close()
            one = learner(place, kind, seed=9)
            back = one.load(file)["step"]
            assert back == 10
            got[back:] = [one.observe(x, y) for x, y in minibatches(12)[back:]]
    assert got == losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(one.model.state_dict()[name], value)
    assert file.stat().st_size < 20_000


def growing(place):
    """A learner whose head has 3 outputs at first; the stream has 5 classes from the fourth minibatch on."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(24, 3))
    descent = torch.optim.Adam(model.parameters())
    return hf.ConsistencyReplay(
        model, descent, buffer_size=12, head="1", augment=lambda x: x.float() / 255, storage=place
    )


@pytest.mark.parametrize("stops", [(2, 3), (3, 6), (4, 9), (5, 6), (2, 7)], ids=str)
@pytest.mark.parametrize("half", [False, True])
def test_logits_that_are_widened(tmp_path, stops, half):
    """Killed so many steps after a checkpoint, before and after the head has grown; even before the folder knew."""
    folder, file = tmp_path / "buffer", tmp_path / "kept.safetensors"
    stream = [(x, y % (3 if step < 3 else 5)) for step, (x, y) in enumerate(minibatches(12))]
    whole = growing("device")
    losses = [whole.observe(x, y) for x, y in stream]
    saved, killed = stops
    one = growing(folder)
    for x, y in stream[:saved]:
        one.observe(x, y)
        one.buffer.commit()
    with pytest.MonkeyPatch.context() as patch:
        if half:
            patch.setattr(hf.Reservoir, "commit", lambda *_: None)
        one.save(file)
    for x, y in stream[saved:killed]:
        one.observe(x, y)
    one.buffer.close()
    again = growing(folder)
    again.load(file)
    assert [again.observe(x, y) for x, y in stream[saved:]] == losses[saved:]
    assert_same(again.buffer.contents(), whole.buffer.contents())
    again.save(file)
    names = ["0-3x4x2-uint8", "1-int64", "2-5-float32", "stamps"]
    assert sorted(each.name for each in folder.glob("*.rows")) == [f"{name}.rows" for name in names]


@pytest.mark.parametrize("place", ["device", "folder"])
def test_widened_while_nothing_is_stored(folder, place):
    buffer = make(folder if place == "folder" else place)
    buffer.add(*batch(0, 0))
    buffer.widen(7)
    x, y, logits = batch(0, 3)
    buffer.add(x, y, torch.cat([logits, logits[:, :2]], dim=1))
    assert buffer.contents().logits.shape == (3, 7)


def test_a_full_disk_while_logits_are_widened(folder):
    one, twin = growing(folder), growing("device")
    stream = [(x, y % (3 if step < 3 else 5)) for step, (x, y) in enumerate(minibatches(8))]
    for x, y in stream[:3]:
        one.observe(x, y)
        twin.observe(x, y)
    size = sum(file.stat().st_size for file in folder.glob("2-3-*.rows"))
    with files_limited_to(size), pytest.raises(hf.StorageError, match="File too large"):
        one.observe(*stream[3])
    for x, y in stream[3:]:
        assert one.observe(x, y) == twin.observe(x, y)
    assert_same(one.buffer.contents(), twin.buffer.contents())


# --- what can go wrong -----------------------------------------------------------------------------------------------


@contextmanager
def files_limited_to(size):
    """No file can grow beyond so many bytes, which is how a full disk looks from here."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_noticed_before_a_step_and_nothing_is_lost(folder):
    one, twin = learner(folder), learner("device")
    for x, y in minibatches(1):
        one.observe(x, y)
        twin.observe(x, y)
    x, y = minibatches(2)[1]
    with files_limited_to(300), pytest.raises(hf.StorageError, match=r"File too large.*lost: make room there.*go on"):
        one.observe(x, y)
    for x, y in minibatches(20)[1:]:
        assert one.observe(x, y) == twin.observe(x, y)
    assert_same(one.buffer.contents(), twin.buffer.contents())


def test_a_disk_that_is_full_although_there_was_room(folder, monkeypatch):
    """Not every system reserves it."""
    monkeypatch.delattr(os, "posix_fallocate")
    buffer, twin = make(folder), make("device")
    for each in (buffer, twin):
        each.add(*batch(0, 5))
    with files_limited_to(200), pytest.raises(hf.StorageError, match="File too large"):
        buffer.add(*batch(5, 5))
    assert buffer.offered == 5
    assert_same(buffer.contents(), twin.contents())
    buffer.commit()
    for start in (5, 10):
        buffer.add(*batch(start, 5))
    assert buffer.stored == 10


def test_a_closed_buffer_says_that_it_is(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 3))
    buffer.close()
    for use in (lambda: buffer.add(*batch(3, 3)), lambda: buffer.sample(2), buffer.contents, buffer.commit):
        with pytest.raises(hf.StorageError, match="was closed; a new learner"):
            use()
    buffer.close()


def test_another_capacity_and_other_samples(folder):
    make(folder).close()
    with pytest.raises(hf.UsageError, match=r"holds a buffer of 10 samples, not 11\. Use a buffer size of 10"):
        make(folder, 11)
    again = make(folder)
    again.add(*batch(0, 3))
    again.commit()
    again.close()
    again = make(folder)
    with pytest.raises(hf.UsageError, match=r"x is missing, stored is \(3, 4, 2\) uint8.*x\['left'\] is"):
        again.add(*batch(0, 3, "nested"))
    other = make("device")
    other.add(*batch(0, 3, "nested"))
    with pytest.raises(hf.UsageError, match="do not fit"):
        again.load_state_dict(other.state_dict())
    assert_same(again.contents(), batch(0, 3))


def left_behind(place, kind, outputs=4, features=24):
    """A learner of flat images whose buffer is in the folder."""
    with seeded_globally(0, "init"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(features, 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=10, storage=place)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ((hf.ExperienceReplay,), (hf.ExperienceReplay, 4, 12), "do not fit"),
        ((hf.ConsistencyReplay,), (hf.ConsistencyReplay, 4, 12), "do not fit"),
        ((hf.ConsistencyReplay,), (hf.ConsistencyReplay, 5), "buffer holds logits of 4"),
        ((hf.ConsistencyReplay,), (hf.ExperienceReplay,), "logits must be given for every sample or for none"),
        ((hf.ExperienceReplay,), (hf.ConsistencyReplay,), "samples without logits"),
    ],
    ids=["er samples", "consistency samples", "outputs", "no logits", "logits"],
)
def test_what_another_learner_left_is_refused_before_anything_changes(folder, before, after, message):
    first = left_behind(folder, *before)
    first.observe(IMAGES[:6].float(), torch.arange(6) % 4)
    first.buffer.commit()
    first.buffer.close()
    taught = left_behind(folder, *after)
    weights, random = copy.deepcopy(taught.model.state_dict()), taught.buffer.generator.get_state()
    x = IMAGES[:6].float() if after[2:] != (12,) else IMAGES[:6, :, :2].float()
    with pytest.raises(hf.UsageError, match=message):
        taught.observe(x, torch.arange(6) % 4)
    for name, value in taught.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert torch.equal(taught.buffer.generator.get_state(), random)
    assert taught.buffer.stored == 6


@pytest.mark.parametrize("kind", [hf.ConsistencyReplay, hf.ExperienceReplay])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_of_any_form_go_where_others_were_left_uncommitted(folder, kind, dtype):
    left_behind(folder, hf.ConsistencyReplay).observe(IMAGES[:6].float(), torch.arange(6) % 4)
    gc.collect()
    taught = left_behind(folder, kind)
    taught.model.to(dtype)
    taught.observe(IMAGES[6:9].to(dtype), torch.arange(3))
    assert torch.equal(taught.buffer.contents().x, IMAGES[6:9].to(dtype))
    taught.buffer.commit()
    assert len(list(folder.glob("0-*.rows"))) == 1


def test_samples_without_elements(folder):
    with pytest.raises(hf.UsageError, match="x has no elements"):
        make(folder).add(torch.zeros(3, 0), torch.zeros(3))


@pytest.fixture
def kept(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 30))
    buffer.commit()
    buffer.close()
    return folder


def test_another_version(kept):
    about = json.loads((kept / "buffer.json").read_text())
    (kept / "buffer.json").write_text(json.dumps({**about, "version": 9}))
    with pytest.raises(hf.StorageError, match=r"format version 9; this Holdfast reads version 1.*another folder"):
        make(kept)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"version": 1',
        "[" * 100_000,
        '{"version": 1}',
        '{"capacity": 10}',
    ],
)
def test_a_damaged_description(kept, text):
    (kept / "buffer.json").write_text(text)
    with pytest.raises(hf.StorageError, match=r"buffer\.json is damaged.*intact copy"):
        make(kept)


@pytest.mark.parametrize("other", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"])
def test_a_description_that_is_no_regular_file_is_refused_and_nobody_waits_for_it(other, tmp_path):
    make(tmp_path / "kept").close()
    (tmp_path / "kept" / "buffer.json").unlink()
    other(tmp_path / "kept" / "buffer.json")
    with pytest.raises(hf.HoldfastError, match=r"kept"):
        make(tmp_path / "kept")


def test_every_file_cut_short_or_missing_is_noticed(kept):
    names = [file.name for file in kept.iterdir() if file.name not in ("lock", "buffer.json")]
    assert len(names) == 5
    for name in names:
        whole = (kept / name).read_bytes()
        for damaged in (whole[: len(whole) // 3], b""):
            (kept / name).write_bytes(damaged)
            with pytest.raises((hf.StorageError, hf.CheckpointError), match=r"damaged|does not hold"):
                make(kept)
        (kept / name).write_bytes(whole)
    make(kept)


def flip(path, row, size, bit):
    """Flip one bit of a row of so many bytes."""
    content = bytearray(path.read_bytes())
    content[row * size + bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


def test_every_flipped_bit_of_a_stored_sample_is_noticed(kept):
    """And of no other: rows that are free may hold anything."""
    used = set(checkpoint.read(kept / "state.safetensors", "buffer").state["rows"].tolist())
    files = {"0-3x4x2-uint8.rows": 24, "1-int64.rows": 8, "2-5-bfloat16.rows": 10}
    assert used != set(range(30))
    for name, size in files.items():
        whole = (kept / name).read_bytes()
        for row, bit in [(min(used), 0), (max(used), 8 * size - 1), (sorted(used)[4], 37)]:
            flip(kept / name, row, size, bit)
            with pytest.raises(hf.StorageError, match=rf"{name} is damaged: 1 of 10 samples .* intact copy"):
                make(kept)
            (kept / name).write_bytes(whole)
        for row in set(range(len(whole) // size)) - used:
            flip(kept / name, row, size, 3)
    make(kept)


def test_bits_flipped_before_a_checkpoint_is_loaded(folder, tmp_path):
    learner = learner_in(folder)
    learner.observe(*labelled(0))
    learner.save(tmp_path / "checkpoint")
    flip(folder / "0-24-float32.rows", 3, 96, 11)
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    other = learner_in(tmp_path / "other")
    learner.buffer.close()
    (folder / "state.safetensors").rename(tmp_path / "elsewhere")  # it would be noticed when opened
    again = learner_in(folder)
    with pytest.raises(hf.StorageError, match="damaged: 1 of 8 samples"):
        again.load(tmp_path / "checkpoint")
    assert all(torch.equal(other.model.state_dict()[name], again.model.state_dict()[name]) for name in before)


def learner_in(folder):
    torch.manual_seed(0)
    model = torch.nn.Linear(24, 5)
    return hf.ConsistencyReplay(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=10, storage=folder)


def labelled(start):
    x, ids, _ = batch(start, 8)
    return x.flatten(1).float(), ids % 5


def test_what_was_found_in_order_is_not_read_again(folder, tmp_path, monkeypatch):
    learner = learner_in(folder)
    learner.observe(*labelled(0))
    learner.save(tmp_path / "checkpoint")
    learner.buffer.close()
    summed, real = [], RowFile.checksums
    monkeypatch.setattr(RowFile, "checksums", lambda file, rows: summed.append(len(rows)) or real(file, rows))
    again = learner_in(folder)
    again.load(tmp_path / "checkpoint")
    assert sum(summed) == 3 * 8


def test_widened_logits_are_summed_anew(folder):
    buffer = make(folder)
    x, y, logits = batch(0, 30)
    buffer.add(x, y, logits)
    buffer.widen(7)
    buffer.commit()
    buffer.close()
    make(folder).close()
    row = checkpoint.read(folder / "state.safetensors", "buffer").state["rows"][2]
    flip(folder / "2-7-bfloat16.rows", int(row), 14, 100)
    with pytest.raises(hf.StorageError, match=r"2-7-bfloat16.rows is damaged: 1 of 10"):
        make(folder)


def test_a_folder_of_something_else(folder):
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(hf.UsageError, match="neither empty nor the folder of a buffer"):
        make(folder)
    assert [file.name for file in folder.iterdir()] == ["thesis.tex"]
    with pytest.raises(hf.StorageError, match="cannot be used"):
        make(folder / "thesis.tex")


def test_left_by_a_process_killed_while_it_made_the_folder(folder):
    folder.mkdir()
    (folder / "lock").touch()
    (folder / ".buffer.json-123-456").write_text("{")
    make(folder).add(*batch(0, 3))
    assert not list(folder.glob(".*"))


def test_one_buffer_at_a_time(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 5))
    with pytest.raises(hf.StorageError, match="in use by another buffer"):
        make(folder)

    def in_another_process():
        with pytest.raises(hf.StorageError, match="in use by another buffer"):
            make(folder)

    assert ended([forked(in_another_process)]) == [0]
    buffer.close()
    with pytest.raises(hf.StorageError, match="was closed"):
        buffer.add(*batch(5, 5))
    make(folder).close()
    again = make(folder)
    del again  # closed with its last reference
    make(folder)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_that_would_write_to_the_same_files_is_refused(folder, tmp_path, duplicate):
    one, twin, file = learner(folder), learner("device"), tmp_path / "saved.safetensors"
    for x, y in minibatches(3):
        assert one.observe(x, y) == twin.observe(x, y)
    with pytest.raises(hf.StorageError, match=r"cannot be copied or pickled.*Save the learner, copy the folder"):
        duplicate(one.buffer._storage)
    if duplicate is copy.deepcopy:
        with pytest.raises(hf.StorageError, match="cannot be copied"):
            copy.deepcopy(one)
    one.save(file)
    assert_same(one.buffer.contents(), twin.buffer.contents())


def assert_a_fork_leaves_alone(buffer, x):
    """A fork of this process is refused every use of the buffer, which goes on here as if there were none."""

    def use_it():
        uses = [lambda: buffer.add(x + 90, torch.arange(4)), lambda: buffer.sample(2), buffer.commit]
        for use in uses:
            with pytest.raises(hf.StorageError, match="this one is a fork of it"):
                use()

    buffer.add(x, torch.arange(4))
    assert ended([forked(use_it)]) == [0]
    assert torch.equal(buffer.contents().x, x)
    buffer.commit()
    buffer.close()


def test_a_forked_process_leaves_the_samples_alone(folder):
    assert_a_fork_leaves_alone(hf.Reservoir(4, storage=folder), torch.arange(4))
    assert hf.Reservoir(4, storage=folder).contents().x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("way", ["removed", "moved", "replaced", "one file"])
def test_a_folder_that_is_gone_cannot_be_saved(folder, tmp_path, way):
    one, file, elsewhere = learner(folder), tmp_path / "saved.safetensors", tmp_path / "elsewhere"
    one.observe(*minibatches(1)[0])
    state = one.buffer.state_dict()
    match way:
        case "removed":
            shutil.rmtree(folder)
        case "moved" | "replaced":
            folder.rename(elsewhere)
            if way == "replaced":
                shutil.copytree(elsewhere, folder)
        case "one file":
            (folder / "1-int64.rows").unlink()
    there = folder.exists()
    for use in (lambda: one.save(file), one.buffer.commit, lambda: one.buffer.commit(state)):
        with pytest.raises(hf.StorageError, match=r"was removed, moved or replaced.*Put the folder back"):
            use()
    assert not file.exists()
    assert folder.exists() is there
    if way == "moved":
        elsewhere.rename(folder)
        one.save(file)
        one.buffer.close()
        assert learner(folder).buffer.stored == 8


def test_a_state_that_is_given_out_is_on_the_disk(folder, monkeypatch):
    """The rows, their files' names in the folder, the description, and the folder's name where it is."""
    flushed, real = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.add(os.fstat(handle).st_ino) or real(handle))
    buffer = make(folder)
    assert {folder.parent.stat().st_ino, (folder / "buffer.json").stat().st_ino} <= flushed
    buffer.add(*batch(0, 3))
    flushed.clear()
    buffer.state_dict()
    assert {path.stat().st_ino for path in (folder, *folder.glob("*.rows"))} <= flushed


def test_a_folder_that_describes_its_columns_is_read(kept):
    columns = [{"name": "x", "shape": [3, 4, 2], "dtype": "uint8"}]
    (kept / "buffer.json").write_text(json.dumps({"version": 1, "capacity": 10, "columns": columns}))
    twin = make("device")
    twin.add(*batch(0, 30))
    assert_continue_alike(make(kept), twin)


def test_the_buffers_of_two_learners_need_two_folders(folder, tmp_path):
    one, file = learner(folder), tmp_path / "kept.safetensors"
    one.observe(*minibatches(1)[0])
    one.save(file)
    with pytest.raises(hf.StorageError, match="does not hold the samples"):
        learner(tmp_path / "other").load(file)
    with pytest.raises(hf.UsageError, match="this one in memory"):
        learner("device").load(file)
    assert checkpoint.read(file, "learner").state["learner"]["buffer"]["folder"] == str(folder)
