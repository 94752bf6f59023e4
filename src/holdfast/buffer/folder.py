"""Stored samples in the files of a folder."""

from __future__ import annotations

import errno
import json
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy
import torch
from torch import Tensor

from holdfast import checkpoint
from holdfast.errors import StorageError, UsageError
from holdfast.files import lock

__all__ = ["Folder"]

VERSION = 1
"""Raised whenever folders are laid out differently; those of another version are refused."""

SCRATCH = ".buffer.json.new"
ADVICE = "Put an intact copy of the folder in its place, or delete it to start anew."

WINDOW = 32 * 2**20
"""Bytes of a file that may be in memory through a mapping; whoever touches more maps anew, which lets go of them."""
AT_ONCE = 2 * 2**20
"""Bytes that are read at once where a whole file is read."""
AROUND = 2 * 2**20
"""Bytes around a row that may come with it: systems map what they hold in pieces of up to that size."""


class Folder:
    """Columns in files: read through a mapping into memory, a small part at a time, and written row by row.

    The folder holds `buffer.json` (format version, capacity, names, shapes and types of the columns), a file of raw
    rows per column, and `state.safetensors`, the state in which it is found when it is opened again. Files grow with
    what is stored.

    A row that a saved state refers to is never overwritten before a later state is safe: a sample that takes a slot
    goes to a free row, and a table says which row each slot is in. A state is thus that table and little else, and
    the process may be killed at any moment. Each row also bears a stamp that no other ever had, which tells a state
    whose rows have been given away since. A state also holds a checksum of each row of each column, so that bits which
    flipped on the disk are noticed when it is loaded.
    """

    def __init__(self, path: Path, capacity: int, device: torch.device) -> None:
        self.path, self.capacity, self.device = path, capacity, device
        self._columns: list[_Rows] = []
        self._row = numpy.full(capacity, -1)
        """The row of each slot, -1 if it is empty."""
        self._stamp = numpy.zeros(capacity, numpy.int64)
        """The stamp of each slot's row."""
        self._sums = numpy.zeros((0, capacity), numpy.int32)
        """The checksum of each slot's row, for every column."""
        self._proven: list[numpy.ndarray[Any, Any]] = []
        """Rows, stamps and sums that were found in order last."""
        self._next_stamp = secrets.randbits(62)
        self._held = numpy.zeros(1024, bool)
        """Which rows a saved state refers to."""
        self._free: list[int] = []
        self._end = 0
        """Rows from here on are not in use."""
        self._reserved = 0
        """There is room on the disk for so many rows."""
        with _explained(path):
            self._unlock = weakref.finalize(self, os.close, _take_possession(path))
            self._forms = self._read_forms()
            self._stamps = _Rows(path / "stamps.rows", (), torch.int64)

    def committed(self) -> dict[str, Any] | None:
        """The state in which the buffer was kept last, None if it never was."""
        path = self.path / "state.safetensors"
        return checkpoint.read(path, "buffer").state if path.exists() else None

    def expect(self, like: Mapping[str, Tensor], aside: Sequence[str] = ()) -> None:
        """Raise if files cannot be made for samples like these, whatever there may be of the names set `aside`."""
        self._fitting(list(like), list(like.values()), aside)

    def make(self, names: Sequence[str], like: Sequence[Tensor]) -> list[Tensor]:
        """Files for samples like these; returns columns without content, which tell shapes and types."""
        forms = self._fitting(names, like)
        with _explained(self.path):
            if not self._forms:
                self._write_forms(forms)
            self._columns = [self._rows(number, part) for number, part in enumerate(like)]
        self._sums = numpy.zeros((len(like), self.capacity), numpy.int32)
        return self._outlines()

    def reserve(self, count: int) -> None:
        """Make sure of room for so many more samples, so that a full disk is noticed before anything changes."""
        needed = self._end + max(0, min(count, self.capacity) - len(self._free))
        if needed > self._reserved:
            with _explained(self.path):
                for column in (self._stamps, *self._columns):
                    column.reserve(self._reserved, needed)
            self._reserved = needed

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part into slot `slots[i]`; `capacity` stands for nowhere."""
        kept = (slots < self.capacity).nonzero().squeeze(1)
        taken = slots[kept].cpu().numpy()
        rows = self._take(len(taken))
        stamps = numpy.arange(self._next_stamp, self._next_stamp + len(taken))
        self._next_stamp += len(taken)
        chosen = [part[kept].cpu() for part in parts]
        try:
            with _explained(self.path):
                # The stamp first: a row that is half overwritten must not look like what it was.
                self._stamps.write(rows, torch.from_numpy(stamps))
                for column, part in zip(self._columns, chosen, strict=True):
                    column.write(rows, part)
        except StorageError:
            self._free += rows
            raise
        before = self._row[taken]
        before = before[before >= 0]
        self._free += before[~self._held[before]].tolist()
        self._row[taken], self._stamp[taken] = rows, stamps
        for sums, part in zip(self._sums, chosen, strict=True):
            sums[taken] = _checksums(part)

    def change(self, number: int, made: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Put what `made` makes of a column in its place, row by row; returns the columns without content.

        It goes to a file of its own, since saved states refer to the old one.
        """
        slots = (self._row >= 0).nonzero()[0]
        rows = self._row[slots]
        with _explained(self.path):
            values = made(self._columns[number].read(rows))
            column = self._rows(number, values)
            column.reserve(0, self._reserved)
            column.write(rows.tolist(), values)
        self._columns[number] = column
        self._sums[number, slots] = _checksums(values)
        return self._outlines()

    def read(self, slots: Tensor) -> list[Tensor]:
        """Copies of what is in these slots, on the device."""
        return [rows.to(self.device) for rows in self._copies(slots.cpu().numpy())]

    def first(self, count: int) -> list[Tensor]:
        """Copies of what is in the first so many slots, all at once in the host's memory."""
        return self._copies(numpy.arange(count))

    def _copies(self, slots: numpy.ndarray[Any, Any]) -> list[Tensor]:
        with _explained(self.path):
            return [column.read(self._row[slots]) for column in self._columns]

    def state(self, count: int) -> dict[str, Any]:
        """Which rows the first `count` slots are in. They are on the disk then, and stay until a later `commit`."""
        with _explained(self.path):
            for column in (self._stamps, *self._columns):
                column.flush()
        rows = self._row[:count].copy()
        self._held[rows] = True
        return {
            "folder": str(self.path),
            "columns": [torch.empty((0, *column.shape), dtype=column.dtype) for column in self._columns],
            "rows": torch.from_numpy(rows),
            "stamps": torch.from_numpy(self._stamp[:count].copy()),
            "sums": torch.from_numpy(self._sums[:, :count].copy()),
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise if `state` cannot be loaded here. One of a buffer in memory can; one of rows that are gone cannot."""
        if "folder" not in state:
            self._fitting(state["names"], state["columns"])
            return
        if not len(state["rows"]):
            return
        rows, stamps = state["rows"].numpy(), state["stamps"].numpy()
        with _explained(self.path):
            columns = [self._rows(number, part) for number, part in enumerate(state["columns"])]
            known = rows.min() >= 0 and rows.max() < len(self._stamps)
            if not known or not numpy.array_equal(self._stamps.read(rows).numpy(), stamps):
                raise StorageError(
                    f"{self.path} does not hold the samples of this state, which was taken in {state['folder']}: a "
                    "folder keeps those of the checkpoint that was written or loaded last. Load that one; to keep an "
                    "earlier one as well, copy the folder together with it."
                )
            for column in columns:
                if rows.max() >= len(column):
                    raise StorageError(f"{column.path} is damaged: it is too short. {ADVICE}")
            if "sums" in state:  # not in those of earlier versions
                self._check_sums(columns, [rows, stamps, state["sums"].numpy()])

    def _check_sums(self, columns: Sequence[_Rows], stated: list[numpy.ndarray[Any, Any]]) -> None:
        """Raise if a row is not what it was when its state was taken. Reads all of them, once."""
        rows, _, sums = stated
        # Opening a folder and loading its checkpoint ask three times for the same.
        if len(stated) == len(self._proven) and all(map(numpy.array_equal, stated, self._proven)):
            return
        for column, expected in zip(columns, sums, strict=True):
            wrong = int((column.checksums(rows) != expected).sum())
            if wrong:
                raise StorageError(
                    f"{column.path} is damaged: {wrong} of {len(rows)} samples are not what was written there. {ADVICE}"
                )
        self._proven = stated

    def load(self, state: dict[str, Any]) -> list[Tensor]:
        """Put back what `state` describes; returns the columns without content."""
        if "folder" not in state:
            return self._load_from_memory(state)
        self._row[:] = -1
        if len(state["rows"]):
            rows = state["rows"].numpy()
            self._row[: len(rows)], self._stamp[: len(rows)] = rows, state["stamps"].numpy()
            self._extend(int(rows.max()) + 1)
            self._held[rows] = True
        self._sweep()
        if state["columns"]:
            with _explained(self.path):
                self._columns = [self._rows(number, part) for number, part in enumerate(state["columns"])]
                rows = state["rows"].numpy()
                sums = state["sums"].numpy() if "sums" in state else [each.checksums(rows) for each in self._columns]
            self._sums = numpy.zeros((len(self._columns), self.capacity), numpy.int32)
            self._sums[:, : len(rows)] = sums
        return self._outlines()

    def _load_from_memory(self, state: dict[str, Any]) -> list[Tensor]:
        count = len(state["columns"][0]) if state["columns"] else 0
        if state["columns"] and not self._columns:
            self.make(state["names"], state["columns"])
        self.reserve(count)
        self._row[:] = -1
        self._sweep()
        self.write(torch.arange(count), state["columns"])
        return self._outlines()

    def commit(self, state: dict[str, Any]) -> None:
        """`state` is safe: be found in it when opened again, and hold no other state's rows any more."""
        checkpoint.write(self.path / "state.safetensors", "buffer", state)
        self._held[:] = False
        self._held[state["rows"].numpy()] = True
        self._sweep()
        with _explained(self.path):
            forms = _forms(state["names"], state["columns"])
            if forms != self._forms:
                self._write_forms(forms)
            used = [self._rows(number, part) for number, part in enumerate(state["columns"])]
            needed = {column.path for column in (self._stamps, *self._columns, *used)}
            for file in set(self.path.glob("*.rows")) - needed:
                file.unlink()

    def close(self) -> None:
        """Leave the folder to others; nothing can be read or written any more."""
        for column in (self._stamps, *self._columns):
            column.close()
        self._unlock()

    def _fitting(self, names: Sequence[str], like: Sequence[Tensor], aside: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The columns for samples like these; raises if the folder holds others, but for those set `aside`."""
        forms, held = _forms(names, like), [form for form in self._forms if form["name"] not in aside]
        if forms and held and held != forms:
            theirs, own = (
                ", ".join(f"{form['name']} {tuple(form['shape'])} {form['dtype']}" for form in each)
                for each in (held, forms)
            )
            raise UsageError(
                f"{self.path} holds a buffer of other samples: {theirs}; these are {own}. "
                "Use another folder, or delete this one to start anew."
            )
        empty = [name for name, part in zip(names, like, strict=True) if 0 in part.shape[1:]]
        if empty:
            raise UsageError(f"{', '.join(empty)} has no elements, of which no file can be made. Leave it out.")
        return forms

    def _outlines(self) -> list[Tensor]:
        """Columns that have shapes and types and no content."""
        rows = self.capacity + 1
        return [torch.empty((rows, *each.shape), dtype=each.dtype, device="meta") for each in self._columns]

    def _rows(self, number: int, like: Tensor) -> _Rows:
        """The file of a column, named after what it holds."""
        words = [str(number), "x".join(map(str, like.shape[1:])), _type_name(like.dtype)]
        return _Rows(self.path / f"{'-'.join(filter(None, words))}.rows", like.shape[1:], like.dtype)

    def _take(self, count: int) -> list[int]:
        """So many free rows."""
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = range(self._end, self._end + count - len(again))
        self._extend(fresh.stop)
        return [*again, *fresh]

    def _extend(self, end: int) -> None:
        """Let rows before `end` be used."""
        self._end = max(self._end, end)
        if self._end > len(self._held):
            self._held = numpy.append(self._held, numpy.zeros(self._end, bool))

    def _sweep(self) -> None:
        """Find all rows that are neither in use nor held."""
        idle = ~self._held[: self._end]
        idle[self._row[self._row >= 0]] = False
        self._free = idle.nonzero()[0].tolist()

    def _read_forms(self) -> list[dict[str, Any]]:
        """The columns that `buffer.json` names; it is written if there is none."""
        path = self.path / "buffer.json"
        if not path.exists():
            self._write_forms([])
        try:
            about = json.loads(path.read_text("utf-8"))
            version, capacity = about["version"], about["capacity"]
            forms = [{key: form[key] for key in ("name", "shape", "dtype")} for form in about["columns"]]
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
        return forms

    def _write_forms(self, forms: list[dict[str, Any]]) -> None:
        about = {"version": VERSION, "capacity": self.capacity, "columns": forms}
        scratch = self.path / SCRATCH
        scratch.write_text(json.dumps(about), "utf-8")
        scratch.replace(self.path / "buffer.json")
        self._forms = forms


class _Rows:
    """A file of rows of one shape and type. Written by calls, so that a full disk is an error and not a signal."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.path, self.shape, self.dtype = path, tuple(shape), dtype
        self.size = prod(shape) * dtype.itemsize
        """Bytes per row."""
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.close = weakref.finalize(self, os.close, self._handle)
        self._mapped = numpy.empty((0, self.size), numpy.uint8)
        self._left = 0
        """How many rows may still come into memory through this mapping."""

    def __len__(self) -> int:
        return os.fstat(self._handle).st_size // self.size

    def reserve(self, start: int, stop: int) -> None:
        """Make sure of room on the disk for these rows."""
        if stop > start and hasattr(os, "posix_fallocate"):  # elsewhere, writing tells
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

    def read(self, rows: numpy.ndarray[Any, Any]) -> Tensor:
        """Copies of these rows."""
        taken = torch.empty((len(rows), self.size), dtype=torch.uint8)
        start = 0
        while start < len(rows):
            if not self._left or rows.max() >= len(self._mapped):
                self._map()
            stop = min(len(rows), start + self._left)
            taken.numpy()[start:stop] = self._mapped[rows[start:stop]]
            start, self._left = stop, self._left - (stop - start)
        return taken.view(self.dtype).view(len(rows), *self.shape)

    def checksums(self, rows: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
        """Those of these rows, which are read in the order of the file and a few at a time."""
        sums, order = numpy.zeros(len(rows), numpy.int32), numpy.argsort(rows)
        parts = numpy.array_split(order, 1 + len(rows) * self.size // AT_ONCE)
        # Not through the mapping, which is made for rows here and there.
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
        """Map the file as it is now. What came into memory through the last mapping leaves it with that one."""
        rows = len(self)
        content = mmap(self._handle, rows * self.size, access=ACCESS_READ)
        self._mapped = numpy.frombuffer(content, numpy.uint8).reshape(rows, self.size)
        small = self._mapped.nbytes <= WINDOW
        self._left = sys.maxsize if small else max(1, WINDOW // (self.size + AROUND))


def _checksums(values: Tensor) -> numpy.ndarray[Any, Any]:
    """The CRC-32 of each of n rows, (n,), its bits as an int32, which every format of files knows."""
    rows = values.reshape(-1).view(torch.uint8).view(len(values), -1).numpy() if len(values) else ()
    return numpy.fromiter(map(crc32, rows), numpy.uint32, len(values)).view(numpy.int32)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where stretches of consecutive numbers begin and end in `rows`."""
    first = 0
    for last in range(1, len(rows) + 1):
        if last == len(rows) or rows[last] != rows[last - 1] + 1:
            yield first, last
            first = last


def _forms(names: Sequence[str], like: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Columns as `buffer.json` describes them."""
    return [
        {"name": name, "shape": list(part.shape[1:]), "dtype": _type_name(part.dtype)}
        for name, part in zip(names, like, strict=True)
    ]


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _take_possession(path: Path) -> int:
    """Create the folder, which must be a buffer's if it is not empty, and lock it until the result is closed."""
    path.mkdir(parents=True, exist_ok=True)
    names = {file.name for file in path.iterdir()}
    if "buffer.json" not in names and names - {"lock", SCRATCH}:
        raise UsageError(f"{path} is neither empty nor the folder of a buffer. Use another one.")
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    if not lock(handle, wait=False):
        os.close(handle)
        raise StorageError(
            f"{path} is in use by another buffer, perhaps of another process. Wait until that ends, close() it, or use "
            "another folder."
        )
    return handle


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the system, as errors for people."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EBADF:
            raise StorageError(
                f"the buffer in {path} was closed; a new learner with this folder goes on from what was kept."
            ) from error
        raise StorageError(
            f"the buffer in {path} cannot be used: {error.strerror or error}. Nothing that was stored is lost: make "
            "room there, or mend what is wrong, and go on."
        ) from error
