"""What a buffer draws, and what a storage offers to it."""
# ruff: noqa: D102 (`Memory` and `Folder` explain the methods)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from holdfast.buffer.layout import Layout
from holdfast.nested import Nested

__all__ = ["Draw", "Placement", "Plan", "Storage"]

Placement = Callable[[Tensor, Tensor, int], Tensor]
"""A pure function (uniforms, samples seen before, capacity) -> the slot of each offered sample. See `place`."""


class Draw(NamedTuple):
    """Samples from a buffer; row i of every tensor belongs to one sample. `logits` is None if none are stored."""

    x: Nested
    y: Nested
    logits: Nested | None


class Plan(NamedTuple):
    """Where samples will go that are offered next. It holds until something is drawn or stored."""

    offered: int
    """How many samples there are."""
    rows: Tensor
    """Which of them will be stored, int64 on the host."""
    slots: Tensor
    """The slot of each of those, int64 on the host."""
    lengths: list[int] | None
    """How many positions each of those has, where samples differ in length."""
    filled: int
    """How many holes they fill."""
    before: tuple[int, int]
    """What the buffer had counted when the plan was made: samples offered, and holes."""
    generator: Tensor
    """The state that its generator had."""


class Storage(Protocol):
    """Where a buffer's samples are: a column for each tensor of a sample, a row for each slot."""

    layout: Layout
    """The columns, in order; empty until `make` or `load`."""

    def make(self, layout: Layout) -> None: ...
    def reserve(self, parts: Sequence[Tensor], lengths: list[int] | None = None) -> None: ...
    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None: ...
    def read(self, slots: Tensor) -> list[Tensor]: ...
    def first(self, count: int) -> list[Tensor]: ...
    def change(self, name: str, convert: Callable[[Tensor], Tensor]) -> None: ...
    def state(self, count: int) -> dict[str, Any]: ...
    def check(self, state: dict[str, Any]) -> None: ...
    def load(self, state: dict[str, Any]) -> None: ...
    def committed(self) -> dict[str, Any] | None: ...
    def commit(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...
