"""Locks on files: one holder at a time, and none after the holder is gone."""

import os
import threading

from holdfast.locks import held, lock


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
