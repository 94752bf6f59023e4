"""Stored samples that differ in length: each takes as much room as it has content."""

from __future__ import annotations

import operator
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.buffer.layout import Column, Layout, affordable, layout_of_state, unaffordable
from holdfast.buffer.memory import check_in_memory
from holdfast.buffer.packing import Packing, ragged_state
from holdfast.nested import fills_of

__all__ = ["RaggedMemory"]


class RaggedMemory:
    """Samples in the memory of `home`, each in bytes of its own; they are drawn on `device`, for which steps wait.

    `padding` says which columns vary in length, and what they are padded with when they are drawn.
    """

    def __init__(self, capacity: int, device: torch.device, home: torch.device, padding: Mapping[str, float]) -> None:
        self.capacity, self.device, self.home, self.padding = capacity, device, home, padding
        self.layout: Layout = {}
        self._packing = Packing({}, {})
        self._samples: dict[int, Tensor] = {}
        """The bytes of the sample in each slot."""
        self._copies: list[tuple[list[weakref.ref[Tensor]], list[Tensor]]] = []
        """The samples of minibatches that are still to be written, and the tensors they were copied from."""

    def make(self, layout: Layout) -> None:
        """Expect samples with such columns."""
        if layout != self.layout:
            self.layout, self._packing = layout, Packing(layout, fills_of(layout, self.padding))
            self._samples, self._copies = {}, []

    def reserve(self, parts: Sequence[Tensor]) -> None:
        """Copy the samples now, so that `write` cannot fail; before the first of them, look for room for all slots."""
        if len(parts) < len(self.layout):
            return  # the answers are still to come
        copies = self._copy(parts)
        if not self._samples:
            check_room(self.capacity * max(map(len, copies), default=0), self.home)
        self._taken(parts)
        self._copies.append(([weakref.ref(part) for part in parts], copies))

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part, one for each column, into slot `slots[i]`; `capacity` stands for nowhere."""
        copies = self._taken(parts) or self._copy(parts)
        self._samples |= {slot: copies[i] for i, slot in enumerate(slots.tolist()) if slot < self.capacity}

    def read(self, slots: Tensor) -> list[Tensor]:
        """Copies of the samples in these slots, on the device, padded to the longest of them."""
        return [part.to(self.device) for part in self._padded(slots.tolist())]

    def first(self, count: int) -> list[Tensor]:
        """Copies of the samples in the first so many slots, padded to the longest of them."""
        return self._padded(range(count))

    def change(self, name: str, convert: Callable[[Tensor], Tensor]) -> None:
        """Put `convert(column)` in the place of a column; one that varies has a row for each position."""
        if not self._samples:
            return
        columns, lengths = self._packing.join(list(self._samples.values()))
        number = list(self.layout).index(name)
        columns[number] = convert(columns[number])
        column = Column(
            (*self.layout[name].shape[: name in self._packing.fills], *columns[number].shape[1:]), columns[number].dtype
        )
        slots = list(self._samples)
        self.make(self.layout | {name: column})
        self._samples = dict(zip(slots, self._packing.divide(columns, lengths), strict=True))

    def state(self, count: int) -> dict[str, Any]:
        """What `load` needs to restore the first `count` slots: the columns without padding, on the host."""
        columns, lengths = (
            self._packing.join([self._samples[slot].cpu() for slot in range(count)]) if count else ([], [])
        )
        return ragged_state(columns, lengths, self._packing)

    def check(self, state: dict[str, Any]) -> None:
        """Raise if the samples of `state` are in a folder."""
        check_in_memory(state)

    def load(self, state: dict[str, Any]) -> None:
        """Copy the samples."""
        samples: list[Tensor] = []
        if state["columns"]:
            self.make(layout_of_state(state))
            columns = [column.to(self.home) for column in state["columns"]]
            samples = self._packing.divide(columns, state["lengths"].tolist())
        self._samples, self._copies = dict(enumerate(samples)), []

    def committed(self) -> None:
        """Nothing outlives the process."""

    def commit(self, state: dict[str, Any]) -> None:
        """Nothing: checkpoints hold the samples."""

    def close(self) -> None:
        """Nothing is open."""

    def _copy(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The bytes of each sample of a minibatch."""
        with affordable(sum(part.nbytes for part in parts), f"the memory of {self.home}"):
            columns, lengths = self._packing.cut([part.detach() for part in parts])
            return self._packing.divide([column.to(self.home) for column in columns], lengths)

    def _taken(self, parts: Sequence[Tensor]) -> list[Tensor] | None:
        """The copies that were made of these very tensors; they and those of tensors that are gone are forgotten."""
        found, others = None, []
        for tensors, copies in self._copies:
            alive = [tensor() for tensor in tensors]
            if len(alive) == len(parts) and all(map(operator.is_, alive, parts)):
                found = copies
            elif all(tensor is not None for tensor in alive):
                others.append((tensors, copies))
        self._copies = others
        return found

    def _padded(self, slots: Iterable[int]) -> list[Tensor]:
        """The samples in these slots, where they are stored."""
        return self._packing.pad(*self._packing.join([self._samples[slot] for slot in slots]))


def check_room(wanted: int, place: torch.device | Path) -> None:
    """Raise unless so many bytes are free: in the memory of a device, or on the disk of a folder."""
    name = "the folder" if isinstance(place, Path) else "the memory of"
    free = _free_bytes(place)
    if free is not None and wanted > free:
        raise unaffordable(wanted, f"{name} {place}", f"{free:,} are free")


def _free_bytes(place: torch.device | Path) -> int | None:
    """The bytes that are free, None if nothing tells."""
    if isinstance(place, Path):
        return shutil.disk_usage(place).free
    if place.type == "cuda":
        # PyTorch retains memory that was freed, and gives it out again.
        retained = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return torch.cuda.mem_get_info(place)[0] + retained
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
