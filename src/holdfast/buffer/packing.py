"""Samples as bytes: those of one shape as rows of a tensor, those of different length each as long as it is."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from holdfast.buffer.layout import Column, Layout, is_answer
from holdfast.errors import UsageError
from holdfast.nested import fills_of, pad_to

__all__ = ["Packing", "bytes_of", "check_lengths", "lengths_of", "pack", "unpack"]


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Tensors with B rows each, of any shapes and types, as one of bytes, (B, bytes per sample) uint8."""
    return torch.cat(list(map(_rows, parts)), dim=1)


def unpack(packed: Tensor, columns: Iterable[Column]) -> list[Tensor]:
    """The tensors that `pack` packed, from their columns."""
    columns = list(columns)
    pieces = torch.split(packed, [column.size for column in columns], dim=1)
    # Copies: a type of several bytes cannot be read at an odd address.
    whole = [piece.clone(memory_format=torch.contiguous_format).flatten() for piece in pieces]
    return [piece.view(dtype).view(len(packed), *shape) for piece, (shape, dtype) in zip(whole, columns, strict=True)]


def bytes_of(part: Tensor) -> Tensor:
    """All bytes of a tensor, in one dimension."""
    # Flattened first: a tensor without elements may have strides that forbid a view of another type.
    return part.reshape(-1).contiguous().view(torch.uint8)


def _rows(part: Tensor) -> Tensor:
    """The bytes of each row, (B, bytes of a row)."""
    return bytes_of(part).view(len(part), prod(part.shape[1:]) * part.itemsize)


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


def lengths_of(parts: Mapping[str, Tensor], fills: Mapping[str, float]) -> Tensor:
    """How many positions each of B samples has up to the last one that is no padding, (B,) int64; at least 1.

    `fills` are those of the tensors that vary in length; answers of the network do not count.
    """
    marks = [parts[name] != fill for name, fill in fills.items() if not is_answer(name)]
    filled, *others = (mark.flatten(2).any(dim=2) if mark.dim() > 2 else mark for mark in marks)
    for mark in others:
        filled = filled.logical_or_(mark)
    return (filled * torch.arange(1, filled.shape[1] + 1, device=filled.device)).amax(dim=1).clamp_(min=1)


class Packing:
    """How samples of different length are stored: one tensor after the other, cut to the sample's length.

    `layout` has their columns, `padding` names those that vary in length, see `fills_of`. Samples are bytes here,
    each a tensor (size,) uint8. `split` and `stack` are the way from padded tensors, (B, longest, ...), and back;
    `divide` and `join` that from columns, where all positions of all samples come one after the other, and back.
    """

    def __init__(self, layout: Layout, padding: Mapping[str, float]) -> None:
        self.names, self.fills = list(layout), fills_of(layout, padding)
        # Of a column that varies, a position has the shape that follows the length.
        self._columns = [Column(each.shape[name in self.fills :], each.dtype) for name, each in layout.items()]
        self._fixed, self._step = sum(self._sizes(0)), sum(self._sizes(1)) - sum(self._sizes(0))
        """Bytes of a sample that do not depend on its length, and bytes of each of its positions."""

    def size(self, length: int) -> int:
        """The bytes of a sample of so many positions."""
        return self._fixed + length * self._step

    def length(self, size: int) -> int:
        """The positions of a sample of so many bytes."""
        return (size - self._fixed) // self._step

    def lengths(self, parts: Sequence[Tensor]) -> Tensor:
        """What `lengths_of` says of padded tensors."""
        return lengths_of(dict(zip(self.names, parts, strict=True)), self.fills)

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

    def split(self, parts: Sequence[Tensor], lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Padded tensors as the bytes of each sample, in memory of its own.

        Waits for the device, unless the samples' `lengths` are known.
        """
        lengths = self.lengths(parts).tolist() if lengths is None else lengths
        if min(lengths, default=0) == self.longest(parts):  # nothing to cut off, so one call makes all of them bytes
            return [row.clone() for row in pack(parts)]
        rows = zip(*(_rows(part).unbind() for part in parts), strict=True)
        return [
            torch.cat([whole[:size] for whole, size in zip(row, self._sizes(length), strict=True)])
            for row, length in zip(rows, lengths, strict=True)
        ]

    def stack(self, samples: Sequence[Tensor]) -> list[Tensor]:
        """The bytes of samples as tensors that are padded to the longest of them."""
        pieces, parts = self._pieces(samples), []
        longest = max((self.length(len(sample)) for sample in samples), default=1)
        for number, (name, (shape, dtype)) in enumerate(zip(self.names, self._columns, strict=True)):
            whole = (longest, *shape) if name in self.fills else shape
            fill, device = self.fills.get(name, 0), samples[0].device if samples else None
            parts.append(torch.full((len(samples), *whole), fill, dtype=dtype, device=device))
            for row, each in zip(parts[-1].view(len(samples), prod(whole)).view(torch.uint8), pieces, strict=True):
                row[: each[number].numel()] = each[number]
        return parts

    def divide(self, columns: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Columns as the bytes of each sample, in memory of its own."""
        sizes = list(map(self._sizes, lengths))
        pieces = [torch.split(bytes_of(each), [size[number] for size in sizes]) for number, each in enumerate(columns)]
        return [torch.cat(sample) for sample in zip(*pieces, strict=True)]

    def join(self, samples: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """The bytes of samples as columns in host memory, and the lengths of the samples."""
        pieces, columns, lengths = self._pieces(samples), [], [self.length(len(sample)) for sample in samples]
        for number, (name, (shape, dtype)) in enumerate(zip(self.names, self._columns, strict=True)):
            rows = sum(lengths) if name in self.fills else len(samples)
            # An empty tensor first: there may be no samples.
            flat = torch.cat([torch.empty(0, dtype=torch.uint8), *(each[number].cpu() for each in pieces)])
            columns.append(flat.view(dtype).view(rows, *shape))
        return columns, lengths

    def state(self, samples: Sequence[Tensor]) -> dict[str, Any]:
        """The fields of a saved state that hold these samples; all are empty if there are none."""
        columns, lengths = self.join(samples) if samples else ([], [])
        fills = self.fills if samples else {}
        return {"columns": columns, "lengths": torch.tensor(lengths, dtype=torch.int64), "padding": fills}

    def _pieces(self, samples: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The bytes of each tensor of each sample."""
        return [torch.split(sample, self._sizes(self.length(len(sample)))) for sample in samples]

    def _sizes(self, length: int) -> list[int]:
        """The bytes of each tensor of a sample of so many positions."""
        named = zip(self.names, self._columns, strict=True)
        return [column.size * (length if name in self.fills else 1) for name, column in named]
