"""Files that are whole or missing; locks that one process has at a time, and that end with it."""

import os
import threading
import time

import pytest

from forked import ended, forked
from holdfast.files import lock, locked, remove_scratch, replacing


def test_a_file_takes_the_place_of_another_at_the_end(tmp_path):
    path = tmp_path / "new" / "file"
    with replacing(path) as scratch:
        scratch.write_text("one")
    with replacing(path) as scratch:
        scratch.write_text("two")
        assert path.read_text() == "one"
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_could_not_be_written_leaves_all_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("one")

    def fail(scratch):
        scratch.write_text("tw")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"), replacing(path) as scratch:
        fail(scratch)
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_threads_that_write_one_file_do_not_meet(tmp_path):
    path = tmp_path / "file"

    def write(text):
        for _ in range(20):
            with replacing(path) as scratch:
                scratch.write_text(text)

    threads = [threading.Thread(target=write, args=(letter * 1000,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(path.read_text())) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_at_any_guessable_name_is_not_followed(tmp_path):
    """Whoever may write into the folder could otherwise have us write over any file of ours."""
    path, precious = tmp_path / "file", tmp_path / "precious"
    precious.write_text("precious")
    guesses = [".file.new", f".file-{os.getpid()}-{threading.get_ident()}"]
    for guess in guesses:
        (tmp_path / guess).symlink_to(precious)
    with replacing(path) as scratch:
        assert scratch.name not in guesses
        scratch.write_text("new")
    assert (path.read_text(), precious.read_text()) == ("new", "precious")
    assert not path.is_symlink()


def test_content_then_name_are_on_the_disk(tmp_path, monkeypatch):
    """A machine that loses its power after the rename must not be left with an empty file."""
    order = []
    flushed, replace = os.fsync, type(tmp_path).replace

    def fsync(handle):
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))  # noqa: PTH115, PTH119
        flushed(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(type(tmp_path), "replace", lambda *paths: (order.append("rename"), replace(*paths))[1])
    with replacing(tmp_path / "file") as scratch:
        scratch.write_text("content")
    assert order == [scratch.name, "rename", tmp_path.name]


def test_what_a_kill_left_is_removed_an_hour_later(tmp_path):
    path, old, young, other = (tmp_path / name for name in ("file", ".file.a.new", ".file.b.new", ".files.c.new"))
    for left in (old, young, other):
        left.touch()
    os.utime(old, (time.time() - 3601,) * 2)
    with replacing(path) as scratch:
        scratch.write_text("new")
    assert sorted(tmp_path.iterdir()) == sorted([path, young, other])
    remove_scratch(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_one_process_at_a_time_has_a_lock(tmp_path):
    path = tmp_path / "file"
    path.touch()
    one, other = (os.open(path, os.O_RDWR) for _ in range(2))
    assert lock(one)
    assert not lock(other, wait=False)
    os.close(one)
    assert lock(other, wait=False)
    os.close(other)


def test_threads_take_turns_in_a_locked_folder(tmp_path):
    inside, most = [], []

    def enter():
        with locked(tmp_path):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_a_lock_ends_with_the_process_that_took_it(tmp_path):
    def take():
        with locked(tmp_path):
            os.kill(os.getpid(), 9)

    assert ended([forked(take)]) == [-9]
    with locked(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_not_made_by_locking_it(tmp_path):
    with pytest.raises(FileNotFoundError), locked(tmp_path / "missing"):
        pass
    assert list(tmp_path.iterdir()) == []
