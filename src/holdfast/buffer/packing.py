"""Samples as bytes: those of one shape as rows of a tensor, those of different length each as long as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.buffer.layout import Column, Layout, is_answer, layout_of
from holdfast.errors import UsageError
from holdfast.nested import fills_of, pad_to

__all__ = ["Packing", "check_lengths", "pack", "ragged_state", "unpack"]


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Tensors with B rows each, of any shapes and types, as one of bytes, (B, bytes per sample) uint8."""
    # Flattened first: a tensor without elements may have strides that forbid a view of another type.
    flat = [part.reshape(-1).contiguous().view(torch.uint8) for part in parts]
    sizes = [column.size for column in layout_of({str(number): part for number, part in enumerate(parts)}).values()]
    return torch.cat([part.view(len(parts[0]), size) for part, size in zip(flat, sizes, strict=True)], dim=1)


def unpack(packed: Tensor, columns: Iterable[Column]) -> list[Tensor]:
    """The tensors that `pack` packed, from their columns."""
    columns = list(columns)
    pieces = torch.split(packed, [column.size for column in columns], dim=1)
    # Copies: a type of several bytes cannot be read at an odd address.
    whole = [piece.clone(memory_format=torch.contiguous_format).flatten() for piece in pieces]
    return [piece.view(dtype).view(len(packed), *shape) for piece, (shape, dtype) in zip(whole, columns, strict=True)]


# --- samples of different length -------------------------------------------------------------------------------------


def check_lengths(parts: Mapping[str, Tensor], padding: Mapping[str, float]) -> dict[str, float]:
    """What each tensor of a minibatch that varies in length is padded with; raises if the tensors do not fit that."""
    fills = fills_of(parts, padding)
    for key in padding:
        if not is_answer(key) and not fills_of(parts, {key: 0}):
            raise UsageError(f"padding names {key!r}, but the tensors of a minibatch are {', '.join(parts)}.")
    if all(map(is_answer, fills)):
        raise UsageError("padding must name a tensor of x or y, which tells where a sample ends.")
    for name in fills:
        if parts[name].dim() < 2 or 0 in parts[name].shape[1:]:
            shape = tuple(parts[name].shape)
            raise UsageError(f"{name} has padding, so its shape must be (samples, positions, ...), not {shape}.")
    lengths = {name: parts[name].shape[1] for name in fills}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(f"tensors with padding need the same number of positions in a minibatch, but {found}.")
    return fills


class Packing:
    """How samples of different length are stored: the tensors of fixed shape, then one position after the other.

    `layout` has their columns, `fills` what those that vary in length are padded with. There are three forms of several
    samples, and methods for the ways between them: padded tensors, (B, longest, ...); columns, where all positions of
    all samples come one after the other, (positions, ...), with the samples' lengths; and bytes, a tensor per sample.
    """

    def __init__(self, layout: Layout, fills: Mapping[str, float]) -> None:
        self.names, self.fills = list(layout), dict(fills)
        # Of a column that varies, a position has the shape that follows the length.
        columns = {name: Column(each.shape[name in fills :], each.dtype) for name, each in layout.items()}
        self._fixed = {name: column for name, column in columns.items() if name not in fills}
        self._varying = {name: column for name, column in columns.items() if name in fills}
        self._head = sum(column.size for column in self._fixed.values())
        self._step = sum(column.size for column in self._varying.values())

    def size(self, length: int) -> int:
        """The bytes of a sample of so many positions."""
        return self._head + length * self._step

    def length(self, size: int) -> int:
        """The positions of a sample of so many bytes."""
        return (size - self._head) // self._step

    def lengths(self, parts: Sequence[Tensor]) -> Tensor:
        """How many positions each of B samples has up to the last one that is no padding, (B,) int64; at least 1."""
        named = zip(self.names, parts, strict=True)
        marks = [part != self.fills[name] for name, part in named if name in self.fills and not is_answer(name)]
        marks = [mark.flatten(2).any(dim=2) if mark.dim() > 2 else mark for mark in marks]
        filled = torch.stack(marks).any(dim=0)
        return torch.where(filled, torch.arange(1, filled.shape[1] + 1, device=filled.device), 1).amax(dim=1)

    def longest(self, parts: Sequence[Tensor]) -> int:
        """The number of positions of padded tensors, 0 if none varies in length."""
        return max(
            (part.shape[1] for name, part in zip(self.names, parts, strict=True) if name in self.fills), default=0
        )

    def extend(self, parts: Sequence[Tensor], length: int) -> list[Tensor]:
        """Padded tensors with so many positions, at least as many as they have."""
        return [
            pad_to(part, length, self.fills[name]) if name in self.fills else part
            for name, part in zip(self.names, parts, strict=True)
        ]

    def cut(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """Padded tensors as columns, and the lengths of the samples. Waits for the device."""
        if not self.fills:
            return list(parts), [0] * len(parts[0])
        lengths = self.lengths(parts)
        kept = self._positions(lengths, self.longest(parts))
        columns = [part[kept] if name in self.fills else part for name, part in zip(self.names, parts, strict=True)]
        return columns, lengths.tolist()

    def pad(self, columns: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Columns as tensors that are padded to the longest sample."""
        longest, device = max(lengths, default=1), columns[0].device
        kept = self._positions(torch.tensor(lengths, device=device), longest)
        padded = []
        for name, column in zip(self.names, columns, strict=True):
            if name in self.fills:
                shape = column.shape[1:]
                room = column.new_full((len(lengths), longest, *shape), self.fills[name])
                column = room.masked_scatter_(kept.view(*kept.shape, *[1] * len(shape)).expand_as(room), column)
            padded.append(column)
        return padded

    def divide(self, columns: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Columns as the bytes of each sample, in memory of its own."""
        named = dict(zip(self.names, columns, strict=True))
        positions = pack([named[name] for name in self._varying])
        heads = pack([named[name] for name in self._fixed]) if self._fixed else positions.new_empty(len(lengths), 0)
        bodies = torch.split(positions, list(lengths))
        return [torch.cat([head, body.flatten()]) for head, body in zip(heads, bodies, strict=True)]

    def join(self, samples: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """The bytes of samples as columns, and the lengths of the samples."""
        none = torch.empty(0, dtype=torch.uint8, device=samples[0].device if samples else None)
        heads = torch.cat([none, *(sample[: self._head] for sample in samples)]).view(len(samples), self._head)
        positions = torch.cat([none, *(sample[self._head :] for sample in samples)]).view(-1, self._step)
        named = dict(zip(self._fixed, unpack(heads, self._fixed.values()), strict=True))
        named |= dict(zip(self._varying, unpack(positions, self._varying.values()), strict=True))
        return [named[name] for name in self.names], [self.length(len(sample)) for sample in samples]

    def _positions(self, lengths: Tensor, longest: int) -> Tensor:
        """Which positions belong to the samples, (B, longest) bool."""
        return torch.arange(longest, device=lengths.device) < lengths[:, None]


def ragged_state(columns: list[Tensor], lengths: Sequence[int], packing: Packing) -> dict[str, Any]:
    """The fields of a saved state that hold samples of different length; all are empty if there are none."""
    fills = packing.fills if columns else {}
    return {"columns": columns, "lengths": torch.tensor(lengths, dtype=torch.int64), "padding": fills}
