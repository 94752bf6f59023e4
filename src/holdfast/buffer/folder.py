"""Stored samples in the files of a folder."""

from __future__ import annotations

import errno
import json
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import numpy
import torch
from torch import Tensor

from holdfast import checkpoint
from holdfast.buffer.layout import Column, Layout, affordable, columns_of, layout_of
from holdfast.errors import StorageError, UsageError
from holdfast.files import flush, lock, replacing

__all__ = ["Folder"]

VERSION = 1
"""Raised whenever folders are laid out differently; folders of another version are refused."""

ADVICE = "Put an intact copy of the folder in its place, or delete it to start anew."

WINDOW = 32 * 2**20
"""Bytes of a file that may be in memory through one mapping. After that the file is mapped anew, which frees them."""
AT_ONCE = 2 * 2**20
"""Bytes that are read at once where a whole file is read."""
AROUND = 2 * 2**20
"""Bytes around a row that may come into memory with it: systems map cached files in pieces of up to that size."""

Array = numpy.ndarray[Any, Any]


class Folder:
    """Columns in files: read through a mapping into memory, a small part at a time, and written row by row.

    The folder holds `buffer.json` (format version, capacity), a file of raw rows for each column, and
    `state.safetensors`, the state that was committed last. Files grow with the number of stored samples.

    A row that a saved state refers to is not overwritten before a later state is on the disk. A sample that takes a
    slot goes to a free row instead, and a table says which row each slot is in. So a state consists of little more
    than this table, and the process may be killed at any moment. Each row also has a stamp that no other row ever had:
    it tells whether the row still belongs to a state. A state also has a checksum of each row of each column, which
    tells when it is loaded whether bits have flipped on the disk.
    """

    def __init__(self, path: Path, capacity: int, device: torch.device) -> None:
        self.path, self.capacity, self.device = path, capacity, device
        self.layout: Layout = {}
        self._files: list[_RowFile] = []
        self._process = os.getpid()
        with affordable(16 * capacity, "the host's memory"):
            self._row = numpy.full(capacity, -1)
            """The row of each slot, -1 if it is empty."""
            self._stamp = numpy.zeros(capacity, numpy.int64)
            """The stamp of each slot's row."""
            self._sums = numpy.zeros((0, capacity), numpy.int32)
            """The checksum of each slot's row, for every column."""
        self._verified: list[Array] = []
        """Rows, stamps and checksums that were last found to be correct."""
        self._next_stamp = secrets.randbits(62)
        self._referenced = numpy.zeros(1024, bool)
        """Which rows a saved state refers to."""
        self._free: list[int] = []
        self._end = 0
        """Rows from here on are not in use."""
        self._reserved = 0
        """There is room on the disk for so many rows."""
        with self._access():
            self._unlock = weakref.finalize(self, os.close, _take_possession(path))
            self._check_description()
            self._stamps = _RowFile(path / "stamps.rows", Column((), torch.int64))

    def __reduce__(self) -> NoReturn:
        raise StorageError(
            f"the buffer in {self.path} cannot be copied or pickled: the copy would overwrite its samples. "
            "Save the learner, copy the folder, and load it into a new learner with the copy."
        )

    def make(self, layout: Layout) -> None:
        """Make files for such columns, unless there are such files already."""
        if layout != self.layout:
            with self._access():
                self._use(layout)

    def reserve(self, parts: Sequence[Tensor]) -> None:
        """Make sure of room for these samples, so that a full disk is noticed before anything changes."""
        count = len(parts[0])
        needed = self._end + max(0, min(count, self.capacity) - len(self._free))
        if needed > self._reserved:
            with self._access():
                for file in (self._stamps, *self._files):
                    file.reserve(self._reserved, needed)
            self._reserved = needed

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part into slot `slots[i]`."""
        accepted = (slots < self.capacity).nonzero().squeeze(1)
        taken = slots[accepted].cpu().numpy()
        chosen = [part.detach()[accepted].cpu() for part in parts]
        with self._access():
            rows = self._take(len(taken))
            stamps = numpy.arange(self._next_stamp, self._next_stamp + len(taken))
            self._next_stamp += len(taken)
            try:
                # The stamp first: a row that is half overwritten must not look like the old one.
                self._stamps.write(rows, torch.from_numpy(stamps))
                for file, part in zip(self._files, chosen, strict=True):
                    file.write(rows, part)
            except OSError:
                self._free += rows
                raise
        before = self._row[taken]
        before = before[before >= 0]
        self._free += before[~self._referenced[before]].tolist()
        self._row[taken], self._stamp[taken] = rows, stamps
        for sums, part in zip(self._sums, chosen, strict=True):
            sums[taken] = _checksums(part)

    def read(self, slots: Tensor) -> list[Tensor]:
        """Copies of the samples in these slots, on the device."""
        rows = self._row[slots.cpu().numpy()]
        with self._access():
            return [file.read(rows).to(self.device) for file in self._files]

    def first(self, count: int) -> list[Tensor]:
        """Copies of the samples in the first so many slots, all at once in the host's memory."""
        with self._access():
            return [file.read(self._row[:count]) for file in self._files]

    def change(self, name: str, convert: Callable[[Tensor], Tensor]) -> None:
        """Put `convert(column)` in the place of a column, in a new file: saved states refer to the old one."""
        number, slots = list(self.layout).index(name), (self._row >= 0).nonzero()[0]
        rows = self._row[slots]
        with self._access():
            values = convert(self._files[number].read(rows))
            layout = self.layout | layout_of({name: values})
            file = self._open(layout)[number]
            file.reserve(0, self._reserved)
            file.write(rows.tolist(), values)
        self._files[number], self.layout = file, layout
        self._sums[number, slots] = _checksums(values)

    def state(self, count: int) -> dict[str, Any]:
        """Which rows the first `count` slots are in. They are on the disk, and stay there until a later `commit`."""
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
        """Raise if `state` cannot be loaded: its rows were overwritten or damaged. One from memory always can be."""
        if "folder" not in state or not len(state["rows"]):
            return
        rows, stamps = (state[key].numpy(force=True) for key in ("rows", "stamps"))
        with self._access():
            files = self._open(layout_of(columns_of(state)))
            known = rows.min() >= 0 and rows.max() < len(self._stamps) and len(numpy.unique(rows)) == len(rows)
            if not known or not numpy.array_equal(self._stamps.read(rows).numpy(), stamps):
                raise StorageError(
                    f"{self.path} does not hold the samples of this state, which was taken in {state['folder']}: a "
                    "folder holds the samples of the checkpoint that was written or loaded last. Load that one; to "
                    "keep an earlier one as well, copy the folder together with it."
                )
            for file in files:
                if rows.max() >= len(file):
                    raise StorageError(f"{file.path} is damaged: it is too short. {ADVICE}")
            if "sums" in state:
                self._check_sums(files, [rows, stamps, state["sums"].numpy(force=True)])

    def _check_sums(self, files: Sequence[_RowFile], stated: list[Array]) -> None:
        """Raise if a row has changed since its state was taken. Reads all rows, once."""
        rows, _, sums = stated
        # Opening a folder and loading its checkpoint check the same state three times.
        if len(stated) == len(self._verified) and all(map(numpy.array_equal, stated, self._verified)):
            return
        for file, expected in zip(files, sums, strict=True):
            wrong = int((file.checksums(rows) != expected).sum())
            if wrong:
                raise StorageError(
                    f"{file.path} is damaged: {wrong} of {len(rows)} samples are not as they were written. {ADVICE}"
                )
        self._verified = stated

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state of this folder, or copy one from memory into the files."""
        saved = columns_of(state)
        if "folder" not in state:
            self._load_from_memory(saved)
            return
        rows, stamps = (state[key].numpy(force=True) for key in ("rows", "stamps"))
        with self._access():
            self._use(layout_of(saved))
            sums = state["sums"].numpy(force=True) if "sums" in state else [f.checksums(rows) for f in self._files]
        self._row[:] = -1
        self._row[: len(rows)], self._stamp[: len(rows)] = rows, stamps
        self._sums[:, : len(rows)] = sums
        self._extend(int(rows.max(initial=-1)) + 1)
        self._referenced[rows] = True
        self._find_free()

    def _load_from_memory(self, saved: dict[str, Tensor]) -> None:
        if saved:
            self.make(layout_of(saved))
            self.reserve(list(saved.values()))
        self._row[:] = -1
        self._find_free()
        if saved:
            self.write(torch.arange(len(next(iter(saved.values())))), [saved[name] for name in self.layout])

    def committed(self) -> dict[str, Any] | None:
        """The state that was committed last, None if there is none."""
        path = self.path / "state.safetensors"
        return checkpoint.read(path, "buffer").state if path.exists() else None

    def commit(self, state: dict[str, Any]) -> None:
        """Write `state` to the folder; rows and files that only other states refer to are free then."""
        with self._access():
            self._check_place()
        checkpoint.write(self.path / "state.safetensors", "buffer", state)
        self._referenced[:] = False
        self._referenced[state["rows"].numpy()] = True
        self._find_free()
        with self._access():
            used = self._open(layout_of(columns_of(state)))
            needed = {file.path for file in (self._stamps, *self._files, *used)}
            for path in set(self.path.glob("*.rows")) - needed:
                path.unlink()

    def close(self) -> None:
        """Leave the folder to others; nothing can be read or written any more."""
        for file in (self._stamps, *self._files):
            file.close()
        self._unlock()

    @contextmanager
    def _access(self) -> Iterator[None]:
        """Refuse the copy of a buffer in a forked process, and tell people about errors of the system."""
        if os.getpid() != self._process:
            raise StorageError(
                f"the buffer in {self.path} belongs to process {self._process}, and this one is a fork of it: both "
                "would write to the same files. Use it there, or make a buffer with another folder here."
            )
        try:
            yield
        except OSError as error:
            if error.errno == errno.EBADF:
                raise StorageError(
                    f"the buffer in {self.path} was closed; a new learner with this folder continues from the last "
                    "commit."
                ) from error
            raise StorageError(
                f"the buffer in {self.path} cannot be used: {error.strerror or error}. Nothing that was stored is "
                "lost: make room there, or mend what is wrong, and go on."
            ) from error

    def _check_place(self) -> None:
        """Raise if the open files are no longer those in the folder: what is written to them would be lost."""
        if not all(file.in_place() for file in (self._stamps, *self._files)):
            raise StorageError(
                f"{self.path} was removed, moved or replaced while the buffer was in use, so it cannot be saved. Put "
                "the folder back, or start anew from the last checkpoint and a copy of the folder that belongs to it."
            )

    def _check_description(self) -> None:
        """Raise if `buffer.json` is that of another buffer; write it if there is none."""
        path = self.path / "buffer.json"
        if not path.exists():
            # Columns are described by the state. Early versions described them here, and expect the field.
            about = {"version": VERSION, "capacity": self.capacity, "columns": []}
            with replacing(path) as scratch:
                scratch.write_text(json.dumps(about), "utf-8")
        try:
            about = json.loads(path.read_text("utf-8"))
            version, capacity = about["version"], about["capacity"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
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

    def _use(self, layout: Layout) -> None:
        """Let these be the columns, with no checksums yet."""
        files = self._open(layout)
        self._reserved = self._reserved if layout == self.layout else 0
        self._files, self.layout = files, layout
        self._sums = numpy.zeros((len(layout), self.capacity), numpy.int32)

    def _open(self, layout: Layout) -> list[_RowFile]:
        """The files of such columns. They are named after number, shape and type, as in 0-3x4x2-uint8.rows."""
        empty = [name for name, column in layout.items() if not column.size]
        if empty:
            raise UsageError(f"{', '.join(empty)} has no elements, which a file cannot store. Leave it out.")
        files = []
        for number, column in enumerate(layout.values()):
            words = [str(number), "x".join(map(str, column.shape)), column.type_name]
            files.append(_RowFile(self.path / f"{'-'.join(filter(None, words))}.rows", column))
        return files

    def _take(self, count: int) -> list[int]:
        """So many free rows."""
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = range(self._end, self._end + count - len(again))
        self._extend(fresh.stop)
        return [*again, *fresh]

    def _extend(self, end: int) -> None:
        """Let rows before `end` be used."""
        self._end = max(self._end, end)
        if self._end > len(self._referenced):
            self._referenced = numpy.append(self._referenced, numpy.zeros(self._end, bool))

    def _find_free(self) -> None:
        """Find all rows that are neither in use nor referred to by a saved state."""
        idle = ~self._referenced[: self._end]
        idle[self._row[self._row >= 0]] = False
        self._free = idle.nonzero()[0].tolist()


class _RowFile:
    """A file of rows of one shape and type. Written by calls, so that a full disk is an error and not a signal."""

    def __init__(self, path: Path, column: Column) -> None:
        self.path, self.column, self.size = path, column, column.size
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.close = weakref.finalize(self, os.close, self._handle)
        self._mapped = numpy.empty((0, self.size), numpy.uint8)
        self._left = 0
        """How many more rows may come into memory through this mapping."""

    def __len__(self) -> int:
        return os.fstat(self._handle).st_size // self.size

    def in_place(self) -> bool:
        """Whether the file that is open still has its name."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._handle), self.path.stat())
        return False

    def reserve(self, start: int, stop: int) -> None:
        """Make sure of room on the disk for these rows."""
        if stop > start and hasattr(os, "posix_fallocate"):  # elsewhere, a full disk is noticed when writing
            os.posix_fallocate(self._handle, start * self.size, (stop - start) * self.size)

    def write(self, rows: Sequence[int], values: Tensor) -> None:
        """Put values[i] into row rows[i]."""
        if not rows:
            return
        content = values.reshape(-1).view(torch.uint8).numpy().data
        for first, last in _runs(rows):
            part, at = content[first * self.size : last * self.size], rows[first] * self.size
            while len(part):
                written = os.pwrite(self._handle, part, at)
                part, at = part[written:], at + written

    def read(self, rows: Array) -> Tensor:
        """Copies of these rows."""
        copies = torch.empty((len(rows), self.size), dtype=torch.uint8)
        start = 0
        while start < len(rows):
            if not self._left or rows.max() >= len(self._mapped):
                self._map()
            stop = min(len(rows), start + self._left)
            copies.numpy()[start:stop] = self._mapped[rows[start:stop]]
            start, self._left = stop, self._left - (stop - start)
        return copies.view(self.column.dtype).view(len(rows), *self.column.shape)

    def checksums(self, rows: Array) -> Array:
        """The checksums of these rows, which are read in the order of the file and a few at a time."""
        sums, order = numpy.zeros(len(rows), numpy.int32), numpy.argsort(rows)
        parts = numpy.array_split(order, 1 + len(rows) * self.size // AT_ONCE)
        # Not through the mapping, which is for a few rows here and there.
        space = numpy.empty((len(parts[0]), self.size), numpy.uint8)
        for part in parts:
            near = rows[part].tolist()
            for first, last in _runs(near):
                os.preadv(self._handle, [space[first:last].data], near[first] * self.size)
            sums[part] = _checksums(torch.from_numpy(space[: len(part)]))
        return sums

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._handle)

    def _map(self) -> None:
        """Map the file as it is now. The last mapping goes, and with it what came into memory through it."""
        rows = len(self)
        content = mmap(self._handle, rows * self.size, access=ACCESS_READ)
        self._mapped = numpy.frombuffer(content, numpy.uint8).reshape(rows, self.size)
        small = self._mapped.nbytes <= WINDOW
        self._left = sys.maxsize if small else max(1, WINDOW // (self.size + AROUND))


def _checksums(values: Tensor) -> Array:
    """The CRC-32 of each of n rows, (n,), as int32: file formats know no unsigned type of that size."""
    rows = values.reshape(-1).view(torch.uint8).view(len(values), -1).numpy() if len(values) else ()
    return numpy.fromiter(map(crc32, rows), numpy.uint32, len(values)).view(numpy.int32)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where stretches of consecutive numbers begin and end in `rows`."""
    first = 0
    for last in range(1, len(rows) + 1):
        if last == len(rows) or rows[last] != rows[last - 1] + 1:
            yield first, last
            first = last


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
