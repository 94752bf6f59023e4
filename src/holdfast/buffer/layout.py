"""What samples and saved states are made of, and whether they fit."""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from holdfast.errors import StorageError, UsageError
from holdfast.nested import Nested, leaves, rebuild, rows
from holdfast.schema import validated

__all__ = ["ANY", "Column", "Layout", "affordable", "check_fit", "check_schema", "choose", "columns_of", "is_answer"]
__all__ += ["layout_of", "layout_of_state", "parts_of", "unaffordable"]

ANY = -1
"""Stands in a shape for a length that differs from sample to sample."""

SHORTAGES = ("allocate memory", "not enough memory", "out of memory")
"""Words by which PyTorch says that memory is short, on a CPU and on a GPU; the type of its error does not tell."""


class Column(NamedTuple):
    """Shape and type of one tensor of a sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {self.type_name}".replace(str(ANY), "any")

    @property
    def type_name(self) -> str:
        """The type without "torch."."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def size(self) -> int:
        """Bytes per sample."""
        return prod(self.shape) * self.dtype.itemsize


Layout = dict[str, Column]
"""Columns by name, as in x['left'][0]; those of the answers are called "logits", or logits['values'] and so on."""


def is_answer(name: str) -> bool:
    """Whether a column holds answers of the network, and not what was observed."""
    return name.partition("[")[0] == "logits"


def parts_of(x: Nested, y: Nested, logits: Nested | None = None) -> tuple[dict[str, Tensor], int]:
    """The tensors of a minibatch by name, and its number of samples; raises unless all tensors agree about it."""
    parts = leaves(x, "x") | leaves(y, "y")
    if logits is not None:
        parts |= leaves(logits, "logits")
    counts = [rows(part, name) for name, part in parts.items()]
    if counts.count(counts[0]) < len(counts):
        raise UsageError(f"{', '.join(parts)} must have one row per sample each, not {', '.join(map(str, counts))}.")
    return parts, counts[0]


def layout_of(parts: Mapping[str, Tensor], varying: Container[str] = ()) -> Layout:
    """The columns that such tensors, with one row per sample, are stored in; some are `varying` in dimension 1."""
    return {
        name: Column((ANY, *part.shape[2:]) if name in varying else tuple(part.shape[1:]), part.dtype)
        for name, part in parts.items()
    }


def check_fit(found: Layout, stored: Layout, which: str = "these samples") -> None:
    """Raise unless samples with the columns `found` fit a buffer with the columns `stored`."""
    if found == stored:
        return
    if any(map(is_answer, found)) != any(map(is_answer, stored)) and all(map(is_answer, found.keys() ^ stored.keys())):
        raise UsageError("logits must be given for every sample or for none.")
    differences = [
        f"{name} is {found.get(name, 'missing')}, stored is {stored.get(name, 'none')}"
        for name in stored | found
        if found.get(name) != stored.get(name)
    ]
    raise UsageError(
        f"{which} do not fit the buffer: {'; '.join(differences)}. "
        "Give samples of the same shapes and types, or use another buffer; padding= allows for different lengths."
    )


@contextmanager
def affordable(wanted: int, place: str) -> Iterator[None]:
    """If there is not enough memory inside the block, say how many bytes were wanted. Other errors pass unchanged."""
    if wanted >= 2**63:  # PyTorch and NumPy refuse such sizes with errors of many types
        raise unaffordable(wanted, place)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in SHORTAGES):
            raise
        raise unaffordable(wanted, place) from error


def unaffordable(wanted: int, place: str, reason: str = "which cannot be had") -> StorageError:
    """The error that says how many bytes were wanted."""
    return StorageError(
        f"the buffer needs {wanted:,} bytes in {place}, {reason}. "
        "Use a smaller buffer, or another storage: 'device', 'host' or the Path of a folder."
    )


def _is_filled(value: Any) -> bool:
    """Whether this is a tensor with content."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"


def _tensor(dtype: torch.dtype, dimensions: int) -> Any:
    return Annotated[Any, lambda value: _is_filled(value) and (value.dtype, value.dim()) == (dtype, dimensions)]


FIELDS = {"capacity": int, "offered": int, "names": list[Any], "form": dict[str, Any], "columns": list[Any]}
FIELDS |= {"seen": _tensor(torch.int64, 0), "generator": _tensor(torch.uint8, 1)}
"""The kind of each field of a saved state; see `validated`."""

FOLDER_FIELDS = {"folder": str, "rows": _tensor(torch.int64, 1), "stamps": _tensor(torch.int64, 1)}
FOLDER_FIELDS |= {"sums": _tensor(torch.int32, 2)}
"""The same for the fields that only buffers in a folder have."""

RAGGED_FIELDS = {"padding": dict[str, Any], "lengths": _tensor(torch.int64, 1)}
"""The same for the fields that only buffers with samples of different length have."""

OPTIONAL = {"stored": int, "policy": str}
"""`stored` is written where samples were forgotten, `policy` where it is no reservoir."""


def check_schema(state: Any) -> None:
    """Raise unless `state` is of the kind that `state_dict` of a buffer returns. It may come from anyone's file."""
    if not isinstance(state, dict):
        raise _wrong(f"it is a {type(state).__name__}, not a dict")
    for key, kind in (FIELDS | _own_fields(state) | OPTIONAL).items():
        if key not in state and key not in OPTIONAL:
            raise _wrong(f"{key!r} is missing")
        if key in state:
            try:
                validated(kind, state[key], repr(key))
            except ValueError:
                raise _wrong(f"{key!r} is not of the expected type") from None
    try:
        nested = _nests_its_columns(state)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        nested = False
    if not nested:
        raise _wrong("'names' and 'form' do not say how its columns make up a sample")
    if not _counts_agree(state):
        raise UsageError("the saved buffer contradicts itself: its counts do not match its samples.")


def _own_fields(state: dict[str, Any]) -> dict[str, Any]:
    """The fields that a state has because it is in a folder, or because its samples differ in length."""
    ragged = "padding" in state
    in_folder = {key: kind for key, kind in FOLDER_FIELDS.items() if not (ragged and key == "rows")}
    return (in_folder if "folder" in state else {}) | (RAGGED_FIELDS if ragged else {})


def _counts_agree(state: dict[str, Any]) -> bool:
    """Whether all fields tell of as many samples."""
    full, varying = min(state["offered"], state["capacity"]), state.get("padding", {})
    stored, columns = state.get("stored", full), columns_of(state)
    found = {len(state[key]) for key in ("rows", "stamps", "lengths") if key in _own_fields(state)}
    if "folder" in state:
        # One checksum for each sample if they differ in length, else one for each tensor of a sample.
        sums = min(1, len(columns)) if "padding" in state else len(columns)
        agree = state["sums"].shape == (sums, stored)
    else:
        found |= {len(column) for name, column in columns.items() if name not in varying}
        agree = all(len(columns[name]) == int(state["lengths"].sum()) for name in varying if name in columns)
    agree &= not varying or bool((state["lengths"] > 0).all())
    return agree and (full > 0) <= stored <= full and int(state["seen"]) == state["offered"] and found <= {stored}


def columns_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """The columns of a saved state by name."""
    return dict(zip(state["names"], state["columns"], strict=True))


def layout_of_state(state: dict[str, Any]) -> Layout:
    """The columns of the samples in a saved state."""
    varying = state.get("padding", {})
    return {
        name: Column((ANY,) * (name in varying) + tuple(column.shape[1:]), column.dtype)
        for name, column in columns_of(state).items()
    }


def choose(state: dict[str, Any], kept: Tensor) -> dict[str, Any]:
    """The state with these of its samples alone, in this order."""
    own = _own_fields(state)
    chosen: dict[str, Any] = {key: state[key][..., kept] for key in ("rows", "stamps", "sums", "lengths") if key in own}
    if "folder" not in state:
        chosen["columns"] = []
        for name, column in columns_of(state).items():
            if name in state.get("padding", {}):
                pieces = torch.split(column, state["lengths"].tolist())
                chosen["columns"].append(torch.cat([column[:0], *(pieces[slot] for slot in kept.tolist())]))
            else:
                chosen["columns"].append(column[kept.to(column.device)])
    return state | chosen


def _nests_its_columns(state: dict[str, Any]) -> bool:
    """Whether `form` has every column in the place that its name says; logits that are one tensor are not in it."""
    columns = columns_of(state)
    parts = ["x", "y", *(["logits"] if "logits" in state["form"] else [])] if columns else []
    samples = {part: rebuild(state["form"][part], columns) for part in parts}
    found = {name: column for part, value in samples.items() for name, column in leaves(value, part).items()}
    whole = len(columns) == len(state["names"]) and columns.keys() - found.keys() <= {"logits"}
    whole &= all(_is_filled(column) and column.dim() for column in columns.values())
    return whole and all(columns[name] is found[name] for name in found)


def _wrong(reason: str) -> UsageError:
    return UsageError(f"this is not the saved state of a buffer: {reason}. Load an intact copy of it.")
