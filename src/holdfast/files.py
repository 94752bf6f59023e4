"""Files that are written whole or not at all, and locks, which end with the process that holds them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident

__all__ = ["flush", "held", "lock", "replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write a file to, which takes the place of `path` at the end of the block.

    If the block raises, what was there before stays, and nothing else is left. The folder is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}-{os.getpid()}-{get_ident()}")
    try:
        yield scratch
        flush(scratch)  # the rename must not overtake the content
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def flush(path: Path, flags: int = os.O_RDWR) -> None:
    """Wait until the file, or the names in a folder, are on the disk."""
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
