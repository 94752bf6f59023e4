"""Files of rows: each row is one tensor of one sample."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from zlib import crc32

import numpy
import torch
from torch import Tensor

from holdfast.buffer.layout import Column
from holdfast.buffer.owned import Array

__all__ = ["RowFile", "checksums", "fill", "preallocate"]

WINDOW = 32 * 2**20
"""Bytes of a file that may be in memory through one mapping. After that the file is mapped anew, which frees them."""
AT_ONCE = 2 * 2**20
"""Bytes that are read at once where a whole file is read."""
AROUND = 2 * 2**20
"""Bytes around a row that may come into memory with it: systems map cached files in pieces of up to that size."""


class RowFile:
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
        preallocate(self._handle, start * self.size, stop * self.size)

    def write(self, rows: Sequence[int], values: Tensor) -> None:
        """Put values[i] into row rows[i]."""
        if not rows:
            return
        content = values.reshape(-1).view(torch.uint8).numpy().data
        for first, last in _runs(rows):
            fill(self._handle, content[first * self.size : last * self.size], rows[first] * self.size)

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
            sums[part] = checksums(torch.from_numpy(space[: len(part)]))
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


def checksums(values: Tensor) -> Array:
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


def preallocate(handle: int, start: int, stop: int) -> None:
    """Make sure of room on the disk for these bytes of a file."""
    if stop > start and hasattr(os, "posix_fallocate"):  # elsewhere, a full disk is noticed when writing
        os.posix_fallocate(handle, start, stop - start)


def fill(handle: int, content: memoryview, at: int = 0) -> None:
    """Write all bytes of `content` to a file, from `at` on."""
    while len(content):
        written = os.pwrite(handle, content, at)
        content, at = content[written:], at + written
