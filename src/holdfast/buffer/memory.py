"""Stored samples of one shape in memory: that of the device, or that of the host."""
# ruff: noqa: D102 (`Storage` explains the methods)

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from holdfast.buffer.base import Storage
from holdfast.buffer.layout import Layout, affordable, columns_of, layout_of, layout_of_state, unaffordable
from holdfast.devices import host_memory

__all__ = ["Memory"]

NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The usual type of whole numbers, by its bytes."""
RARE = (torch.uint16, torch.uint32, torch.uint64)


class Memory(Storage):
    """Columns in the memory of `home`. If the device is another one, steps wait for it.

    Columns have one row more than `capacity`. Samples that are not stored are written there, so that every step has
    the same shapes and the host need not wait for a value from the device.
    """

    columns: Sequence[Tensor] = ()

    def make(self, layout: Layout) -> None:
        if layout == self.layout:
            return
        rows, columns = self.capacity + 1, layout.values()
        wanted, place = rows * sum(column.size for column in columns), f"the memory of {self.home}"
        # A system grants more than there is, and ends the process when it is used.
        if self.home.type == "cpu" and (there := host_memory()) is not None and wanted > there:
            raise unaffordable(wanted, place, f"which has {there:,}")
        with affordable(wanted, place):
            self.columns = [torch.zeros((rows, *shape), dtype=dtype, device=self.home) for shape, dtype in columns]
        self.layout = layout

    def reserve(self, parts: Sequence[Tensor], lengths: Sequence[int] | None = None) -> None:
        """Nothing: `make` has taken all the memory."""

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        slots = slots.to(self.home)
        for column, part in zip(self.columns, parts, strict=True):
            content = part.detach() if part.requires_grad else part
            _words(column).index_copy_(0, slots, _words(content.to(self.home)))

    def read(self, slots: Tensor) -> list[Tensor]:
        if self.device.type == self.home.type:
            return [_numbers(column).index_select(0, slots).view(column.dtype) for column in self.columns]
        # A GPU fetches from pinned memory by itself. Pinning the draws is enough; the columns need not be pinned.
        chosen, pinned = slots.to(self.home), self.device.type == "cuda"
        drawn = [column.new_empty((len(chosen), *column.shape[1:]), pin_memory=pinned) for column in self.columns]
        for column, rows in zip(self.columns, drawn, strict=True):
            torch.index_select(_numbers(column), 0, chosen, out=_numbers(rows))
        return [rows.to(self.device, non_blocking=True) for rows in drawn]

    def first(self, count: int) -> list[Tensor]:
        """The first so many rows of the columns themselves, without a copy."""
        return [column[:count] for column in self.columns]

    def change(self, name: str, convert: Callable[[Tensor], Tensor]) -> None:
        columns = dict(zip(self.layout, self.columns, strict=True))
        columns[name] = convert(columns[name])
        self.columns, self.layout = list(columns.values()), layout_of(columns)

    def state(self, count: int) -> dict[str, Any]:
        return {"columns": self.first(count) if count else []}

    def load(self, state: dict[str, Any]) -> None:
        """Copy the samples into the columns, in place: a captured step reads from fixed addresses."""
        saved = columns_of(state)
        if saved:
            self.make(layout_of_state(state))
            for name, column in zip(self.layout, self.columns, strict=True):
                column[: len(saved[name])].copy_(saved[name])


def _numbers(rows: Tensor) -> Tensor:
    """The same bytes as whole numbers, for the types whose rows PyTorch cannot choose."""
    rare = rows.dtype in RARE or (rows.is_floating_point() and rows.itemsize == 1)
    return rows.view(NUMBERS[rows.itemsize]) if rare else rows


def _words(rows: Tensor) -> Tensor:
    """Rows of bytes as 64-bit words, if each row is a whole number of them: a CPU copies words six times as fast."""
    size = prod(rows.shape[1:])
    if rows.dtype != torch.uint8 or size % 8:
        return _numbers(rows)
    whole = rows.contiguous()
    if whole.storage_offset() % 8:  # a view that begins within a word
        whole = whole.clone()
    return whole.view(len(rows), size).view(torch.int64)
