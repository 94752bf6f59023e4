"""A folder that belongs to one buffer of one process, as long as that uses it."""
# ruff: noqa: D102 (`Storage` explains the methods)

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import numpy
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast import checkpoint
from holdfast.buffer.base import Storage
from holdfast.errors import StorageError, UsageError
from holdfast.files import flush, lock, telling
from holdfast.schema import read_json, write_json

__all__ = ["ADVICE", "Array", "OwnedFolder", "checksums", "damaged", "preallocate", "write_at"]

VERSION = 1
"""Raised whenever folders are laid out differently; folders of another version are refused."""

ADVICE = "Put an intact copy of the folder in its place, or delete it to start anew."

STATE = "state.safetensors"

Array = numpy.ndarray[Any, Any]


class OwnedFolder(Storage):
    """The folder of a buffer, which holds `buffer.json` (format version, capacity), files of samples, and
    `state.safetensors`, the state that was committed last.

    It is locked against other buffers until `close`. Copies of this object, and forks of the process, may not use it.
    """

    def __init__(self, path: Path, capacity: int, device: torch.device) -> None:
        Storage.__init__(self, capacity, device, torch.device("cpu"))
        self.path = path
        self._process = os.getpid()
        self._next = secrets.randbits(62)
        self._announced: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        """How many samples are still to be written, by the first tensor of each minibatch that anybody holds."""
        with self._telling():
            self._handle = _take_possession(path)
            self._unlock = weakref.finalize(self, os.close, self._handle)
            self._check_description()

    def __reduce__(self) -> NoReturn:
        raise StorageError(
            f"the buffer in {self.path} cannot be copied or pickled: the copy would overwrite its samples. "
            "Save the learner, copy the folder, and load it into a new learner with the copy."
        )

    def committed(self) -> dict[str, Any] | None:
        return checkpoint.read(self.path / STATE, "buffer").state if (self.path / STATE).exists() else None

    def commit(self, state: dict[str, Any]) -> None:
        with self._access():
            self._check_place()
        checkpoint.write(self.path / STATE, "buffer", state)

    def close(self) -> None:
        self._unlock()

    def _telling(self) -> AbstractContextManager[None]:
        """Tell people about errors of the system inside the block."""
        advice = "Nothing that was stored is lost: make room there, or mend what is wrong, and go on."
        return telling(StorageError, f"the buffer in {self.path} cannot be used", advice)

    @contextmanager
    def _access(self) -> Iterator[None]:
        """Refuse the copy of a buffer in a forked process, and tell people about errors of the system."""
        if os.getpid() != self._process:
            raise StorageError(
                f"the buffer in {self.path} belongs to process {self._process}, and this one is a fork of it: both "
                "would write to the same files. Use it there, or make a buffer with another folder here."
            )
        if not self._unlock.alive:
            raise StorageError(
                f"the buffer in {self.path} was closed; a new learner with this folder continues from the last commit."
            )
        with self._telling():
            yield

    def _announce(self, parts: Sequence[Tensor]) -> int:
        """How many samples are still to be written: these, and those of minibatches that also wait for it."""
        self._announced[parts[0]] = min(len(parts[0]), self.capacity)
        return sum(self._announced.values())

    def _numbers(self, count: int) -> range:
        """So many numbers that were never given out before, in this process or another."""
        self._next += count
        return range(self._next - count, self._next)

    def _in_place(self) -> bool:
        """Whether the files in use are still those in the folder."""
        return os.path.samestat(os.fstat(self._handle), (self.path / "lock").stat())

    def _check_place(self) -> None:
        """Raise if the folder or its files are no longer where they were: what is written would be lost."""
        with suppress(FileNotFoundError):
            if self._in_place():
                return
        raise StorageError(
            f"{self.path} was removed, moved or replaced while the buffer was in use, so it cannot be saved. Put "
            "the folder back, or start anew from the last checkpoint and a copy of the folder that belongs to it."
        )

    def _discard(self, needed: Iterable[Path]) -> None:
        """Remove all files of samples but those."""
        for path in {*self.path.glob("*.rows"), *self.path.glob("*.sample")}.difference(needed):
            path.unlink(missing_ok=True)

    def _unknown(self, state: dict[str, Any]) -> StorageError:
        """The error for a state whose samples are not here, or no longer."""
        return StorageError(
            f"{self.path} does not hold the samples of this state, which was taken in {state['folder']}: a "
            "folder holds the samples of the checkpoint that was written or loaded last. Load that one; to "
            "keep an earlier one as well, copy the folder together with it."
        )

    def _check_description(self) -> None:
        """Raise if `buffer.json` is that of another buffer; write it if there is none."""
        path = self.path / "buffer.json"
        if not path.exists():
            # Columns are described by the state. Early versions described them here, and expect the field.
            about = {"version": VERSION, "capacity": self.capacity, "columns": []}
            write_json(path, about)
        try:
            about = read_json(path)
            version, capacity = about["version"], about["capacity"]
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path} is damaged: {error!r}. {ADVICE}") from None
        if version != VERSION:
            raise StorageError(
                f"{self.path} is a buffer of format version {version!r}; this Holdfast reads version {VERSION}. "
                "Continue with the Holdfast that made it, or use another folder."
            )
        if capacity != self.capacity:
            raise UsageError(
                f"{self.path} holds a buffer of {capacity} samples, not {self.capacity}. "
                f"Use a buffer size of {capacity}, or another folder."
            )


def damaged(path: Path, wrong: int, count: int) -> StorageError:
    """The error for samples that changed on the disk."""
    return StorageError(f"{path} is damaged: {wrong} of {count} samples are not as they were written. {ADVICE}")


def _take_possession(path: Path) -> int:
    """Create the folder, which must be empty or a buffer's, and lock it until the returned handle is closed."""
    path.mkdir(parents=True, exist_ok=True)
    names = {file.name for file in path.iterdir() if not file.name.startswith(".buffer.json")}
    if "buffer.json" not in names and names - {"lock"}:
        raise UsageError(f"{path} is neither empty nor the folder of a buffer. Use another one.")
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    if not lock(handle, wait=False):
        os.close(handle)
        raise StorageError(
            f"{path} is in use by another buffer, perhaps of another process. Wait until that ends, close() it, or use "
            "another folder."
        )
    for scratch in path.glob(".buffer.json*"):  # left by a process that was killed
        scratch.unlink()
    flush(path.parent)
    return handle


def checksums(rows: Iterable[Any]) -> Array:
    """The CRC-32 of each row of bytes, as int32: file formats know no unsigned type of that size."""
    return numpy.fromiter(map(crc32, rows), numpy.uint32).view(numpy.int32)


def preallocate(handle: int, start: int, stop: int) -> None:
    """Make sure of room on the disk for these bytes of a file."""
    if stop > start and hasattr(os, "posix_fallocate"):  # elsewhere, a full disk is noticed when writing
        os.posix_fallocate(handle, start, stop - start)


def write_at(handle: int, content: memoryview, at: int) -> None:
    """Write all bytes of `content` to a file, from `at` on."""
    while len(content):
        written = os.pwrite(handle, content, at)
        content, at = content[written:], at + written
