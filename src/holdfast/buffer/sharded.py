"""One reservoir over several processes: each stores a shard, and all of them together are a `Reservoir`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.buffer.base import Draw
from holdfast.buffer.layout import Column, layout_of
from holdfast.buffer.reservoir import Reservoir, distinct, open_storage
from holdfast.errors import UsageError
from holdfast.nested import Nested
from holdfast.ranks import Ranks, to_device
from holdfast.rng import derive_seed

__all__ = ["ShardedReservoir", "pack", "unpack"]

CHUNK = 2**26
"""Bytes that each rank gathers at a time when the whole buffer is asked for."""


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


def _digest(state: Tensor) -> str:
    """A generator's state in a few letters: the same for the same state."""
    return f"random state {derive_seed(0, bytes(state.tolist()).hex()):x}"


class ShardedReservoir(Reservoir):
    """A `Reservoir` whose slots are spread over the ranks of a job: slot j is row j // size on rank j % size.

    Every rank calls the same methods at the same time; `check`, `check_whole` and `reserve` alone are a rank's own
    affair. The samples that the ranks offer at once count as one minibatch, rank 0's first; `capacity` counts the
    samples of all ranks together. The generators of all ranks are in step, so each rank knows where every sample of
    the minibatch goes without being told; only samples that are stored travel, each to one rank. The contents are, bit
    for bit, those of an ordinary reservoir that was offered the whole minibatches.

    The generator is on the CPU, whatever `device` the samples are on: the host plans, and so knows how many rows to
    send without waiting for a GPU.
    """

    def __init__(
        self,
        capacity: int,
        *,
        ranks: Ranks | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        storage: str | Path = "device",
        policy: str = "reservoir",
    ) -> None:
        self.ranks = ranks or Ranks()
        with self.ranks.together("make a buffer") as meeting:
            super().__init__(capacity, generator=generator, policy=policy)
            if isinstance(storage, Path):
                raise UsageError("a buffer of several ranks is in memory: give storage='device' or 'host', no folder.")
            if self.generator.device.type != "cpu":
                raise UsageError(f"ranks share a generator on the CPU, not one on {self.generator.device}.")
            self.device = torch.device(device)
            slots = range(self.ranks.rank, self.capacity, self.ranks.size)
            self._storage = open_storage(storage, len(slots), self.device)
            meeting.form = f"a buffer of {capacity} samples, {_digest(self.generator.get_state())}, {policy}"

    def add(self, x: Nested, y: Nested, logits: Tensor | None = None) -> None:
        """Offer this rank's B samples, after those of the ranks before it; B may differ from rank to rank."""
        with self.ranks.together("add samples") as meeting:
            parts, count = self._admit(x, y, logits)
            columns = ", ".join(f"{name} {column}" for name, column in layout_of(parts).items())
            meeting.count, meeting.form = count, f"samples of {columns} after {self.offered}"
        counts = torch.tensor(meeting.counts)
        uniforms = torch.rand(int(counts.sum()), dtype=torch.float64, generator=self.generator)
        slots, filled = self._slots(uniforms, y)
        accepted = slots < self.capacity
        origin = self._each_rank(counts)
        own = to_device(accepted[origin == self.ranks.rank].nonzero().squeeze(1), self.device)
        ordered = [parts[name].detach().to(self.device) for name in self._storage.layout]
        self._put(slots[accepted], origin[accepted], [part[own] for part in ordered])
        self.seen += len(slots)
        self._offered += len(slots)
        self._holes -= filled

    def replace(self, x: Nested, y: Nested, logits: Tensor | None = None) -> None:
        """Refused: ranks have different samples, and nobody says which of them to store."""
        raise UsageError("a buffer of several ranks cannot be refilled: this method needs one process.")

    def sample(self, n: int) -> Draw:
        """min(n, stored) distinct samples for this rank, each equally likely; `n` may differ from rank to rank.

        No two ranks get the same sample unless all of them together ask for more than there are. Then no sample is
        drawn more than once more often than any other.
        """
        with self.ranks.together("draw samples") as meeting:
            self._check_draw(n)
            meeting.count, meeting.form = n, f"a draw after {self.offered} samples"
        wanted = torch.tensor(meeting.counts).clamp(max=self.stored)
        # One sequence of distinct samples, dealt to the ranks in order. If they want more than there are, it is a
        # permutation that begins anew at its end. No rank's part is longer than the permutation, so its samples are
        # distinct, and uniformly distributed wherever the part begins.
        order = distinct(self.stored, total := int(wanted.sum()), self.generator)
        chosen = order[torch.arange(total) % len(order)]
        return self._draw(self._get(chosen, self._each_rank(wanted)))

    def contents(self) -> Draw:
        """All stored samples, in slot order, on every rank and in host memory."""
        with self.ranks.together("read the buffer"):
            self._check_draw(1)
        return self._draw(self._gathered())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where any reservoir was that gave `state`, sharded over any number of ranks or not at all.

        Every rank must be given the same state. A state that does not fit raises and changes nothing.
        """
        with self.ranks.together("continue from a saved buffer") as meeting:
            self.check_state(state)
            stored = state.get("stored", "as many as fit")
            meeting.form = f"{state['offered']} samples offered, {_digest(state['generator'])}, {stored} stored"
        own = [column[self.ranks.rank :: self.ranks.size] for column in state["columns"]]
        self._restore({**state, "columns": own})

    def commit(self, state: dict[str, Any] | None = None) -> None:
        """Nothing: a buffer in memory is saved by checkpoints."""

    def _stored_state(self) -> dict[str, Any]:
        """All stored samples, the same on every rank and in host memory, as an ordinary reservoir has them."""
        with self.ranks.together("read the buffer"):
            pass
        return {"columns": self._gathered() if self._offered else []}

    def _put(self, slots: Tensor, origin: Tensor, parts: list[Tensor]) -> None:
        """Write samples to `slots`; `parts` are those that this rank offers, `origin` says which rank offers which."""
        owner = slots % self.ranks.size
        arrived = self.ranks.ship(pack(parts), origin, owner)
        places = to_device(slots[owner == self.ranks.rank] // self.ranks.size, self.device)
        self._storage.write(places, unpack(arrived, self._storage.layout.values()))

    def _get(self, slots: Tensor, asker: Tensor) -> list[Tensor]:
        """The samples in those of `slots` that this rank asks for."""
        owner = slots % self.ranks.size
        places = slots[owner == self.ranks.rank] // self.ranks.size
        packed = pack(self._storage.read(to_device(places, self.device)))
        return unpack(self.ranks.ship(packed, owner, asker), self._storage.layout.values())

    def _gathered(self) -> list[Tensor]:
        """All stored samples, in slot order, in host memory; a part at a time, as they may not fit on one device."""
        size = sum(column.size for column in self._storage.layout.values())
        pieces = [
            [part.cpu() for part in self._get(slots.repeat(self.ranks.size), self._each_rank(len(slots)))]
            for slots in torch.split(torch.arange(self.stored), max(1, CHUNK // max(1, size)))
        ]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def _each_rank(self, counts: Tensor | int) -> Tensor:
        """Every rank's number, as often as `counts` say, in order."""
        return torch.arange(self.ranks.size).repeat_interleave(counts)
