"""Stored samples in a folder that belongs to one buffer of one process; those of one shape as rows of files."""
# ruff: noqa: D102 (`Storage` explains the methods)

import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
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
from holdfast.buffer.layout import Column, Layout, affordable, columns_of, layout_of, layout_of_state
from holdfast.buffer.packing import bytes_of
from holdfast.errors import StorageError, UsageError
from holdfast.files import flush, lock, telling
from holdfast.schema import read_json, write_json

__all__ = ["ADVICE", "Array", "Folder", "OwnedFolder", "RowFile", "checksums", "damaged", "preallocate", "write_at"]

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
        """How many samples `write` is still to get, by their minibatch's first tensor; gone once nobody holds it."""
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
            write_json(path, {"version": VERSION, "capacity": self.capacity})
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


class RowFile:
    """A file of rows of one shape and type. Written by calls, so that a full disk is an error and not a signal."""

    def __init__(self, path: Path, column: Column) -> None:
        self.path, self.column, self.size = path, column, column.size
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.close = weakref.finalize(self, os.close, self._handle)

    def __len__(self) -> int:
        return os.fstat(self._handle).st_size // self.size

    def in_place(self) -> bool:
        """Whether the file that is open still has its name; raises if there is none of that name."""
        return os.path.samestat(os.fstat(self._handle), self.path.stat())

    def reserve(self, start: int, stop: int) -> None:
        """Make sure of room on the disk for these rows."""
        preallocate(self._handle, start * self.size, stop * self.size)

    def write(self, rows: Sequence[int], values: Tensor) -> Array:
        """Put values[i] into row rows[i]; returns the checksums of the values."""
        content = bytes_of(values).view(len(values), self.size).numpy()
        first = 0
        for last in range(1, len(rows) + 1):  # rows that follow each other are written at once
            if last == len(rows) or rows[last] != rows[last - 1] + 1:
                write_at(self._handle, content[first:last].reshape(-1).data, rows[first] * self.size)
                first = last
        return checksums(content)

    def read(self, rows: Array) -> Tensor:
        """Copies of these rows."""
        content = numpy.frombuffer(bytearray().join(map(self._row, rows.tolist())), numpy.uint8)
        return torch.from_numpy(content).view(self.column.dtype).view(len(rows), *self.column.shape)

    def checksums(self, rows: Array) -> Array:
        """The checksums of these rows, which are read in the order of the file."""
        sums, order = numpy.empty(len(rows), numpy.int32), numpy.argsort(rows)
        sums[order] = checksums(map(self._row, rows[order].tolist()))
        return sums

    def _row(self, number: int) -> bytes:
        content = os.pread(self._handle, self.size, number * self.size)
        while len(content) < self.size:  # a system may read less than it is asked for
            more = os.pread(self._handle, self.size - len(content), number * self.size + len(content))
            if not more:
                raise StorageError(f"{self.path} is damaged: it is too short. {ADVICE}")
            content += more
        return content

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._handle)


class Folder(OwnedFolder):
    """Columns in files of raw rows, which grow with the number of stored samples.

    A row that a saved state refers to is not overwritten before a later state is on the disk. A sample that takes a
    slot goes to a free row instead, and a table says which row each slot is in. So a state consists of little more
    than this table, and the process may be killed at any moment. Each row also has a stamp that no other row ever had:
    it tells whether the row still belongs to a state. A state also has a checksum of each row of each column, which
    tells when it is loaded whether bits have flipped on the disk.
    """

    def __init__(self, path: Path, capacity: int, device: torch.device) -> None:
        with affordable(16 * capacity, "the host's memory"):
            self._row = numpy.full(capacity, -1)
            """The row of each slot, -1 if it is empty."""
            self._stamp = numpy.zeros(capacity, numpy.int64)
            """The stamp of each slot's row."""
            self._sums = numpy.zeros((0, capacity), numpy.int32)
            """The checksum of each slot's row, for every column."""
        self._files: list[RowFile] = []
        self._verified: list[bytes] = []
        """Rows, stamps and checksums that were last found to be correct."""
        self._referenced = numpy.zeros(0, bool)
        """Which rows a saved state refers to; there are as many rows as entries."""
        self._free: list[int] = []
        """Rows that are neither in use nor referred to by a saved state."""
        self._reserved = 0
        """There is room on the disk for so many rows."""
        super().__init__(path, capacity, device)
        with self._access():
            self._stamps = RowFile(path / "stamps.rows", Column((), torch.int64))

    def make(self, layout: Layout) -> None:
        if layout != self.layout:
            with self._access():
                self._use(layout, self._open(layout))

    def reserve(self, parts: Sequence[Tensor], lengths: Sequence[int] | None = None) -> None:
        needed = len(self._referenced) + max(0, self._announce(parts) - len(self._free))
        if needed > self._reserved:
            with self._access():
                for file in (self._stamps, *self._files):
                    file.reserve(self._reserved, needed)
            self._reserved = needed

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        self._announced.pop(parts[0], None)
        accepted = (slots < self.capacity).nonzero().squeeze(1)
        taken = slots[accepted].cpu().numpy()
        with self._access():
            rows, stamps = self._take(len(taken)), torch.tensor(self._numbers(len(taken)), dtype=torch.int64)
            try:
                # The stamp first: a row that is half overwritten must not look like the old one.
                self._stamps.write(rows, stamps)
                pairs = zip(self._files, parts, strict=True)
                sums = [file.write(rows, part.detach()[accepted].cpu()) for file, part in pairs]
            except OSError:
                self._free += rows
                raise
        before = self._row[taken]
        before = before[before >= 0]
        self._free += before[~self._referenced[before]].tolist()
        self._row[taken], self._stamp[taken], self._sums[:, taken] = rows, stamps.numpy(), sums

    def read(self, slots: Tensor) -> list[Tensor]:
        rows = self._row[slots.cpu().numpy()]
        with self._access():
            return [file.read(rows).to(self.device) for file in self._files]

    def first(self, count: int) -> list[Tensor]:
        with self._access():
            return [file.read(self._row[:count]) for file in self._files]

    def change(self, name: str, convert: Callable[[Tensor], Tensor]) -> None:
        """The column gets a new file: saved states refer to the old one."""
        number, slots = list(self.layout).index(name), (self._row >= 0).nonzero()[0]
        rows = self._row[slots]
        with self._access():
            values = convert(self._files[number].read(rows))
            layout = self.layout | layout_of({name: values})
            file = self._open(layout)[number]
            file.reserve(0, self._reserved)
            self._sums[number, slots] = file.write(rows.tolist(), values)
        self._files[number], self.layout = file, layout

    def state(self, count: int) -> dict[str, Any]:
        """The rows are on the disk, and stay there until a later `commit`."""
        with self._access():
            for file in (self._stamps, *self._files):
                file.flush()
            self._check_place()
            flush(self.path)
        rows = self._row[:count].copy()
        self._referenced[rows] = True
        columns = self.layout.values() if count else ()
        return {
            "folder": str(self.path),
            "columns": [torch.empty((0, *shape), dtype=dtype) for shape, dtype in columns],
            "rows": torch.from_numpy(rows),
            "stamps": torch.from_numpy(self._stamp[:count].copy()),
            "sums": torch.from_numpy(self._sums[: len(columns), :count].copy()),
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise if rows of the state were overwritten or damaged; all of them are read, once."""
        if "folder" not in state or not len(state["rows"]):
            return
        rows, stamps, sums = (state[key].numpy(force=True) for key in ("rows", "stamps", "sums"))
        with self._access():
            files = self._open(layout_of_state(state))
            known = rows.min() >= 0 and rows.max() < len(self._stamps) and len(numpy.unique(rows)) == len(rows)
            if not known or not numpy.array_equal(self._stamps.read(rows).numpy(), stamps):
                raise self._unknown(state)
            stated = [rows.tobytes(), stamps.tobytes(), sums.tobytes()]
            if stated == self._verified:
                return  # opening a folder and loading its checkpoint check the same state three times
            for file, expected in zip(files, sums, strict=True):
                wrong = int((file.checksums(rows) != expected).sum())
                if wrong:
                    raise damaged(file.path, wrong, len(rows))
        self._verified = stated

    def load(self, state: dict[str, Any]) -> None:
        saved, layout = columns_of(state), layout_of_state(state)
        if "folder" not in state:
            if saved:
                self.make(layout)
                self.reserve(list(saved.values()))
            self._row[:] = -1
            self._find_free()
            if saved:
                self.write(torch.arange(len(state["columns"][0])), [saved[name] for name in self.layout])
            return
        rows, stamps, sums = (state[key].numpy(force=True) for key in ("rows", "stamps", "sums"))
        with self._access():
            files = self._open(layout)
        self._use(layout, files)
        self._row[:] = -1
        self._row[: len(rows)], self._stamp[: len(rows)], self._sums[:, : len(rows)] = rows, stamps, sums
        self._add_rows(int(rows.max(initial=-1)) + 1 - len(self._referenced))
        self._referenced[rows] = True
        self._find_free()

    def commit(self, state: dict[str, Any]) -> None:
        """Write `state` to the folder; rows and files that only other states refer to are free then."""
        super().commit(state)
        self._referenced[:] = False
        self._referenced[state["rows"].numpy()] = True
        self._find_free()
        with self._access():
            used = self._open(layout_of_state(state))
            self._discard(file.path for file in (self._stamps, *self._files, *used))

    def close(self) -> None:
        for file in (self._stamps, *self._files):
            file.close()
        super().close()

    def _in_place(self) -> bool:
        return super()._in_place() and all(file.in_place() for file in (self._stamps, *self._files))

    def _use(self, layout: Layout, files: list[RowFile]) -> None:
        """Read and write these files from now on, one for each column; the rows have no checksums yet."""
        self._reserved = self._reserved if layout == self.layout else 0
        self._files, self.layout = files, layout
        self._sums = numpy.zeros((len(layout), self.capacity), numpy.int32)

    def _open(self, layout: Layout) -> list[RowFile]:
        """The files of such columns. They are named after number, shape and type, as in 0-3x4x2-uint8.rows."""
        empty = [name for name, column in layout.items() if not column.size]
        if empty:
            raise UsageError(f"{', '.join(empty)} has no elements, which a file cannot store. Leave it out.")
        files = []
        for number, column in enumerate(layout.values()):
            words = [str(number), "x".join(map(str, column.shape)), column.type_name]
            files.append(RowFile(self.path / f"{'-'.join(filter(None, words))}.rows", column))
        return files

    def _take(self, count: int) -> list[int]:
        """So many free rows."""
        self._add_rows(count - len(self._free))
        kept = len(self._free) - count
        rows = self._free[kept:]
        del self._free[kept:]
        return rows

    def _add_rows(self, count: int) -> None:
        """Let there be so many free rows more, none if `count` is negative."""
        if count > 0:
            self._free += range(len(self._referenced), len(self._referenced) + count)
            self._referenced = numpy.append(self._referenced, numpy.zeros(count, bool))

    def _find_free(self) -> None:
        idle = ~self._referenced
        idle[self._row[self._row >= 0]] = False
        self._free = idle.nonzero()[0].tolist()


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
