"""Files that are whole or not there; locks: one holder at a time, and none after the holder is gone."""

import os
import threading

import pytest

from holdfast.files import held, lock, replacing


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


def test_one_holder_at_a_time(tmp_path):
    path = tmp_path / "file"
    path.touch()
    one, other = (os.open(path, os.O_RDWR) for _ in range(2))
    assert lock(one)
    assert not lock(other, wait=False)
    os.close(one)
    assert lock(other, wait=False)
    os.close(other)


def test_whoever_waited_for_a_file_that_was_renamed_takes_one_of_its_own(tmp_path):
    path, order, entered = tmp_path / "scratch", [], threading.Event()

    def wait():
        entered.set()
        with held(path):
            order.append(path.stat().st_ino)

    with held(path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        entered.wait()
        order.append(path.stat().st_ino)
        path.rename(tmp_path / "done")
    waiting.join(10)
    assert len(order) == 2
    assert order[0] == (tmp_path / "done").stat().st_ino != order[1]
