"""A folder that belongs to one buffer of one process, as long as that uses it."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy
from torch import Tensor

from holdfast import checkpoint
from holdfast.errors import StorageError, UsageError
from holdfast.files import flush, lock
from holdfast.schema import read_json, write_json

__all__ = ["ADVICE", "Array", "OwnedFolder", "damaged"]

VERSION = 1
"""Raised whenever folders are laid out differently; folders of another version are refused."""

ADVICE = "Put an intact copy of the folder in its place, or delete it to start anew."

STATE = "state.safetensors"

Array = numpy.ndarray[Any, Any]


class OwnedFolder:
    """The folder of a buffer, which holds `buffer.json` (format version, capacity), files of samples, and
    `state.safetensors`, the state that was committed last.

    It is locked against other buffers until `close`. Copies of this object, and forks of the process, may not use it.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self.path, self.capacity = path, capacity
        self._process = os.getpid()
        self._next = secrets.randbits(62)
        self._announced: list[tuple[weakref.ref[Tensor], int]] = []
        """Minibatches that are still to be written, and their numbers of samples."""
        with _told(path):
            self._handle = _take_possession(path)
            self._unlock = weakref.finalize(self, os.close, self._handle)
            self._check_description()

    def __reduce__(self) -> NoReturn:
        raise StorageError(
            f"the buffer in {self.path} cannot be copied or pickled: the copy would overwrite its samples. "
            "Save the learner, copy the folder, and load it into a new learner with the copy."
        )

    def committed(self) -> dict[str, Any] | None:
        """The state that was committed last, None if there is none."""
        return checkpoint.read(self.path / STATE, "buffer").state if (self.path / STATE).exists() else None

    def commit(self, state: dict[str, Any]) -> None:
        """Write `state` to the folder."""
        with self._access():
            self._check_place()
        checkpoint.write(self.path / STATE, "buffer", state)

    def close(self) -> None:
        """Leave the folder to others; nothing can be read or written any more."""
        self._unlock()

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
        with _told(self.path):
            yield

    def _announce(self, parts: Sequence[Tensor]) -> int:
        """How many samples are still to be written: these, and those of minibatches that also wait for it."""
        self._withdraw(parts)
        self._announced.append((weakref.ref(parts[0]), min(len(parts[0]), self.capacity)))
        return sum(count for _, count in self._announced)

    def _withdraw(self, parts: Sequence[Tensor]) -> None:
        """Wait for this minibatch no longer, nor for those that nobody holds any more."""
        alive = [(tensor(), count) for tensor, count in self._announced]
        self._announced = [
            (weakref.ref(each), count) for each, count in alive if each is not None and each is not parts[0]
        ]

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


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Tell people about errors of the system."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the buffer in {path} cannot be used: {error.strerror or error}. Nothing that was stored is lost: make "
            "room there, or mend what is wrong, and go on."
        ) from error


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
