"""The file a state is kept in: everything comes back exactly, nothing else is taken for one, writing never destroys."""

import errno
import json
import math
import os
import pickle
import resource
import time
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

import holdfast as hf
from forked import forked
from holdfast import checkpoint

STATE = {
    "weights": torch.tensor([[1.5, -0.0], [math.nan, math.inf]]),
    "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "count": torch.tensor(2**40),
    "images": torch.arange(24, dtype=torch.uint8).view(2, 3, 4),
    "empty": torch.zeros(0, 3),
    "flags": torch.tensor([True, False]),
    "nested": {0: {"step": 3, "betas": (0.9, 0.999)}, "name": "linf", "list": [1, None, True, {}, []]},
    "numbers": [0.1, -0.0, math.inf, 10**30],
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kept" / "state.safetensors"


@pytest.fixture
def written(path):
    checkpoint.write(path, "learner", STATE, {"seed": 3})
    return path


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.flatten().view(torch.uint8).equal(other.flatten().view(torch.uint8))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert repr(one) == repr(other)


def test_everything_comes_back(written):
    about, state = checkpoint.read(written, "learner")
    assert about == {"seed": 3}
    assert_same(state, STATE)
    assert [file.name for file in written.parent.iterdir()] == [written.name]


def test_names_that_spell_alike(path):
    one, two, three, four, five, six, seven, eight = torch.arange(8.0).view(8, 1)
    state = {0: one, "0": two, "a": {"b": three, "b'": four}, "a.b": five, "a.b'": [six], "a.b'.0": (seven, eight)}
    checkpoint.write(path, "run", state)
    assert_same(checkpoint.read(path, "run").state, state)


def test_tensors_that_share_memory_or_are_not_contiguous(path):
    base = torch.arange(12.0).view(3, 4)
    checkpoint.write(path, "run", {"a": base, "b": base, "c": base[1:], "d": base.t(), "e": base[:, 1]})
    state = checkpoint.read(path, "run").state
    for name, expected in zip("abcde", (base, base, base[1:], base.t(), base[:, 1]), strict=True):
        assert torch.equal(state[name], expected)
    state["a"].zero_()
    assert torch.equal(state["b"], base)
    checkpoint.write(path, "run", {})  # what was read does not depend on the file
    assert torch.equal(state["b"], base)


def test_what_a_checkpoint_cannot_hold(path):
    with pytest.raises(hf.UsageError, match=r"state\.a\.1 is a object, which a checkpoint cannot hold"):
        checkpoint.write(path, "run", {"a": [1, object()]})
    assert not path.exists()


def test_a_missing_file(path):
    with pytest.raises(hf.CheckpointError, match="there is no checkpoint"):
        checkpoint.read(path, "run")
    path.mkdir(parents=True)
    with pytest.raises(hf.CheckpointError, match=str(path)):
        checkpoint.read(path, "run")


def test_another_kind(written):
    with pytest.raises(hf.CheckpointError, match="of a learner, not of a run"):
        checkpoint.read(written, "run")


def test_another_version(written, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 3)
    with pytest.raises(hf.CheckpointError, match=r"version 2; this Holdfast reads version 3.*start anew"):
        checkpoint.read(written, "learner")


def test_every_truncation_is_noticed(written):
    whole = written.read_bytes()
    for length in [*range(0, len(whole), 61), len(whole) - 1]:
        written.write_bytes(whole[:length])
        with pytest.raises(hf.CheckpointError, match=r"damaged.*anew"):
            checkpoint.read(written, "learner")


def test_every_flipped_bit_is_noticed(written):
    whole = bytearray(written.read_bytes())
    for at in range(0, len(whole), 7):
        changed = whole.copy()
        changed[at] ^= 1 << at % 8
        written.write_bytes(changed)
        try:
            _, state = checkpoint.read(written, "learner")
        except hf.CheckpointError:
            continue
        assert_same(state, STATE)  # only in what carries no meaning, such as padding


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


@pytest.mark.parametrize("foreign", ["pickle", "torch", "safetensors", "text", "header", "content"])
def test_foreign_files_are_refused_and_never_executed(path, foreign, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path.parent.mkdir()
    match foreign:
        case "pickle":
            path.write_bytes(pickle.dumps(Trap()))
        case "torch":
            torch.save({"model": Trap()}, path)
        case "safetensors":
            save_file({"a": torch.zeros(2)}, path)
        case "text":
            path.write_text("not a checkpoint at all, though long enough for a header" * 10)
        case "header":
            save_file({"a": torch.zeros(2)}, path, {"holdfast": "[" * 100_000})
        case "content":
            content = json.dumps({"kind": "run", "about": {}, "state": {"tensor": "nowhere"}})
            header = {"version": checkpoint.VERSION, "checksum": checkpoint._checksum(content, {}), "content": content}
            save_file({}, path, {"holdfast": json.dumps(header)})
    with pytest.raises(hf.CheckpointError, match=r"damaged|not a Holdfast checkpoint"):
        checkpoint.read(path, "run")
    assert not (tmp_path / "sprung").exists()


def failing(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("place", ["pathlib.Path.write_bytes", "holdfast.files.flush", "pathlib.Path.replace"])
def test_failing_anywhere_keeps_the_old_one(written, monkeypatch, place):
    with monkeypatch.context() as patch:
        patch.setattr(place, failing)
        with pytest.raises(hf.CheckpointError, match=r"No space left on device\. Make room.*untouched"):
            checkpoint.write(written, "learner", {"new": 1})
    assert_same(checkpoint.read(written, "learner").state, STATE)
    assert [file.name for file in written.parent.iterdir()] == [written.name]


def test_a_disk_that_fills_up_while_writing(written):
    """A limit on the size of files makes the write itself fail half way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(hf.CheckpointError, match="could not be written"):
            checkpoint.write(written, "learner", {"new": torch.rand(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_same(checkpoint.read(written, "learner").state, STATE)
    assert [file.name for file in written.parent.iterdir()] == [written.name]


def test_left_by_a_process_killed_while_writing(written):
    scratch = written.with_name(f".{written.name}.0123.new")
    scratch.write_bytes(written.read_bytes()[:100])
    os.utime(scratch, (0, 0))
    assert_same(checkpoint.read(written, "learner").state, STATE)
    checkpoint.write(written, "learner", {"new": 1})
    assert checkpoint.read(written, "learner").state == {"new": 1}
    assert not scratch.exists()


def test_processes_that_write_the_same_checkpoint_do_each_other_no_harm(path):
    def write(name):
        for turn in range(80):
            rows = torch.full((5000 + turn % 2,), turn)
            checkpoint.write(path, "run", {"by": name, "turn": turn, "rows": rows})

    writing, codes, seen = [forked(partial(write, name)) for name in "abc"], [], set()
    while writing:
        number, status = os.waitpid(writing[0], os.WNOHANG)
        if number:
            writing.remove(number)
            codes.append(status)
        if path.exists():
            state = checkpoint.read(path, "run").state  # whole, whoever wrote it
            assert bool((state["rows"] == state["turn"]).all())
            seen.add(state["by"])
        time.sleep(0.002)  # leaves the processor to those who write
    assert codes == [0, 0, 0]
    assert len(seen) > 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_discard(written, tmp_path):
    written.with_name(f".{written.name}.0123.new").touch()
    checkpoint.discard(written)
    assert list(tmp_path.iterdir()) == []
    checkpoint.discard(written)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"])
def test_what_is_no_regular_file_is_refused_and_nobody_waits_for_it(make, tmp_path):
    make(tmp_path / "state")
    with pytest.raises(hf.HoldfastError):
        checkpoint.read(tmp_path / "state", "learner")
