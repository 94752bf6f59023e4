"""Files of rows: each row is one tensor of one sample."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from zlib import crc32

import numpy
import torch
from torch import Tensor

from holdfast.buffer.layout import Column
from holdfast.buffer.owned import Array

__all__ = ["RowFile", "checksums", "preallocate", "write_at"]

AT_ONCE = 2 * 2**20
"""Bytes that are read at once where a whole file is read."""


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

    def write(self, rows: Sequence[int], values: Tensor) -> None:
        """Put values[i] into row rows[i]."""
        if not rows:
            return
        content = values.reshape(-1).view(torch.uint8).numpy().data
        for first, last in _runs(rows):
            write_at(self._handle, content[first * self.size : last * self.size], rows[first] * self.size)

    def read(self, rows: Array) -> Tensor:
        """Copies of these rows."""
        copies, wanted = torch.empty((len(rows), self.size), dtype=torch.uint8), rows.tolist()
        content = copies.flatten().numpy().data
        for first, last in _runs(wanted):
            _read_at(self._handle, content[first * self.size : last * self.size], wanted[first] * self.size)
        return copies.view(self.column.dtype).view(len(rows), *self.column.shape)

    def checksums(self, rows: Array) -> Array:
        """The checksums of these rows, which are read in the order of the file and a few at a time."""
        sums, order = numpy.zeros(len(rows), numpy.int32), numpy.argsort(rows)
        for part in numpy.array_split(order, 1 + len(rows) * self.size // AT_ONCE):
            sums[part] = checksums(self.read(rows[part]))
        return sums

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._handle)


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


def write_at(handle: int, content: memoryview, at: int) -> None:
    """Write all bytes of `content` to a file, from `at` on."""
    while len(content):
        written = os.pwrite(handle, content, at)
        content, at = content[written:], at + written


def _read_at(handle: int, space: memoryview, at: int) -> None:
    """Fill `space` with the bytes of a file from `at` on."""
    while len(space):
        count = os.preadv(handle, [space], at)
        if not count:
            raise OSError(errno.EIO, "a file is too short")
        space, at = space[count:], at + count
