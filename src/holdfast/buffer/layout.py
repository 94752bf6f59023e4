"""What stored samples are made of: the name, shape and type of every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.errors import StorageError, UsageError
from holdfast.nested import Nested, leaves, rows

__all__ = ["Column", "Layout", "affordable", "check_fit", "layout_of", "parts_of"]


class Column(NamedTuple):
    """Shape and type of one tensor of a sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {self.type_name}"

    @property
    def type_name(self) -> str:
        """The type without "torch."."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def size(self) -> int:
        """Bytes per sample."""
        return prod(self.shape) * self.dtype.itemsize


Layout = dict[str, Column]
"""Columns by name, as in x['left'][0]; the logits' column is called "logits"."""


def parts_of(x: Nested, y: Nested, logits: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors of a minibatch by name; raises unless each has one row per sample."""
    parts = leaves(x, "x") | leaves(y, "y")
    if logits is not None:
        parts["logits"] = logits
    counts = [rows(part, name) for name, part in parts.items()]
    if counts.count(counts[0]) < len(counts):
        raise UsageError(f"{', '.join(parts)} must have one row per sample each, not {', '.join(map(str, counts))}.")
    return parts


def layout_of(parts: Mapping[str, Tensor]) -> Layout:
    """The columns that such tensors, with one row per sample, are stored in."""
    return {name: Column(tuple(part.shape[1:]), part.dtype) for name, part in parts.items()}


def check_fit(found: Layout, stored: Layout, which: str = "these samples") -> None:
    """Raise unless samples with the columns `found` fit a buffer with the columns `stored`."""
    if found == stored:
        return
    if found.keys() ^ stored.keys() == {"logits"}:
        raise UsageError("logits must be given for every sample or for none.")
    differences = [
        f"{name} is {found.get(name, 'missing')}, stored is {stored.get(name, 'none')}"
        for name in stored | found
        if found.get(name) != stored.get(name)
    ]
    raise UsageError(
        f"{which} do not fit the buffer: {'; '.join(differences)}. "
        "Give samples of the same shapes and types, or use another buffer."
    )


@contextmanager
def affordable(wanted: int, place: str) -> Iterator[None]:
    """Say how many bytes were wanted where there is not enough memory for them."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError, ValueError) as error:
        raise StorageError(
            f"the buffer needs {wanted:,} bytes in {place}, which cannot be had. "
            "Use a smaller buffer, or another storage: 'device', 'host' or the Path of a folder."
        ) from error
