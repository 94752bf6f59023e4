"""One reservoir over several processes: each stores a shard, and all of them together are a `Reservoir`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.buffer.base import Draw, Plan
from holdfast.buffer.layout import ANY, Column, choose
from holdfast.buffer.packing import Packing, pack, unpack
from holdfast.buffer.reservoir import Reservoir, distinct, open_storage
from holdfast.errors import UsageError
from holdfast.nested import Nested
from holdfast.ranks import Ranks, to_device
from holdfast.rng import derive_seed

__all__ = ["ShardedReservoir"]

CHUNK = 2**26
"""Bytes that each rank gathers at a time when the whole buffer is asked for."""
POSITIONS = 4096
"""The length that is supposed for samples of different length when these bytes are counted."""


def _digest(state: Tensor) -> str:
    """A generator's state in a few letters: the same for the same state."""
    return f"random state {derive_seed(0, bytes(state.tolist()).hex()):x}"


class ShardedReservoir(Reservoir):
    """A `Reservoir` whose slots are spread over the ranks of a job: slot j is row j // size on rank j % size.

    Every rank calls the same methods at the same time; `check` and `reserve` alone are a rank's own affair. The samples
    that the ranks offer at once count as one minibatch, rank 0's first; `capacity` counts the samples of all ranks
    together. The generators of all ranks are in step, so each rank knows where every sample of the minibatch goes
    without being told; only samples that are stored travel, each to one rank. The contents are, bit for bit, those of
    an ordinary reservoir that was offered the whole minibatches.

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
        padding: Mapping[str, float] | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        with self.ranks.together("make a buffer") as meeting:
            super().__init__(capacity, generator=generator, policy=policy, padding=padding)
            if isinstance(storage, Path):
                raise UsageError("a buffer of several ranks is in memory: give storage='device' or 'host', no folder.")
            if self.generator.device.type != "cpu":
                raise UsageError(f"ranks share a generator on the CPU, not one on {self.generator.device}.")
            self.device = torch.device(device)
            slots = range(self.ranks.rank, self.capacity, self.ranks.size)
            self._storage = open_storage(storage, len(slots), self.device, self.padding)
            form = f"a buffer of {capacity} samples, {_digest(self.generator.get_state())}, {policy}"
            meeting.form = form if padding is None else f"{form}, padding {self.padding}"

    def plan(self, x: Nested, y: Nested) -> None:
        """Nothing: where samples go depends on how many the other ranks offer."""

    def add(self, x: Nested, y: Nested, logits: Nested | None = None, plan: Plan | None = None) -> None:
        """Offer this rank's B samples, after those of the ranks before it; B may differ from rank to rank."""
        with self.ranks.together("add samples") as meeting:
            parts, count = self._admit(x, y, logits)
            columns = ", ".join(f"{name} {column}" for name, column in self._storage.layout.items())
            meeting.count, meeting.form = count, f"samples of {columns} after {self.offered}"
        counts = torch.tensor(meeting.counts)
        uniforms = torch.rand(int(counts.sum()), dtype=torch.float64, generator=self.generator)
        slots, filled = self._slots(uniforms, y)
        accepted = slots < self.capacity
        origin = self._each_rank(counts)
        own = to_device(accepted[origin == self.ranks.rank].nonzero().squeeze(1), self.device)
        taken = slots[accepted]
        owner = taken % self.ranks.size
        arrived = self._ship([part.detach().to(self.device)[own] for part in parts], origin[accepted], owner)
        places = to_device(taken[owner == self.ranks.rank] // self.ranks.size, self.device)
        self._storage.write(places, arrived)
        self.seen += len(slots)
        self.offered += len(slots)
        self._holes -= filled

    def replace(self, x: Nested, y: Nested, logits: Nested | None = None) -> None:
        """Refused: ranks have different samples, and nobody says which of them to store."""
        raise UsageError("a buffer of several ranks cannot be refilled: this method needs one process.")

    def sample(self, n: int) -> Draw:
        """min(n, stored) distinct samples for this rank, each equally likely; `n` may differ from rank to rank.

        No two ranks get the same sample, unless all of them together ask for more than there are. Then all samples are
        drawn equally often, or some of them once more than the others.
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
        stored = state.get("stored", min(state["offered"], self.capacity))
        self._restore(choose(state, torch.arange(stored)[self.ranks.rank :: self.ranks.size]))

    def commit(self, state: dict[str, Any] | None = None) -> None:
        """Nothing: a buffer in memory is saved by checkpoints."""

    def _stored_state(self) -> dict[str, Any]:
        """All stored samples, the same on every rank and in host memory, as an ordinary reservoir has them."""
        with self.ranks.together("read the buffer"):
            pass
        parts, packing = self._gathered() if self.offered else [], self._packing()
        return {"columns": parts} if self.padding is None else packing.state(packing.split(parts) if parts else [])

    def _packing(self) -> Packing:
        """Which columns vary in length, if any do."""
        return Packing(self._storage.layout, self.padding or {})

    def _get(self, slots: Tensor, asker: Tensor) -> list[Tensor]:
        """The samples in those of `slots` that this rank asks for."""
        owner = slots % self.ranks.size
        places = slots[owner == self.ranks.rank] // self.ranks.size
        return self._ship(self._storage.read(to_device(places, self.device)), owner, asker)

    def _ship(self, parts: list[Tensor], origin: Tensor, destination: Tensor) -> list[Tensor]:
        """Samples that come here, for those that start here; those of different length are padded to the longest."""
        packing, columns = self._packing(), list(self._storage.layout.values())
        if packing.fills:
            with self.ranks.together("send samples") as meeting:
                meeting.count = packing.longest(parts)
            parts = packing.extend(parts, longest := max(meeting.counts))
            columns = [Column(tuple(longest if n == ANY else n for n in shape), dtype) for shape, dtype in columns]
        arrived = unpack(self.ranks.ship(pack(parts), origin, destination), columns)
        return packing.stack(packing.split(arrived)) if packing.fills else arrived

    def _gathered(self) -> list[Tensor]:
        """All stored samples, in slot order, in host memory; a part at a time, as they may not fit on one device."""
        packing = self._packing()
        pieces = [
            [part.cpu() for part in self._get(slots.repeat(self.ranks.size), self._each_rank(len(slots)))]
            for slots in torch.split(torch.arange(self.stored), max(1, CHUNK // max(1, packing.size(POSITIONS))))
        ]
        longest = max(map(packing.longest, pieces))
        return [torch.cat(parts) for parts in zip(*(packing.extend(each, longest) for each in pieces), strict=True)]

    def _each_rank(self, counts: Tensor | int) -> Tensor:
        """Every rank's number, as often as `counts` say, in order."""
        return torch.arange(self.ranks.size).repeat_interleave(counts)
