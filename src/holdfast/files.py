"""Files that are written whole or not at all, locks that end with their process, and errors of the system in words."""

import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from safetensors import SafetensorError

__all__ = ["ABANDONED", "flush", "lock", "locked", "read_regular", "remove_scratch", "replacing", "telling", "walked"]

ABANDONED = 3600.0
"""Seconds after which a scratch file or folder belongs to a process that was killed: nothing takes longer to write."""


@contextmanager
def telling(kind: type[Exception], what: str, advice: str = "") -> Iterator[None]:
    """Turn an error of the system inside the block into one of this kind: `what`, the reason, and the `advice`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise kind(f"{what}: {getattr(error, 'strerror', None) or error}. {advice}".rstrip()) from error


def read_regular(path: Path, most: int | None = None) -> bytes:
    """The content of a file, at most so many bytes. Raises an OSError for FIFOs and devices: they may never end."""
    # Without O_NONBLOCK, opening a FIFO waits for somebody who writes to it.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is not a regular file")
        return file.read(-1 if most is None else most)


def walked(folders: Iterable[Path]) -> Iterator[tuple[Path, list[str], list[str]]]:
    """What `os.walk` gives for all the folders, links followed; each folder once, since links may lead in circles."""
    seen: set[str] = set()
    for folder in folders:
        for place, inside, names in os.walk(folder, followlinks=True):
            real = os.path.realpath(place)
            if real in seen:
                inside.clear()
            else:
                seen.add(real)
                yield Path(place), inside, names


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path` to write to. At the end of the block it replaces `path`.

    If the block raises, the old file stays and the new one is removed. A missing folder is made.
    """
    remove_scratch(path, ABANDONED)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A random name: nobody can have put a link there, through which we would write over another file.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield scratch
        flush(scratch)  # the content must be on the disk before the name says so
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    flush(path.parent)


def remove_scratch(path: Path, age: float = 0.0) -> None:
    """Remove the files that processes killed inside `replacing(path)` left, if they are `age` seconds old."""
    with suppress(OSError):  # they take up room and do no other harm
        for file in path.parent.iterdir():
            if file.name.startswith(f".{path.name}.") and file.name.endswith(".new"):
                with suppress(FileNotFoundError):
                    if time.time() - file.lstat().st_mtime >= age:
                        file.unlink()


def flush(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    folder = path.is_dir()
    with suppress(OSError) if folder else nullcontext():  # not every system can flush a folder
        handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def lock(handle: int, *, wait: bool = True) -> bool:
    """Lock an open file until it is closed. Without `wait`, False if another process has locked it.

    Without effect where such locks do not exist: outside Unix and in some network folders.
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
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block, of all that lock this folder. Without effect where `lock` has none."""
    if os.name != "posix":  # other systems cannot open folders
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(handle)
        yield
    finally:
        os.close(handle)
