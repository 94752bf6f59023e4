"""The reservoir: a fixed number of slots that hold a uniform sample of everything seen so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.buffer.base import Draw, Placement, Storage
from holdfast.buffer.folder import Folder
from holdfast.buffer.memory import HostMemory, Memory
from holdfast.errors import UsageError
from holdfast.nested import Nested, leaves, outline, rebuild
from holdfast.rng import restore

__all__ = ["Reservoir", "distinct", "place"]

# A network that had always had an output for a class still to come would have learned to keep it below all others, so
# that is what stored samples are made to say of it. Leaving new classes out of the consistency term instead, or asking
# the network as it is now, lets them rise on old samples; much more than 1 is a jolt. benchmarks/widened_logits.py
# compares them.
UNHEARD_OF = 1.0

LARGE = 100_000
"""Slots above which what a step does with the buffer must not take time for each of them.

Below, doing something with all of them is faster, and decides what seeds mean: results depend on it.
"""


def place(uniforms: Tensor, seen: Tensor, capacity: int) -> Tensor:
    """The slot of each of B samples offered in order, (B,) int64; `capacity` stands for "nowhere".

    `uniforms` (B,) float64 in [0, 1) decide, `seen` (0-d int64) counts the samples offered before. The n-th sample of
    the stream goes to slot n while n < capacity, afterwards to slot j uniform in {0..n} if j < capacity. A sample
    whose slot a later one of the same batch takes as well goes nowhere, as if the later had overwritten it.
    """
    order = torch.arange(uniforms.shape[0], device=uniforms.device)
    n = seen + order
    slot = torch.where(n < capacity, n, (uniforms * (n + 1)).long()).clamp_(max=capacity)
    if capacity > LARGE and uniforms.device.type == "cpu":
        return slot.masked_fill_(_taken_again(slot), capacity)
    # The last comer per slot; the extra entry gathers those who go nowhere.
    last = order.new_full((capacity + 1,), -1).scatter_reduce_(0, slot, order, "amax")
    return slot.masked_fill_(last.index_select(0, slot) != order, capacity)


def distinct(count: int, n: int, generator: torch.Generator) -> Tensor:
    """min(n, count) distinct numbers below `count` in random order, (n,) int64: each such sequence equally likely."""
    # How often a number comes again is not known before, which a captured step would have to.
    if count <= LARGE or n > count // 16 or generator.device.type != "cpu":
        return torch.randperm(count, generator=generator, device=generator.device)[:n]
    chosen = torch.empty(0, dtype=torch.int64)
    while len(chosen) < n:
        more = torch.rand(n - len(chosen), dtype=torch.float64, generator=generator) * count
        chosen = torch.cat([chosen, more.long()])
        # What was there before stays, what comes again goes: the rest is as likely to be any other number.
        chosen = chosen[~_taken_again(chosen.flip(0)).flip(0)]
    return chosen


def _taken_again(numbers: Tensor) -> Tensor:
    """Which of the B numbers appear once more further on, (B,) bool."""
    ordered, places = numbers.sort(stable=True)
    again = torch.zeros_like(numbers, dtype=torch.bool)
    again[:-1] = ordered[:-1] == ordered[1:]
    return torch.empty_like(again).scatter_(0, places, again)


class Reservoir:
    """Reservoir sampling over a stream of (x, y, logits), exact, vectorised, on one device.

    `x` and `y` are tensors, or dicts, tuples and lists of them; each tensor has a column, and draws come back in the
    form of the first samples.

    `storage` says where samples are kept: in the memory of the generator's "device", where draws appear; in that of
    the "host"; or in files in a folder, given as a Path, which may be far larger than memory. A folder that is opened
    again continues where it was kept last, by `commit` or by a learner's `save`, generator included; delete it to start
    anew. What is kept and drawn is the same everywhere.

    In the device's memory, nothing in a step depends on a value the host would have to wait for. `seen` is a device
    tensor for that reason; `offered` mirrors it on the host, which knows it without asking because batch sizes are
    known there.
    """

    compilable = ("place",)

    def __init__(
        self, capacity: int, *, generator: torch.Generator | None = None, storage: str | Path = "device"
    ) -> None:
        if capacity < 1:
            raise UsageError(f"buffer size must be at least 1, not {capacity}.")
        if capacity % 1:
            raise UsageError(f"buffer size must be a whole number, not {capacity}.")
        self.capacity = capacity = int(capacity)
        self.place: Placement = place
        """A pure function, which an engine may replace by its compiled form."""
        self.generator = generator or torch.Generator()
        self.device = self.generator.device
        self.seen = torch.zeros((), dtype=torch.int64, device=self.device)
        self._offered = 0
        self._columns: list[Tensor] = []
        self._names: list[str] = []
        self._form: dict[str, Any] = {}
        """How x and y are nested, with the columns' names in place of tensors; empty until there are columns."""
        self._storage: Storage = choose(storage, capacity, self.device)
        if (kept := self._storage.committed()) is not None:
            self.load_state_dict(kept)

    @property
    def offered(self) -> int:
        """How many samples were offered so far, counted by the host."""
        return self._offered

    def recount(self, offered: int) -> None:
        """Set the host's count where the device's moved without it: a replayed CUDA graph, or a failed capture."""
        self._offered = offered

    @property
    def stored(self) -> int:
        """How many samples the buffer holds."""
        return min(self._offered, self.capacity)

    def __len__(self) -> int:
        return self.stored

    def check(self, x: Nested, y: Nested) -> None:
        """Raise if samples like these, logits aside, do not fit the buffer, or a disk is too full for them."""
        batch = leaves(x, "x") | leaves(y, "y")
        if self._columns:
            self._check(batch, [name for name in self._names if name != "logits"])
            self._storage.reserve(next(iter(batch.values())).shape[0])
        else:
            self._storage.expect(batch, aside=["logits"])

    def check_whole(self, x: Nested, y: Nested, logits: Tensor | None = None) -> None:
        """Raise if samples like these, with these logits or with none, do not fit the buffer."""
        batch = leaves(x, "x") | leaves(y, "y") | ({} if logits is None else {"logits": logits})
        if self._columns:
            self._check(batch, self._names)
        else:
            self._storage.expect(batch)

    def add(self, x: Nested, y: Nested, logits: Tensor | None = None) -> None:
        """Offer B samples in order. `x` (B, ...), `y` (B, ...), `logits` (B, C), all detached copies."""
        batch = leaves(x, "x") | leaves(y, "y")
        if logits is not None:
            batch["logits"] = logits
        count, *others = {part.shape[0] for part in batch.values()}
        if others:
            counts = ", ".join(str(len(part)) for part in batch.values())
            raise UsageError(f"{', '.join(batch)} must have one row per sample each, not {counts}.")
        if not self._columns:
            self._columns = self._storage.make(list(batch), list(batch.values()))
            self._form, self._names = {"x": outline(x, "x"), "y": outline(y, "y")}, list(batch)
        self._check(batch, self._names)
        self._storage.reserve(count)
        uniforms = torch.rand(count, dtype=torch.float64, generator=self.generator, device=self.device)
        slots = self.place(uniforms, self.seen, self.capacity)
        parts = [batch[name] for name in self._names]
        self._storage.write(slots, [part.detach() if part.requires_grad else part for part in parts])
        self.seen += count
        self._offered += count

    def sample(self, n: int) -> Draw:
        """min(n, stored) distinct samples, each equally likely."""
        if not self.stored:
            raise UsageError("the buffer is empty: add samples before drawing from it.")
        if n < 1:
            raise UsageError(f"at least 1 sample must be drawn, not {n}.")
        return self._draw(self._storage.read(distinct(self.stored, n, self.generator)))

    def contents(self) -> Draw:
        """Everything stored, in slot order, where it is stored; of a folder, all of it is read into host memory."""
        if not self._columns:
            raise UsageError("the buffer is empty: nothing has been added yet.")
        return self._draw(self._storage.first(self.stored))

    def widen(self, outputs: int) -> None:
        """Make room for logits of so many outputs; for new ones, stored samples get their lowest - `UNHEARD_OF`."""
        if "logits" not in self._names:
            return
        place = self._names.index("logits")
        if self._columns[place].shape[1] >= outputs:
            return  # a folder that was opened again may be ahead of the model

        def widened(old: Tensor) -> Tensor:
            lowest = old.amin(dim=1, keepdim=True) - UNHEARD_OF
            return torch.cat([old, lowest.expand(-1, outputs - old.shape[1])], dim=1)

        self._columns = self._storage.change(place, widened)

    def state_dict(self) -> dict[str, Any]:
        """All that decides what the buffer does next. As with PyTorch's, the tensors are the buffer's own.

        Of a buffer in a folder it says which rows it consists of, which are not overwritten until a later `commit`.
        """
        return {
            "capacity": self.capacity,
            "offered": self.offered,
            "seen": self.seen,
            "names": self._names,
            "form": self._form,
            "generator": self.generator.get_state(),
            **self._storage.state(self.stored),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the buffer that gave `state` was; one that does not fit raises and changes nothing."""
        self.check_state(state)
        restore(self.generator, state["generator"])
        if state["columns"]:
            self._form, self._names = state["form"], state["names"]
        self._columns = self._storage.load(state)
        # In place: a captured step reads from the addresses it was captured with.
        self.seen.copy_(state["seen"])
        self._offered = state["offered"]

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `state` does not fit this buffer."""
        if state["capacity"] != self.capacity:
            raise UsageError(
                f"the saved buffer has {state['capacity']} slots, this one {self.capacity}; "
                f"make it with a buffer size of {state['capacity']}."
            )
        saved, own = (
            [(name, tuple(kept.shape[1:]), str(kept.dtype)) for name, kept in zip(names, columns, strict=True)]
            for names, columns in ((state["names"], state["columns"]), (self._names, self._columns))
        )
        if saved and own and saved != own and "rows" not in state:
            raise UsageError(
                f"the saved samples do not fit the buffer: their shapes and types are {saved}, the buffer's {own}. "
                "Load into a learner of the same data that has not observed anything else."
            )
        stored = min(state["offered"], self.capacity)
        counts = {len(state["rows"])} if "rows" in state else {len(kept) for kept in state["columns"]}
        if int(state["seen"]) != state["offered"] or counts - {stored}:
            raise UsageError("the saved buffer contradicts itself: its counts do not match its samples.")
        self._storage.check(state)

    def commit(self, state: dict[str, Any] | None = None) -> None:
        """For a buffer in a folder: be found in `state`, or as it is now, when the folder is opened again.

        Rows that only earlier states refer to may then be overwritten. A learner's `save` and `load` call this once
        the checkpoint is whole, so that it stays valid whenever the process is killed.
        """
        self._storage.commit(state or self.state_dict())

    def close(self) -> None:
        """Leave the folder, if the buffer is in one, to others; what was not kept is lost."""
        self._storage.close()

    def _draw(self, columns: list[Tensor]) -> Draw:
        """Rows of the columns in the form in which samples came."""
        named = dict(zip(self._names, columns, strict=True))
        return Draw(rebuild(self._form["x"], named), rebuild(self._form["y"], named), named.get("logits"))

    def _check(self, batch: dict[str, Tensor], names: list[str]) -> None:
        """Raise unless `batch` has what goes into the columns of these `names`, and nothing else."""
        if len(batch) != len(names) or any(name not in batch for name in names):
            if ("logits" in batch) != ("logits" in names):
                raise UsageError("logits must be given for every sample or for none.")
            missing = [f"{name} is missing" for name in names if name not in batch]
            fresh = [f"{name} is new" for name in batch if name not in names]
            raise UsageError(
                f"samples of another form do not fit the buffer: {', '.join(missing + fresh)}; "
                f"it holds {', '.join(names)}."
            )
        for name, column in zip(self._names, self._columns, strict=True):
            if (part := batch.get(name)) is None:
                continue
            if part.shape[1:] != column.shape[1:]:
                raise UsageError(
                    f"{name} of shape {tuple(part.shape[1:])} per sample do not fit the buffer, "
                    f"which holds {tuple(column.shape[1:])}."
                )
            if part.dtype != column.dtype:
                raise UsageError(f"{name} of type {part.dtype} do not fit the buffer, which holds {column.dtype}.")


def choose(storage: str | Path, capacity: int, device: torch.device) -> Storage:
    """What `storage` names: "device", "host", or a folder, for `capacity` samples that are drawn on `device`."""
    if isinstance(storage, Path):
        return Folder(storage, capacity, device)
    if storage not in ("device", "host"):
        raise UsageError(f"storage must be 'device', 'host' or the Path of a folder, not {storage!r}.")
    return (Memory if storage == "device" else HostMemory)(capacity, device)
