"""Stored samples in memory: the device's, or the host's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import UsageError

__all__ = ["HostMemory", "Memory"]


class Memory:
    """Columns in the memory of the device where samples are drawn.

    They have one row more than `capacity`: samples that are kept nowhere are written there, so that every step has the
    same shapes and nothing depends on a value the host would have to wait for.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        self.columns: list[Tensor] = []

    def committed(self) -> dict[str, Any] | None:
        """The state in which the buffer is found."""
        return None

    def expect(self, like: Mapping[str, Tensor], aside: Sequence[str] = ()) -> None:
        """Raise if columns cannot be made for samples like these, whatever there may be of the names set `aside`."""

    def make(self, names: Sequence[str], like: Sequence[Tensor]) -> list[Tensor]:
        """Columns for samples like these."""
        rows = self.capacity + 1
        self.columns = [part.new_zeros((rows, *part.shape[1:]), device=self.device) for part in like]
        return self.columns

    def reserve(self, count: int) -> None:
        """Make sure of room for so many more samples."""

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part into slot `slots[i]`; `capacity` stands for nowhere."""
        for column, part in zip(self.columns, parts, strict=True):
            _words(column).index_copy_(0, slots, _words(part))

    def change(self, number: int, made: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Put what `made` makes of a column in its place, row by row; returns the columns."""
        self.columns[number] = made(self.columns[number])
        return self.columns

    def read(self, slots: Tensor) -> list[Tensor]:
        """Copies of what is in these slots, on the device."""
        return [column.index_select(0, slots) for column in self.columns]

    def first(self, count: int) -> list[Tensor]:
        """What is in the first so many slots."""
        return [column[:count] for column in self.columns]

    def state(self, count: int) -> dict[str, Any]:
        """What `load` needs to put the first `count` slots back: the columns' own rows."""
        return {"columns": self.first(count)}

    def check(self, state: dict[str, Any]) -> None:
        """Raise if `state` cannot be loaded here."""
        if "folder" in state:
            raise UsageError(
                f"the saved buffer is in the folder {state['folder']}, this one in memory; "
                f"make it with storage=Path({state['folder']!r})."
            )

    def load(self, state: dict[str, Any]) -> list[Tensor]:
        """Put back what `state` describes; in place, since a captured step reads from fixed addresses."""
        if not self.columns:
            self.make(state["names"], state["columns"])
        for column, kept in zip(self.columns, state["columns"], strict=False):
            column[: len(kept)].copy_(kept)
        return self.columns

    def commit(self, state: dict[str, Any]) -> None:
        """`state` is safe in a file."""

    def close(self) -> None:
        """Nothing will be read or written any more."""


class HostMemory(Memory):
    """Columns in the host's memory, for buffers that would not fit into the device's. Steps then wait for a GPU."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        super().__init__(capacity, torch.device("cpu"))
        self.target = device

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part into slot `slots[i]`; `capacity` stands for nowhere."""
        super().write(slots.cpu(), [part.cpu() for part in parts])

    def read(self, slots: Tensor) -> list[Tensor]:
        """Copies of what is in these slots, on the device where samples are drawn."""
        chosen = slots.cpu()
        if self.target.type != "cuda":
            return [rows.to(self.target) for rows in super().read(chosen)]
        # Drawn into pinned memory, which the device fetches by itself; the columns themselves need not be pinned.
        drawn = [column.new_empty((len(chosen), *column.shape[1:]), pin_memory=True) for column in self.columns]
        for column, rows in zip(self.columns, drawn, strict=True):
            torch.index_select(column, 0, chosen, out=rows)
        return [rows.to(self.target, non_blocking=True) for rows in drawn]


def _words(rows: Tensor) -> Tensor:
    """Bytes as 64-bit words where each row has whole ones: a CPU copies them six times as fast."""
    size = prod(rows.shape[1:])
    if rows.dtype != torch.uint8 or size % 8:
        return rows
    whole = rows.contiguous()
    if whole.storage_offset() % 8:  # a view that begins within a word
        whole = whole.clone()
    return whole.view(len(rows), size).view(torch.int64)
