"""Where a buffer's samples are makes no difference; those in a folder survive whatever ends the process."""

import copy
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast import checkpoint, storage
from holdfast.rng import generator

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
    return hf.buffer.leaves([part for part in draw if part is not None], "draw").values()


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


def test_only_a_window_of_a_file_is_mapped_at_a_time(folder, monkeypatch):
    """However small it is, everything is found."""
    monkeypatch.setattr(storage, "WINDOW", 100)
    monkeypatch.setattr(storage, "AROUND", 0)
    one, other = make("device", 200), make(folder, 200)
    for buffer in (one, other):
        buffer.add(*batch(0, 300))
    for _ in range(20):
        assert_same(one.sample(7), other.sample(7))
        assert other._storage._columns[0]._touched <= 100 + 7 * 24


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
    buffer.keep()
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
    buffer.keep()
    contents = buffer.contents()
    buffer.close()
    folder.rename(tmp_path / "elsewhere")
    assert_same(make(tmp_path / "elsewhere").contents(), contents)


# --- states ----------------------------------------------------------------------------------------------------------

actions = st.sampled_from(["save", "save half", "fail to save", "roll back", "kill", "kill, load only", "sample"])


@given(st.lists(st.integers(0, 15) | actions, min_size=5, max_size=40), st.integers(1, 12))
@example([9, "save", 15, 15, "save half", "kill, load only", 15, 15], 5)
@settings(max_examples=100, deadline=None)
def test_killed_at_any_moment_it_continues_from_the_last_checkpoint(tmp_path_factory, actions, capacity):
    """Against a buffer in memory whose states are copied whole. Numbers are samples added."""
    folder = tmp_path_factory.mktemp("any") / "buffer"
    buffer, oracle = make(folder, capacity), make("device", capacity)
    saved, expected, kept = None, None, copy.deepcopy(oracle.state_dict())
    for action in [*actions, "kill"]:
        match action:
            case int(size):
                for each in (buffer, oracle):
                    each.add(*batch(oracle.offered, size))
            case "sample" if oracle.stored:
                assert_same(buffer.sample(3), oracle.sample(3))
            case "save" | "save half":
                saved, expected = copy.deepcopy(buffer.state_dict()), copy.deepcopy(oracle.state_dict())
                if action == "save":  # else killed between writing the checkpoint and telling the buffer
                    buffer.keep(saved)
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
                    buffer.keep()
                    kept = expected
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
            buffer.keep()
        assert buffer._storage._end <= 2 * 20 + 5
    assert_same(buffer.contents(), twin.contents())


def test_a_checkpoint_that_is_not_the_last(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 10))
    old = copy.deepcopy(buffer.state_dict())
    buffer.keep(old)
    buffer.add(*batch(10, 100))
    buffer.keep()
    buffer.add(*batch(110, 1000))
    twin = make("device")
    for start, size in ((0, 10), (10, 100), (110, 1000)):
        twin.add(*batch(start, size))
    with pytest.raises(hf.StorageError, match=r"does not hold the samples of this state.*written or loaded last"):
        buffer.load_state_dict(old)
    assert_continue_alike(buffer, twin)


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
    buffer.keep()
    for start in (5, 10):
        buffer.add(*batch(start, 5))
    assert buffer.stored == 10


def test_another_capacity_and_other_samples(folder):
    make(folder).close()
    with pytest.raises(hf.UsageError, match=r"holds a buffer of 10 samples, not 11\. Use a buffer size of 10"):
        make(folder, 11)
    buffer = make(folder)
    buffer.add(*batch(0, 3))
    buffer.close()
    with pytest.raises(hf.UsageError, match=r"x \(3, 4, 2\) uint8, y .*; these are x\['left'\] .*delete this one"):
        make(folder).add(*batch(0, 3, "nested"))
    again = make(folder)
    again.add(*batch(0, 3))
    again.keep()
    again.close()
    again = make(folder)
    with pytest.raises(hf.UsageError, match="samples of another form"):
        again.add(*batch(0, 3, "nested"))
    other = make("device")
    other.add(*batch(0, 3, "nested"))
    with pytest.raises(hf.UsageError, match="do not fit"):
        again.load_state_dict(other.state_dict())
    assert_same(again.contents(), batch(0, 3))


def test_samples_without_elements(folder):
    with pytest.raises(hf.UsageError, match="x has no elements"):
        make(folder).add(torch.zeros(3, 0), torch.zeros(3))


@pytest.fixture
def kept(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 30))
    buffer.keep()
    buffer.close()
    return folder


def test_another_version(kept):
    about = json.loads((kept / "buffer.json").read_text())
    (kept / "buffer.json").write_text(json.dumps({**about, "version": 9}))
    with pytest.raises(hf.StorageError, match=r"format version 9; this Holdfast reads version 1.*another folder"):
        make(kept)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 1', "[" * 100_000, '{"version": 1, "capacity": 10}'])
def test_a_damaged_description(kept, text):
    (kept / "buffer.json").write_text(text)
    with pytest.raises(hf.StorageError, match=r"buffer\.json is damaged.*intact copy"):
        make(kept)


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
    (folder / storage.SCRATCH).write_text("{")
    make(folder).add(*batch(0, 3))


def test_one_buffer_at_a_time(folder):
    buffer = make(folder)
    buffer.add(*batch(0, 5))
    with pytest.raises(hf.StorageError, match="in use by another buffer"):
        make(folder)
    script = "import sys; from pathlib import Path; import holdfast as hf; hf.Reservoir(10, storage=Path(sys.argv[1]))"
    other = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)
    assert "in use by another buffer" in other.stderr
    buffer.close()
    with pytest.raises(hf.StorageError, match="cannot be used"):
        buffer.add(*batch(5, 5))
    make(folder).close()
    again = make(folder)
    del again  # closed with its last reference
    make(folder)


def test_the_buffers_of_two_learners_need_two_folders(folder, tmp_path):
    one, file = learner(folder), tmp_path / "kept.safetensors"
    one.observe(*minibatches(1)[0])
    one.save(file)
    with pytest.raises(hf.StorageError, match="does not hold the samples"):
        learner(tmp_path / "other").load(file)
    with pytest.raises(hf.UsageError, match="this one in memory"):
        learner("device").load(file)
    assert checkpoint.read(file, "learner").state["learner"]["buffer"]["folder"] == str(folder)
