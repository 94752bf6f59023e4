"""What the saved state of a buffer looks like. It may come from a file that anyone wrote."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.errors import UsageError
from holdfast.nested import leaves, rebuild

__all__ = ["check_schema", "columns_of"]

FIELDS: dict[str, Any] = {
    "capacity": int,
    "offered": int,
    "seen": (torch.int64, 0),
    "names": list,
    "form": dict,
    "columns": list,
    "generator": (torch.uint8, 1),
}
"""The type of each field; of a tensor, its type and number of dimensions."""

FOLDER_FIELDS: dict[str, Any] = {
    "folder": str,
    "rows": (torch.int64, 1),
    "stamps": (torch.int64, 1),
    "sums": (torch.int32, 2),
}
"""What the state of a buffer in a folder has besides."""

OPTIONAL = ("sums",)  # early versions computed none


def check_schema(state: Any) -> None:
    """Raise unless `state` is of the kind that `state_dict` of a buffer returns."""
    if not isinstance(state, dict):
        raise _wrong(f"it is a {type(state).__name__}, not a dict")
    for key, expected in (FIELDS | FOLDER_FIELDS if "folder" in state else FIELDS).items():
        if key not in state and key not in OPTIONAL:
            raise _wrong(f"{key!r} is missing")
        if key in state and not _fits(state[key], expected):
            raise _wrong(f"{key!r} is not of the expected type")
    try:
        named_once = _names_each_column_once(state)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        named_once = False
    if not named_once:
        raise _wrong("'names' and 'form' do not say how its columns make up a sample")
    stored = min(state["offered"], state["capacity"])
    counts = {len(state[key]) for key in ("rows", "stamps")} if "folder" in state else set(map(len, state["columns"]))
    summed = state["sums"].shape == (len(state["columns"]), stored) if "folder" in state and "sums" in state else True
    if stored < 0 or int(state["seen"]) != state["offered"] or counts - {stored} or not summed:
        raise UsageError("the saved buffer contradicts itself: its counts do not match its samples.")


def _fits(value: Any, expected: Any) -> bool:
    if isinstance(expected, type):
        return type(value) is expected
    return _is_tensor(value) and (value.dtype, value.dim()) == expected


def _is_tensor(value: Any) -> bool:
    """Whether this is a tensor with content."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"


def _names_each_column_once(state: dict[str, Any]) -> bool:
    """Whether the nesting of x and y names every column, except that of the logits, where it belongs."""
    columns = columns_of(state)
    samples = {part: rebuild(state["form"][part], columns) for part in ("x", "y") if columns}
    found = {name: column for part, value in samples.items() for name, column in leaves(value, part).items()}
    rest = columns.keys() - found.keys()
    tensors = all(_is_tensor(column) and column.dim() for column in columns.values())
    return tensors and rest <= {"logits"} and all(columns[name] is found[name] for name in found)


def columns_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """The columns of a state by name."""
    columns = dict(zip(state["names"], state["columns"], strict=True))
    if len(columns) < len(state["names"]):
        raise ValueError("two columns of one name")
    return columns


def _wrong(reason: str) -> UsageError:
    return UsageError(f"this is not the saved state of a buffer: {reason}. Load an intact copy of it.")
