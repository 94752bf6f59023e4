"""One reservoir over several processes: each holds a shard, and all of them together are a `Reservoir`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.buffer.base import Draw
from holdfast.buffer.reservoir import Reservoir, choose, distinct
from holdfast.errors import UsageError
from holdfast.nested import Nested, leaves, outline
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

    Every rank calls the same methods at the same time; `check` alone is a rank's own affair. What the ranks offer at
    once counts as one minibatch, rank 0's samples first; `capacity` counts the samples of all ranks together. The
    generators of all ranks go in step, so each rank knows where every sample of the minibatch goes without being told;
    only samples that are kept travel, each to one rank. The contents are those of an ordinary reservoir, bit for bit,
    that was offered the whole minibatches.

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
        storage: str | Path = "device",
    ) -> None:
        self.ranks = ranks or Ranks()
        with self.ranks.together("make a buffer") as meeting:
            super().__init__(capacity, generator=generator)
            if isinstance(storage, Path):
                raise UsageError("a buffer of several ranks is in memory: give storage='device' or 'host', no folder.")
            self.device = torch.device(device)
            self._storage = choose(storage, len(range(self.ranks.rank, capacity, self.ranks.size)), self.device)
            if self.generator.device.type != "cpu":
                raise UsageError(f"ranks share a generator on the CPU, not one on {self.generator.device}.")
            meeting.form = f"a buffer of {capacity} samples, {_digest(self.generator.get_state())}"

    def add(self, x: Nested, y: Nested, logits: Tensor | None = None) -> None:
        """Offer this rank's B samples, after those of the ranks before it; B may differ from rank to rank."""
        with self.ranks.together("add samples") as meeting:
            batch = leaves(x, "x") | leaves(y, "y") | ({} if logits is None else {"logits": logits})
            if len({len(part) for part in batch.values()}) > 1:
                raise UsageError(f"{', '.join(batch)} must have one row per sample each.")
            if self._columns:
                self._check(batch, self._names)
            forms = ", ".join(f"{name} {tuple(part.shape[1:])} {part.dtype}" for name, part in batch.items())
            meeting.count, meeting.form = len(next(iter(batch.values()))), f"samples of {forms} after {self.offered}"
        if not self._columns:
            self._columns = self._storage.make(list(batch), list(batch.values()))
            self._form, self._names = {"x": outline(x, "x"), "y": outline(y, "y")}, list(batch)
        sizes = torch.tensor(meeting.counts)
        uniforms = torch.rand(int(sizes.sum()), dtype=torch.float64, generator=self.generator)
        slots = self.place(uniforms, self.seen, self.capacity)
        kept = slots < self.capacity
        origin = self._each_rank(sizes)
        own = kept[origin == self.ranks.rank].nonzero().squeeze(1)
        parts = [batch[name].detach().to(self.device) for name in self._names]
        self._put(slots[kept], origin[kept], [part[to_device(own, self.device)] for part in parts])
        self.seen += len(slots)
        self._offered += len(slots)

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
        # One sequence of distinct samples, dealt to the ranks in order. Where they want more than there is, it is a
        # permutation, begun anew: a rank's part is no longer than that, so it is distinct, and of uniform distribution
        # wherever it begins.
        order = distinct(self.stored, total := int(wanted.sum()), self.generator)
        chosen = order[torch.arange(total) % len(order)]
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
            "names": self._names,
            "form": self._form,
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
        if state["columns"]:
            self._form, self._names = state["form"], state["names"]
        own = [kept[self.ranks.rank :: self.ranks.size] for kept in state["columns"]]
        self._columns = self._storage.load({**state, "columns": own})
        self.seen.copy_(state["seen"])
        self._offered = state["offered"]

    def commit(self, state: dict[str, Any] | None = None) -> None:
        """Nothing: a buffer in memory is kept by checkpoints."""

    def _put(self, slots: Tensor, origin: Tensor, rows: list[Tensor]) -> None:
        """Write samples to `slots`; `rows` are those this rank offers, `origin` says who offers which."""
        owner = slots % self.ranks.size
        arrived = self.ranks.ship(pack(rows), origin, owner)
        places = to_device(slots[owner == self.ranks.rank] // self.ranks.size, self.device)
        self._storage.write(places, unpack(arrived, self._columns))

    def _get(self, slots: Tensor, asker: Tensor) -> list[Tensor]:
        """What is in those of `slots` that this rank asks for."""
        owner = slots % self.ranks.size
        places = slots[owner == self.ranks.rank] // self.ranks.size
        rows = pack(self._storage.read(to_device(places, self.device)))
        return unpack(self.ranks.ship(rows, owner, asker), self._columns)

    def _gathered(self) -> list[Tensor]:
        """All stored samples, in slot order, in host memory; a part at a time, as they may not fit on one device."""
        width = sum(_width(column) for column in self._columns)
        pieces = [
            [part.cpu() for part in self._get(slots.repeat(self.ranks.size), self._each_rank(len(slots)))]
            for slots in torch.split(torch.arange(self.stored), max(1, CHUNK // max(1, width)))
        ]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def _each_rank(self, counts: Tensor | int) -> Tensor:
        """Every rank's number, as often as `counts` say, in order."""
        return torch.arange(self.ranks.size).repeat_interleave(counts)
