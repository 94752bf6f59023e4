"""Stored samples of one shape in the files of a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from holdfast.buffer.layout import Column, Layout, affordable, columns_of, layout_of, layout_of_state
from holdfast.buffer.owned import ADVICE, Array, OwnedFolder, damaged
from holdfast.buffer.rows import RowFile, checksums
from holdfast.errors import StorageError, UsageError
from holdfast.files import flush

__all__ = ["Folder"]


class Folder(OwnedFolder):
    """Columns in files of raw rows, which grow with the number of stored samples.

    A row that a saved state refers to is not overwritten before a later state is on the disk. A sample that takes a
    slot goes to a free row instead, and a table says which row each slot is in. So a state consists of little more
    than this table, and the process may be killed at any moment. Each row also has a stamp that no other row ever had:
    it tells whether the row still belongs to a state. A state also has a checksum of each row of each column, which
    tells when it is loaded whether bits have flipped on the disk.
    """

    def __init__(self, path: Path, capacity: int, device: torch.device) -> None:
        self.device = device
        self.layout: Layout = {}
        self._files: list[RowFile] = []
        with affordable(16 * capacity, "the host's memory"):
            self._row = numpy.full(capacity, -1)
            """The row of each slot, -1 if it is empty."""
            self._stamp = numpy.zeros(capacity, numpy.int64)
            """The stamp of each slot's row."""
            self._sums = numpy.zeros((0, capacity), numpy.int32)
            """The checksum of each slot's row, for every column."""
        self._verified: list[Array] = []
        """Rows, stamps and checksums that were last found to be correct."""
        self._referenced = numpy.zeros(1024, bool)
        """Which rows a saved state refers to."""
        self._free: list[int] = []
        self._end = 0
        """Rows from here on are not in use."""
        self._reserved = 0
        """There is room on the disk for so many rows."""
        super().__init__(path, capacity)
        with self._access():
            self._stamps = RowFile(path / "stamps.rows", Column((), torch.int64))

    def make(self, layout: Layout) -> None:
        """Make files for such columns, unless there are such files already."""
        if layout != self.layout:
            with self._access():
                self._use(layout)

    def reserve(self, parts: Sequence[Tensor], lengths: list[int] | None = None) -> None:
        """Make sure of room for these samples, so that a full disk is noticed before anything changes."""
        needed = self._end + max(0, self._announce(parts) - len(self._free))
        if needed > self._reserved:
            with self._access():
                for file in (self._stamps, *self._files):
                    file.reserve(self._reserved, needed)
            self._reserved = needed

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part into slot `slots[i]`."""
        self._withdraw(parts)
        accepted = (slots < self.capacity).nonzero().squeeze(1)
        taken = slots[accepted].cpu().numpy()
        chosen = [part.detach()[accepted].cpu() for part in parts]
        with self._access():
            rows = self._take(len(taken))
            stamps = numpy.array(self._numbers(len(taken)), numpy.int64)
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
            sums[taken] = checksums(part)

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
        self._sums[number, slots] = checksums(values)

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
            files = self._open(layout_of_state(state))
            known = rows.min() >= 0 and rows.max() < len(self._stamps) and len(numpy.unique(rows)) == len(rows)
            if not known or not numpy.array_equal(self._stamps.read(rows).numpy(), stamps):
                raise self._unknown(state)
            for file in files:
                if rows.max() >= len(file):
                    raise StorageError(f"{file.path} is damaged: it is too short. {ADVICE}")
            if "sums" in state:
                self._check_sums(files, [rows, stamps, state["sums"].numpy(force=True)])

    def _check_sums(self, files: Sequence[RowFile], stated: list[Array]) -> None:
        """Raise if a row has changed since its state was taken. Reads all rows, once."""
        rows, _, sums = stated
        # Opening a folder and loading its checkpoint check the same state three times.
        if len(stated) == len(self._verified) and all(map(numpy.array_equal, stated, self._verified)):
            return
        for file, expected in zip(files, sums, strict=True):
            wrong = int((file.checksums(rows) != expected).sum())
            if wrong:
                raise damaged(file.path, wrong, len(rows))
        self._verified = stated

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state of this folder, or copy one from memory into the files."""
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
        rows, stamps = (state[key].numpy(force=True) for key in ("rows", "stamps"))
        with self._access():
            self._use(layout)
            sums = state["sums"].numpy(force=True) if "sums" in state else [f.checksums(rows) for f in self._files]
        self._row[:] = -1
        self._row[: len(rows)], self._stamp[: len(rows)] = rows, stamps
        self._sums[:, : len(rows)] = sums
        self._extend(int(rows.max(initial=-1)) + 1)
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
        """Leave the folder to others; nothing can be read or written any more."""
        for file in (self._stamps, *self._files):
            file.close()
        super().close()

    def _in_place(self) -> bool:
        """Whether the files in use are still those in the folder."""
        return super()._in_place() and all(file.in_place() for file in (self._stamps, *self._files))

    def _use(self, layout: Layout) -> None:
        """Let these be the columns, with no checksums yet."""
        files = self._open(layout)
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
