"""What samples and saved states are made of, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.errors import StorageError, UsageError
from holdfast.nested import Nested, leaves, rebuild, rows

__all__ = ["Column", "Layout", "affordable", "check_fit", "check_schema", "columns_of", "layout_of", "parts_of"]


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
"""Columns by name, as in x['left'][0]; the column of the logits is called "logits"."""


def parts_of(x: Nested, y: Nested, logits: Tensor | None = None) -> tuple[dict[str, Tensor], int]:
    """The tensors of a minibatch by name, and its number of samples; raises unless all tensors agree about it."""
    parts = leaves(x, "x") | leaves(y, "y")
    if logits is not None:
        parts["logits"] = logits
    counts = [rows(part, name) for name, part in parts.items()]
    if counts.count(counts[0]) < len(counts):
        raise UsageError(f"{', '.join(parts)} must have one row per sample each, not {', '.join(map(str, counts))}.")
    return parts, counts[0]


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
    """If there is not enough memory inside the block, say how many bytes were wanted."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError, ValueError) as error:
        raise StorageError(
            f"the buffer needs {wanted:,} bytes in {place}, which cannot be had. "
            "Use a smaller buffer, or another storage: 'device', 'host' or the Path of a folder."
        ) from error


FIELDS: dict[str, Any] = {"capacity": int, "offered": int, "names": list, "form": dict, "columns": list}
FIELDS |= {"seen": (torch.int64, 0), "generator": (torch.uint8, 1)}
"""The type of each field of a saved state; for a tensor, its type and number of dimensions."""

FOLDER_FIELDS = {"folder": str, "rows": (torch.int64, 1), "stamps": (torch.int64, 1), "sums": (torch.int32, 2)}
"""The same for the fields that only buffers in a folder have."""

OPTIONAL = {"sums": FOLDER_FIELDS["sums"], "stored": int, "policy": str}
"""Early versions wrote no sums. `stored` is written where samples were forgotten, `policy` where it is no reservoir."""


def check_schema(state: Any) -> None:
    """Raise unless `state` is of the kind that `state_dict` of a buffer returns. It may come from anyone's file."""
    if not isinstance(state, dict):
        raise _wrong(f"it is a {type(state).__name__}, not a dict")
    for key, expected in (FIELDS | (FOLDER_FIELDS if "folder" in state else {}) | OPTIONAL).items():
        if key not in state and key not in OPTIONAL:
            raise _wrong(f"{key!r} is missing")
        if key in state and not _is(state[key], expected):
            raise _wrong(f"{key!r} is not of the expected type")
    try:
        nested = _nests_its_columns(state)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        nested = False
    if not nested:
        raise _wrong("'names' and 'form' do not say how its columns make up a sample")
    full, in_folder = min(state["offered"], state["capacity"]), "folder" in state
    stored = state.get("stored", full)
    lengths = {len(each) for each in ((state["rows"], state["stamps"]) if in_folder else state["columns"])}
    summed = not (in_folder and "sums" in state) or state["sums"].shape == (len(state["columns"]), stored)
    counted = (full > 0) <= stored <= full and int(state["seen"]) == state["offered"]
    if not counted or lengths - {stored} or not summed:
        raise UsageError("the saved buffer contradicts itself: its counts do not match its samples.")


def columns_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """The columns of a saved state by name."""
    return dict(zip(state["names"], state["columns"], strict=True))


def _is(value: Any, expected: Any) -> bool:
    """Whether `value` is of the type that `FIELDS` says."""
    if isinstance(expected, type):
        return type(value) is expected
    return _is_filled(value) and (value.dtype, value.dim()) == expected


def _is_filled(value: Any) -> bool:
    """Whether this is a tensor with content."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"


def _nests_its_columns(state: dict[str, Any]) -> bool:
    """Whether the nesting of x and y names every column, except that of the logits, where it belongs."""
    columns = columns_of(state)
    samples = {part: rebuild(state["form"][part], columns) for part in ("x", "y") if columns}
    found = {name: column for part, value in samples.items() for name, column in leaves(value, part).items()}
    whole = len(columns) == len(state["names"]) and columns.keys() - found.keys() <= {"logits"}
    whole &= all(_is_filled(column) and column.dim() for column in columns.values())
    return whole and all(columns[name] is found[name] for name in found)


def _wrong(reason: str) -> UsageError:
    return UsageError(f"this is not the saved state of a buffer: {reason}. Load an intact copy of it.")
