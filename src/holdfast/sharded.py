"""One reservoir over several processes: each holds a shard, and all of them together are a `Reservoir`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from holdfast.buffer import Draw, Reservoir
from holdfast.errors import UsageError
from holdfast.ranks import Ranks, to_device
from holdfast.rng import derive_seed, restore

__all__ = ["ShardedReservoir", "pack", "unpack"]

CHUNK = 2**26
"""Bytes that each rank gathers at a time when the whole buffer is asked for."""


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Tensors with B rows each, of any shapes and types, as one of bytes, (B, bytes per sample) uint8."""
    # Through one dimension: strides of tensors without elements are anything, which would forbid another type.
    flat = [part.reshape(-1).contiguous().view(torch.uint8) for part in parts]
    return torch.cat([rows.view(len(part), _width(part)) for rows, part in zip(flat, parts, strict=True)], dim=1)


def unpack(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What `pack` packed, from tensors with the shapes and types of `like` apart from their number of rows."""
    flat = torch.split(rows, [_width(part) for part in like], dim=1)
    # A copy each: a type of several bytes cannot be read at an odd address.
    whole = [piece.clone(memory_format=torch.contiguous_format).flatten() for piece in flat]
    return [piece.view(part.dtype).view(len(rows), *part.shape[1:]) for piece, part in zip(whole, like, strict=True)]


def _width(part: Tensor) -> int:
    """Bytes per sample."""
    return prod(part.shape[1:]) * part.element_size()


def _digest(state: Tensor) -> str:
    """A generator's state in a few letters: the same for the same state."""
    return f"random state {derive_seed(0, bytes(state.tolist()).hex()):x}"


class ShardedReservoir(Reservoir):
    """A `Reservoir` whose slots are spread over the ranks of a job: slot j is row j // size on rank j % size.

    Every rank calls the same methods at the same time. What the ranks offer at once counts as one minibatch, rank 0's
    samples first; `capacity` counts the samples of all ranks together. The generators of all ranks go in step, so each
    rank knows where every sample of the minibatch goes without being told; only samples that are kept travel, each to
    one rank. The contents are those of an ordinary reservoir, bit for bit, that was offered the whole minibatches.

    The generator is on the CPU, whatever `device` the samples are on: plans are made by the host, which then knows how
    many rows to send without waiting for a GPU.
    """

    def __init__(
        self,
        capacity: int,
        *,
        ranks: Ranks | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ranks = ranks or Ranks()
        with self.ranks.together("make a buffer") as meeting:
            super().__init__(capacity, generator=generator)
            if self.generator.device.type != "cpu":
                raise UsageError(f"ranks share a generator on the CPU, not one on {self.generator.device}.")
            meeting.form = f"a buffer of {capacity} samples, {_digest(self.generator.get_state())}"
        self.device = torch.device(device)

    def add(self, x: Tensor, y: Tensor, logits: Tensor | None = None) -> None:
        """Offer this rank's B samples, after those of the ranks before it; B may differ from rank to rank."""
        batch = [part.detach() for part in (x, y, logits) if part is not None]
        with self.ranks.together("add samples") as meeting:
            if len({len(part) for part in batch}) > 1:
                raise UsageError("x, y and logits must have one row per sample each.")
            if self._columns:
                self._check(batch)
            forms = ", ".join(f"{tuple(part.shape[1:])} {part.dtype}" for part in batch)
            meeting.count, meeting.form = len(x), f"samples of {forms} after {self.offered}"
        sizes = torch.tensor(meeting.counts)
        if not self._columns:
            self._columns = self._empty(batch)
        uniforms = torch.rand(int(sizes.sum()), dtype=torch.float64, generator=self.generator)
        slots = self.place(uniforms, self.seen, self.capacity)
        kept = slots < self.capacity
        origin = self._each_rank(sizes)
        own = kept[origin == self.ranks.rank].nonzero().squeeze(1)
        self._put(slots[kept], origin[kept], [part.to(self.device)[to_device(own, self.device)] for part in batch])
        self.seen += len(slots)
        self.offered += len(slots)

    def sample(self, n: int) -> Draw:
        """min(n, stored) distinct samples for this rank, each equally likely; `n` may differ from rank to rank.

        No two ranks get the same sample unless they ask for more than there is; then some get it as often as others,
        or once more.
        """
        with self.ranks.together("draw samples") as meeting:
            if not self.stored:
                raise UsageError("the buffer is empty: add samples before drawing from it.")
            if n < 1:
                raise UsageError(f"at least 1 sample must be drawn, not {n}.")
            meeting.count, meeting.form = n, f"a draw after {self.offered} samples"
        wanted = torch.tensor(meeting.counts).clamp(max=self.stored)
        # One permutation, dealt to the ranks in order and begun anew where they want more than it has: a rank's part
        # is no longer than the permutation, so it is distinct, and of uniform distribution wherever it begins.
        order = torch.randperm(self.stored, generator=self.generator)
        chosen = order[torch.arange(int(wanted.sum())) % self.stored]
        return self._draw(self._get(chosen, self._each_rank(wanted)))

    def contents(self) -> Draw:
        """Everything stored, in slot order, on every rank and in host memory."""
        with self.ranks.together("read the buffer"):
            if not self._columns:
                raise UsageError("the buffer is empty: nothing has been added yet.")
        return self._draw(self._gathered())

    def state_dict(self) -> dict[str, Any]:
        """That of an ordinary reservoir with the same contents, the same on every rank, its samples in host memory."""
        with self.ranks.together("read the buffer"):
            pass
        return {
            "capacity": self.capacity,
            "offered": self.offered,
            "seen": self.seen,
            "columns": self._gathered() if self._columns else [],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where any reservoir was, sharded over any number of ranks or not at all, that gave `state`.

        Every rank must be given the same state; one that does not fit raises and changes nothing.
        """
        with self.ranks.together("continue from a saved buffer") as meeting:
            self.check_state(state)
            restore(torch.Generator(), state["generator"])  # raises if it does not fit
            meeting.form = f"{state['offered']} samples offered, {_digest(state['generator'])}"
        restore(self.generator, state["generator"])
        if not self._columns:
            self._columns = self._empty(state["columns"])
        for column, kept in zip(self._columns, state["columns"], strict=False):
            own = kept[self.ranks.rank :: self.ranks.size]
            column[: len(own)].copy_(own)
        self.seen.copy_(state["seen"])
        self.offered = state["offered"]

    def _put(self, slots: Tensor, origin: Tensor, rows: list[Tensor]) -> None:
        """Write samples to `slots`; `rows` are those this rank offers, `origin` says who offers which."""
        owner = slots % self.ranks.size
        arrived = self.ranks.ship(pack(rows), origin, owner)
        places = to_device(slots[owner == self.ranks.rank] // self.ranks.size, self.device)
        for column, part in zip(self._columns, unpack(arrived, self._columns), strict=True):
            column.index_copy_(0, places, part)

    def _get(self, slots: Tensor, asker: Tensor) -> list[Tensor]:
        """What is in those of `slots` that this rank asks for."""
        owner = slots % self.ranks.size
        places = to_device(slots[owner == self.ranks.rank] // self.ranks.size, self.device)
        rows = pack([column.index_select(0, places) for column in self._columns])
        return unpack(self.ranks.ship(rows, owner, asker), self._columns)

    def _gathered(self) -> list[Tensor]:
        """All stored samples, in slot order, in host memory; a part at a time, as they may not fit on one device."""
        width = sum(_width(column) for column in self._columns)
        pieces = [
            [part.cpu() for part in self._get(slots.repeat(self.ranks.size), self._each_rank(len(slots)))]
            for slots in torch.split(torch.arange(self.stored), max(1, CHUNK // max(1, width)))
        ]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def _empty(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Room for this rank's slots."""
        rows = len(range(self.ranks.rank, self.capacity, self.ranks.size))
        return [part.new_zeros((rows, *part.shape[1:]), device=self.device) for part in like]

    def _each_rank(self, counts: Tensor | int) -> Tensor:
        """Every rank's number, as often as `counts` say, in order."""
        return torch.arange(self.ranks.size).repeat_interleave(counts)

    @staticmethod
    def _draw(parts: list[Tensor]) -> Draw:
        x, y, *logits = parts
        return Draw(x, y, logits[0] if logits else None)
