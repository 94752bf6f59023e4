"""What a buffer is to a learner, and what a storage is to a buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.nested import Nested

__all__ = ["Buffer", "Draw", "Placement", "Storage"]

Placement = Callable[[Tensor, Tensor, int], Tensor]
"""A pure function (uniforms, samples seen before, capacity) -> the slot of each offered sample; see `place`."""


class Draw(NamedTuple):
    """Samples from a buffer; row i of every tensor belongs to one sample. `logits` is None if none are stored."""

    x: Nested
    y: Nested
    logits: Tensor | None


class Buffer(Protocol):
    """What learners and engines use of a buffer."""

    capacity: int
    generator: torch.Generator
    place: Placement

    @property
    def stored(self) -> int:
        """How many samples the buffer holds."""

    @property
    def offered(self) -> int:
        """How many samples were offered so far, counted by the host."""

    def recount(self, offered: int) -> None:
        """Set the host's count where the device's moved without it: a replayed CUDA graph, or a failed capture."""

    def __len__(self) -> int:
        """The same as `stored`."""

    def check(self, x: Nested, y: Nested) -> None:
        """Raise if samples like these, logits aside, do not fit the buffer."""

    def check_whole(self, x: Nested, y: Nested, logits: Tensor | None = None) -> None:
        """Raise if samples like these, with these logits or with none, do not fit the buffer."""

    def add(self, x: Nested, y: Nested, logits: Tensor | None = None) -> None:
        """Offer B samples in order."""

    def sample(self, n: int) -> Draw:
        """min(n, stored) distinct samples, each equally likely."""

    def contents(self) -> Draw:
        """All stored samples, in slot order."""

    def widen(self, outputs: int) -> None:
        """Make room for logits of so many outputs."""

    def state_dict(self) -> dict[str, Any]:
        """All that decides what the buffer does next."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the buffer that gave `state` was."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `state` does not fit this buffer."""

    def commit(self, state: dict[str, Any] | None = None) -> None:
        """Make `state`, or the present one, the state in which a folder is opened again."""

    def close(self) -> None:
        """Release the folder, if the buffer is in one."""


class Storage(Protocol):
    """Where a buffer's samples are: one column per tensor of a sample, one row per slot."""

    def committed(self) -> dict[str, Any] | None:
        """The state of the last `commit`, None if there was none."""

    def expect(self, like: Mapping[str, Tensor], aside: Sequence[str] = ()) -> None:
        """Raise if columns for samples like these cannot be made; columns named in `aside` are not looked at."""

    def make(self, names: Sequence[str], like: Sequence[Tensor]) -> list[Tensor]:
        """Make columns for samples like these; returns them, or tensors without content of their shapes and types."""

    def reserve(self, count: int) -> None:
        """Make sure of room for so many more samples."""

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part into slot `slots[i]`; `capacity` stands for nowhere."""

    def change(self, number: int, made: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Replace a column by `made(column)`; returns the columns as `make` does."""

    def read(self, slots: Tensor) -> list[Tensor]:
        """Copies of the rows in these slots, on the device where samples are drawn."""

    def first(self, count: int) -> list[Tensor]:
        """The rows in the first `count` slots."""

    def state(self, count: int) -> dict[str, Any]:
        """What `load` needs to restore the first `count` slots."""

    def check(self, state: dict[str, Any]) -> None:
        """Raise if `state` cannot be loaded here."""

    def load(self, state: dict[str, Any]) -> list[Tensor]:
        """Restore what `state` describes; returns the columns as `make` does."""

    def commit(self, state: dict[str, Any]) -> None:
        """Make `state` the one that is found when the storage is opened again."""

    def close(self) -> None:
        """Release what is locked or open."""
