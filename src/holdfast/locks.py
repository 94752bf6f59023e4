"""Locks on files, which end with the process that holds them, however that ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["held", "lock"]


def lock(handle: int, *, wait: bool = True) -> bool:
    """Lock an open file until it is closed; False, without waiting, if somebody else has it.

    Without effect where there are no such locks: on systems other than Unix, and in some network folders.
    """
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:
        return True
    try:
        flock(handle, LOCK_EX if wait else LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Be the only one in this block for `path`: a folder, or a file, which is created if it is not there.

    Inside, it may be renamed or removed: those who waited for it then take one of that name anew.
    """
    while True:
        if not path.is_dir():
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        elif os.name == "posix":
            handle = os.open(path, os.O_RDONLY)
        else:  # folders cannot be opened, nor files locked
            yield
            return
        try:
            lock(handle)
            if _is_at(handle, path):
                yield
                return
        finally:
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file still bears this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False
