"""What a buffer draws, and what a storage does for it."""
# ruff: noqa: B027 (a storage in memory has nothing to do where a folder has)

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.buffer.layout import Layout
from holdfast.errors import UsageError
from holdfast.nested import Nested

__all__ = ["Draw", "Plan", "Storage"]


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
    """How many of these slots are holes: empty since their samples were forgotten."""
    before: tuple[int, int]
    """The buffer's counts when the plan was made: samples offered, and holes."""
    generator: Tensor
    """The state that its generator had."""


class Storage(ABC):
    """Where a buffer's samples are: a column for each tensor of a sample, a row for each slot.

    Samples are stored in the memory of `home`, or in files that are read to it, and drawn on `device`. What is not
    abstract here suits a storage in memory, of which nothing outlives the process.
    """

    def __init__(self, capacity: int, device: torch.device, home: torch.device) -> None:
        self.capacity, self.device, self.home = capacity, device, home
        self.layout: Layout = {}
        """The columns, in order; empty until `make` or `load`."""

    @abstractmethod
    def make(self, layout: Layout) -> None:
        """Expect samples with such columns. Nothing changes if they are the columns already."""

    @abstractmethod
    def reserve(self, parts: Sequence[Tensor], lengths: Sequence[int] | None = None) -> None:
        """Take the room for these samples, so that `write` cannot fail; `parts` has one tensor for each column.

        `lengths` are those of samples that differ in length, if known.
        """

    @abstractmethod
    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part, one for each column, into slot `slots[i]`; `capacity` stands for nowhere."""

    @abstractmethod
    def read(self, slots: Tensor) -> list[Tensor]:
        """Copies of the samples in these slots, on the device; if they differ in length, padded to the longest."""

    @abstractmethod
    def first(self, count: int) -> list[Tensor]:
        """The samples in the first so many slots, all at once in the memory of `home`."""

    @abstractmethod
    def change(self, name: str, convert: Callable[[Tensor], Tensor]) -> None:
        """Put `convert(column)` in the place of a column; of one that varies in length, a row is a position."""

    @abstractmethod
    def state(self, count: int) -> dict[str, Any]:
        """What `load` needs to restore the first `count` slots. A folder's state says in which files they are."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that was checked. A folder also takes the samples of one from memory."""

    def check(self, state: dict[str, Any]) -> None:
        """Raise if `state` cannot be loaded."""
        if "folder" in state:
            raise UsageError(
                f"the saved buffer is in the folder {state['folder']}, this one in memory; "
                f"make it with storage=Path({state['folder']!r})."
            )

    def committed(self) -> dict[str, Any] | None:
        """The state that a folder was last told to be found in; in memory, there is none."""
        return None

    def commit(self, state: dict[str, Any]) -> None:
        """Be found in `state` when the folder is opened again. In memory, checkpoints hold the samples."""

    def close(self) -> None:
        """Leave the folder to others; nothing can be read or written any more."""
