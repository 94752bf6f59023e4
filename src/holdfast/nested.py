"""Minibatches of several tensors: dicts, tuples and lists of tensors, nested as deep as one likes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.errors import UsageError

__all__ = ["Nested", "chosen_rows", "concat", "fills_of", "leaves", "outline", "pad", "pad_to", "rebuild", "rows"]
__all__ += ["split", "transform"]

Nested = Any
"""A tensor, or dicts (with texts as keys), tuples and lists of them; row i of every tensor belongs to sample i."""


def leaves(value: Nested, name: str) -> dict[str, Tensor]:
    """Every tensor in `value` by its name in Python, for instance x['left'][0] if `name` is "x"."""
    if isinstance(value, Tensor):
        return {name: value}
    found: dict[str, Tensor] = {}
    for part, item in _parts(value, name):
        found |= leaves(item, part)
    return found


def outline(value: Nested, name: str) -> Any:
    """The nesting of `value`, with the name of each tensor in its place; `rebuild` puts the tensors back."""
    if isinstance(value, Tensor):
        return name
    return _like(value, [outline(item, part) for part, item in _parts(value, name)])


def rebuild(form: Any, tensors: Mapping[str, Tensor]) -> Nested:
    """The tensors in the nesting that `outline` described."""
    if isinstance(form, str):
        return tensors[form]
    return _like(form, [rebuild(item, tensors) for item in (form.values() if isinstance(form, Mapping) else form)])


def transform(function: Callable[[Tensor], Tensor], value: Nested, name: str = "x") -> Nested:
    """`function` of every tensor, in the same nesting."""
    if isinstance(value, Tensor):
        return function(value)
    return _like(value, [transform(function, item, part) for part, item in _parts(value, name)])


def concat(values: Sequence[Nested]) -> Nested:
    """Minibatches of one form, one after the other."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    named = [leaves(value, "x") for value in values]
    return rebuild(outline(first, "x"), {name: torch.cat([each[name] for each in named]) for name in named[0]})


def split(value: Nested, sizes: Sequence[int]) -> list[Nested]:
    """Consecutive minibatches of these sizes; the inverse of `concat`."""
    if isinstance(value, Tensor):
        return list(torch.split(value, list(sizes)))
    form = outline(value, "x")
    parts = {name: torch.split(tensor, list(sizes)) for name, tensor in leaves(value, "x").items()}
    return [rebuild(form, {name: part[number] for name, part in parts.items()}) for number in range(len(sizes))]


def chosen_rows(value: Nested, which: Tensor | slice | int) -> Nested:
    """These rows of every tensor."""
    return transform(lambda part: part[which.to(part.device) if isinstance(which, Tensor) else which], value)


def fills_of(names: Iterable[str], padding: Mapping[str, float]) -> dict[str, float]:
    """The value that short samples are filled up with, for each of these tensors that `padding` names.

    It names a tensor ("x['ids']"), one of x or y by its key ("ids"), or all whose names begin so ("x", "logits").
    """
    keys = tuple(padding)
    meant = {name: _meant(name, keys) for name in names}
    return {name: padding[key] for name, key in meant.items() if key is not None}


@lru_cache(maxsize=1000)  # every step asks several times for the same names, and making texts is slow
def _meant(name: str, keys: tuple[str, ...]) -> str | None:
    """The key that says most exactly that this tensor is meant, if one does."""
    found = [key for key in keys if name in (key, f"x[{key!r}]", f"y[{key!r}]") or name.startswith(f"{key}[")]
    return max(found, key=len, default=None)


def pad(values: Sequence[Nested], padding: Mapping[str, float] | None, name: str) -> list[Nested]:
    """Minibatches of one form, filled up along dimension 1 to the longest of them; see `fills_of` for `padding`.

    `name` is what the names of their tensors begin with. Tensors that are long enough are not copied.
    """
    if padding is None or len(values) < 2:
        return list(values)
    named = [leaves(value, name) for value in values]
    for leaf, fill in fills_of(named[0], padding).items():
        longest = max(each[leaf].shape[1] for each in named)
        for each in named:
            each[leaf] = pad_to(each[leaf], longest, fill)
    return [rebuild(outline(value, name), each) for value, each in zip(values, named, strict=True)]


def pad_to(part: Tensor, length: int, fill: float) -> Tensor:
    """A tensor (B, positions, ...) filled up to so many positions; the tensor itself if it has them."""
    short = length - part.shape[1]
    return F.pad(part, (0, 0) * (part.dim() - 2) + (0, short), value=fill) if short else part


def rows(value: Nested, name: str = "x") -> int:
    """The number of samples; raises if the tensors have different numbers of rows."""
    if isinstance(value, Tensor) and value.dim():
        return value.shape[0]  # len() of a tensor is slow
    counts = {}
    for leaf, tensor in leaves(value, name).items():
        if not tensor.dim():
            raise UsageError(f"{leaf} is a single number; it needs one row per sample.")
        counts[leaf] = len(tensor)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{leaf} has {count}" for leaf, count in counts.items())
        raise UsageError(f"every part of a minibatch needs one row per sample, but {found}.")
    return next(iter(counts.values()))


def _parts(value: Nested, name: str) -> Iterator[tuple[str, Any]]:
    """The items of a dict, tuple or list, each with its name; raises for anything else."""
    kind = type(value).__name__
    # Named tuples are refused as well: a checkpoint could not say which class it was.
    if type(value) not in (tuple, list) and not isinstance(value, Mapping):
        raise UsageError(f"{name} is of type {kind}: inputs must be tensors, or dicts, tuples and lists of tensors.")
    if not value:
        raise UsageError(f"{name} is empty: a {kind} of inputs must hold at least one tensor.")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{name} has the key {key!r}: the keys of inputs must be texts.")
            yield f"{name}[{key!r}]", item
        return
    if all(isinstance(item, Mapping) for item in value):
        raise UsageError(
            f"{name} is a {kind} of dicts. Row i of every tensor must belong to sample i, so one dict per sample would "
            "mix the samples. Give one dict of tensors with one row per sample; pad rows of different lengths."
        )
    yield from ((f"{name}[{number}]", item) for number, item in enumerate(value))


def _like(value: Any, items: list[Any]) -> Any:
    """`items` in a container of the kind of `value`."""
    if isinstance(value, Mapping):
        return dict(zip(value, items, strict=True))
    return tuple(items) if isinstance(value, tuple) else items
