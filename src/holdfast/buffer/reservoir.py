"""The reservoir: a fixed number of slots that hold a uniform sample of everything seen so far."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.buffer.base import Draw, Plan, Storage
from holdfast.buffer.folder import Folder
from holdfast.buffer.layout import (
    ANY,
    Layout,
    check_fit,
    check_schema,
    choose,
    is_answer,
    layout_of,
    layout_of_state,
    parts_of,
)
from holdfast.buffer.memory import Memory
from holdfast.buffer.packing import check_lengths, lengths_of
from holdfast.buffer.ragged import RaggedFolder, RaggedMemory
from holdfast.errors import UsageError
from holdfast.nested import Nested, fills_of, outline, rebuild
from holdfast.pure import pure
from holdfast.registry import unknown_name
from holdfast.rng import restore

__all__ = ["Reservoir", "distinct", "open_storage", "place", "widened", "window"]

MARGIN = 1.0
"""How far below its lowest logit a stored sample's logit of a new class is put.

A network that had this class from the start would have learned a logit below all others on samples of other classes.
Leaving new classes out of the consistency term, or asking the present network, lets their logits rise on old samples;
a margin much larger than 1 is a jolt. benchmarks/widened_logits.py compares these.
"""

LARGE = 100_000
"""Above this capacity, avoid O(capacity) work per step. Changing it changes what a seed selects."""


def widened(logits: Tensor, outputs: int) -> Tensor:
    """Logits (B, C) of so many outputs: new ones are each sample's lowest - `MARGIN`."""
    lowest = logits.amin(dim=1, keepdim=True) - MARGIN
    return torch.cat([logits, lowest.expand(-1, outputs - logits.shape[1])], dim=1)


@pure
def place(uniforms: Tensor, seen: Tensor, capacity: int, horizon: int | None = None) -> Tensor:
    """The slot of each of B samples offered in order, (B,) int64; `capacity` stands for "nowhere".

    `uniforms` (B,) float64 in [0, 1) decide, `seen` (0-d int64) counts the samples offered before. The n-th sample of
    the stream goes to slot n while n < capacity, afterwards to slot j uniform in {0..n} if j < capacity. Of several
    samples of a batch with the same slot, the last one gets it; the others go nowhere.

    With a `horizon`, j is uniform in {0..horizon - 1} once so many samples were seen. From then on each new sample
    replaces a stored one with probability 1 / horizon: what is stored decays exponentially with its age.
    """
    order = torch.arange(uniforms.shape[0], device=uniforms.device)
    n = seen + order
    reach = n + 1 if horizon is None else (n + 1).clamp(max=horizon)
    slot = torch.where(n < capacity, n, (uniforms * reach).long()).clamp_(max=capacity)
    if capacity > LARGE and uniforms.device.type == "cpu":
        return slot.masked_fill_(_appears_later(slot), capacity)
    # The last sample of each slot. The extra entry is for the samples that go nowhere.
    last = order.new_full((capacity + 1,), -1).scatter_reduce_(0, slot, order, "amax")
    return slot.masked_fill_(last.index_select(0, slot) != order, capacity)


@pure
def window(uniforms: Tensor, seen: Tensor, capacity: int) -> Tensor:
    """The slots, as `place` gives them, of a window of the last `capacity` samples: n % capacity for the n-th."""
    order = torch.arange(uniforms.shape[0], device=uniforms.device)
    return torch.where(order < len(order) - capacity, capacity, (seen + order) % capacity)


def _placement(policy: str, capacity: int) -> Callable[[Tensor, Tensor, int], Tensor]:
    """The function, called as `place` is, behind a policy's name: "reservoir", "window", "decay" or "decay:HORIZON"."""
    name, _, horizon = policy.partition(":")
    if name not in ("reservoir", "window", "decay") or (horizon and name != "decay"):
        raise unknown_name("buffer policy", policy, ["reservoir", "window", "decay", "decay:10000"])
    if name != "decay":
        return window if name == "window" else place
    if horizon and not (horizon.isdecimal() and int(horizon) >= capacity):
        raise UsageError(f"the horizon in {policy!r} must be a number of samples, at least the buffer's {capacity}.")
    return partial(place, horizon=int(horizon or capacity))


def distinct(count: int, n: int, generator: torch.Generator) -> Tensor:
    """min(n, count) distinct numbers below `count` in random order, (n,) int64: each such sequence equally likely."""
    # On a GPU always a permutation: the loop below runs an unknown number of times, which cannot be captured.
    if count <= LARGE or n > count // 16 or generator.device.type != "cpu":
        return torch.randperm(count, generator=generator, device=generator.device)[:n]
    chosen = torch.empty(0, dtype=torch.int64)
    while len(chosen) < n:
        more = torch.rand(n - len(chosen), dtype=torch.float64, generator=generator) * count
        chosen = torch.cat([chosen, more.long()])
        # Of equal numbers the first stays, so each new number is equally likely to be any that was not chosen.
        chosen = chosen[~_appears_later(chosen.flip(0)).flip(0)]
    return chosen


def _appears_later(numbers: Tensor) -> Tensor:
    """Which of the B numbers appear again further on, (B,) bool."""
    ordered, places = numbers.sort(stable=True)
    again = torch.zeros_like(numbers, dtype=torch.bool)
    again[:-1] = ordered[:-1] == ordered[1:]
    return torch.empty_like(again).scatter_(0, places, again)


class Reservoir:
    """Reservoir sampling over a stream of (x, y, logits), exact, vectorised, on one device.

    `x` and `y` are tensors, or dicts, tuples and lists of tensors; draws come back in the same form.

    `storage` says where samples are stored: in the memory of the generator's "device", where draws appear; in the
    memory of the "host"; or in the files of a folder, given as a Path, which may be far larger than memory. A folder
    that is opened again continues from its last `commit`, which a learner's `save` calls, generator included; delete
    the folder to start anew. The storage makes no difference to which samples are stored and drawn.

    `policy` says which samples are stored. "reservoir": a uniform sample of all that were offered. "window": the last
    ones. "decay": each new sample takes the place of a random one, so that older samples are rarer; "decay:10000" does
    so more slowly: a sample's chance of being stored falls to 1/e after 10,000 more.

    `padding` is for samples that differ in length, as texts do. It names the tensors that vary along dimension 1, and
    what short ones are filled up with: {"input_ids": 0, "y": -100, "logits": 0}. A name is that of a tensor, as in
    "x['input_ids']", its key in x or y, or the beginning of names: "logits" are all answers. A sample ends after the
    last position where x or y differ from their padding; it is stored up to there, and a draw is padded to its longest
    sample. Which samples are stored and drawn is the same as without. Steps then wait for the device.

    In the device's memory, no step waits for a value from the device. That is why `seen` is a tensor on the device;
    `offered` is the same count on the host.
    """

    balanced: ClassVar[bool] = False
    """Whether classes get equal shares of the slots."""

    def __init__(
        self,
        capacity: int,
        *,
        generator: torch.Generator | None = None,
        storage: str | Path = "device",
        policy: str = "reservoir",
        padding: Mapping[str, float] | None = None,
    ) -> None:
        if capacity < 1:
            raise UsageError(f"buffer size must be at least 1, not {capacity}.")
        if capacity % 1:
            raise UsageError(f"buffer size must be a whole number, not {capacity}.")
        self.capacity = int(capacity)
        self.generator = generator or torch.Generator()
        self.device = self.generator.device
        self.policy, self.place = policy, _placement(policy, self.capacity)
        """What decides which of the offered samples are stored, and where."""
        self.padding = None if padding is None else dict(padding)
        self.seen = torch.zeros((), dtype=torch.int64, device=self.device)
        self.offered = 0
        """How many samples were offered so far, counted by the host; `forget` may lower it."""
        self._holes = 0
        """Slots that are empty because their samples were forgotten. They come after all others."""
        self._form: dict[str, Any] = {}
        """How x and y are nested, with the columns' names in place of tensors."""
        self._storage: Storage = open_storage(storage, self.capacity, self.device, self.padding)
        if (state := self._storage.committed()) is not None:
            self.load_state_dict(state)

    @property
    def stored(self) -> int:
        """How many samples the buffer holds."""
        return min(self.offered, self.capacity) - self._holes

    def __len__(self) -> int:
        return self.stored

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.stored} of {self.capacity} samples stored, {self.offered} offered)"

    def check(self, x: Nested, y: Nested) -> None:
        """Raise if samples like these, logits aside, do not fit the buffer."""
        parts, _ = parts_of(x, y)
        layout = self._layout(parts)
        if self.offered:
            check_fit(layout, {name: each for name, each in self._storage.layout.items() if not is_answer(name)})

    def plan(self, x: Nested, y: Nested) -> Plan | None:
        """Where samples like these will go if they are offered next, so that the others need not be made ready.

        None if the buffer cannot tell. Nothing is decided: `add` draws the same numbers again. Waits for the device.
        """
        parts, count = parts_of(x, y)
        lengths = None if self.padding is None else lengths_of(parts, check_lengths(parts, self.padding))
        state, before = self.generator.get_state(), (self.offered, self._holes)
        if self.offered + count <= self.capacity and not self._holes:  # every policy fills the slots in order
            rows = torch.arange(count)
            return Plan(
                count, rows, rows + self.offered, None if lengths is None else lengths.tolist(), 0, before, state
            )
        uniforms = torch.rand(count, dtype=torch.float64, generator=self.generator, device=self.device)
        self.generator.set_state(state)
        slots, filled = self._slots(uniforms, y)
        slots, *known = torch.stack([slots] if lengths is None else [slots, lengths]).cpu()
        rows = (slots < self.capacity).nonzero().squeeze(1)
        return Plan(count, rows, slots[rows], known[0][rows].tolist() if known else None, filled, before, state)

    def reserve(self, x: Nested, y: Nested, logits: Nested | None = None, plan: Plan | None = None) -> None:
        """Take the memory or disk space that `add` needs for these samples, so that a step cannot fail after it.

        Raises if there is not enough, and says how many bytes are needed; or if the samples do not fit. Memory is
        taken once, for all samples that the buffer will ever hold; with `padding`, for these samples, after a look at
        whether there is enough for all. Nothing is drawn, and the state stays the same.
        """
        self._admit(x, y, logits, plan)

    def add(self, x: Nested, y: Nested, logits: Nested | None = None, plan: Plan | None = None) -> None:
        """Offer B samples in order: `x` (B, ...), `y` (B, ...), `logits` (B, C). The buffer stores copies.

        With a `plan`, these are only those of the samples that it says will be stored.
        """
        parts, count = self._admit(x, y, logits, plan)
        if plan is not None:
            self._check_plan(plan)
            count = plan.offered
        uniforms = torch.rand(count, dtype=torch.float64, generator=self.generator, device=self.device)
        slots, filled = self._slots(uniforms, y) if plan is None else (plan.slots, plan.filled)
        self._storage.write(slots, parts)
        self.seen += count
        self.offered += count
        self._holes -= filled

    def _check_plan(self, plan: Plan) -> None:
        same = torch.equal(self.generator.get_state(), plan.generator)
        if not same or (self.offered, self._holes) != plan.before:
            raise UsageError(
                "the buffer was used between the losses of a minibatch and their commit, so that it would store other "
                "samples than were made ready: commit first, or compute losses without alone=True."
            )

    def _slots(self, uniforms: Tensor, y: Nested) -> tuple[Tensor, int]:
        """The slot of each sample, and how many holes that fills; while there are holes, it waits for the device."""
        slots = self.slots_for(uniforms, y)
        if not self._holes:
            return slots, 0
        # A sample that falls into one of the holes takes the next one: to a policy, they are all alike.
        fresh = (slots >= self.stored) & (slots < self.capacity)
        return torch.where(fresh, self.stored - 1 + fresh.cumsum(0), slots), int(fresh.sum())

    def forget(self, where: Callable[[Draw], Tensor] | Tensor) -> int:
        """Drop the stored samples that `where` marks, (stored,) bool in the order of `contents`; returns their number.

        `where` is that mask, or a function that makes it from the contents, as in `lambda stored: stored.y == 3`.

        What remains is what the buffer would hold if such samples had never come, and it goes on as if so. A reservoir
        in which samples were already replaced therefore does not fill the empty slots with whatever comes next: later
        samples get in with the same probability as earlier ones, and the buffer fills up slowly. A window, a balanced
        buffer, and a reservoir that had stored everything so far, take the next samples at once. If nothing is left,
        this is `forget_all`.
        """
        if not self.stored:
            return 0
        mask = where(self.contents()) if callable(where) else where
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (self.stored,):
            found = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
            raise UsageError(f"where must give a bool for each of the {self.stored} stored samples, not {found}.")
        order = torch.arange(self.stored)
        if self.policy == "window" and self.offered > self.capacity:
            order = order.roll(-(self.offered % self.capacity))  # the oldest first
        kept = order[~mask.cpu()[order]]
        self._retain(kept)
        return len(mask) - len(kept)

    def forget_all(self) -> None:
        """Drop all samples and begin anew, as if none had been offered."""
        if self.stored:
            self._retain(torch.arange(0))

    def _retain(self, kept: Tensor) -> None:
        """Go on with the samples in these slots, in this order."""
        state = self._chosen(self.state_dict(), kept) | {"stored": len(kept)}
        if not len(kept):
            state |= {"names": [], "form": {}, "columns": []} | ({} if self.padding is None else {"padding": {}})
            state |= {"sums": state["sums"][:0]} if "folder" in state else {}
        if not len(kept) or self.offered <= self.capacity or self.policy == "window" or self.balanced:
            state |= {"offered": len(kept), "seen": torch.tensor(len(kept))}  # as if no others had been offered
        self.load_state_dict(state)

    def _chosen(self, state: dict[str, Any], kept: Tensor) -> dict[str, Any]:
        """The state with the samples in these slots alone."""
        return choose(state, kept)

    def slots_for(self, uniforms: Tensor, y: Nested) -> Tensor:
        """The slot of each offered sample, (B,) int64; `capacity` stands for "nowhere"."""
        return self.place(uniforms, self.seen, self.capacity)

    def replace(self, x: Nested, y: Nested, logits: Nested | None = None) -> None:
        """Store exactly these samples, in slot order, and forget all others. There may be fewer than `capacity`."""
        parts, count = self._admit(x, y, logits)
        if count > self.capacity:
            raise UsageError(f"{count} samples do not fit into a buffer of {self.capacity}.")
        self._storage.write(torch.arange(count, device=self.device), parts)
        self.seen.fill_(count)
        self.offered, self._holes = count, 0

    def sample(self, n: int) -> Draw:
        """min(n, stored) distinct samples, each equally likely."""
        self._check_draw(n)
        return self._draw(self._storage.read(distinct(self.stored, n, self.generator)))

    def contents(self) -> Draw:
        """All stored samples, in slot order, where they are stored; a folder is read into host memory as a whole."""
        self._check_draw(1)
        return self._draw(self._storage.first(self.stored))

    def widen(self, outputs: int) -> None:
        """Make room for logits of so many outputs; for new ones, stored samples get their lowest logit - `MARGIN`."""
        logits = self._storage.layout.get("logits")
        if not self.offered or logits is None or next(n for n in logits.shape if n != ANY) >= outputs:
            return  # a folder that was opened again may be ahead of the model
        self._storage.change("logits", lambda old: widened(old, outputs))

    def state_dict(self) -> dict[str, Any]:
        """All that decides what the buffer does next. As in PyTorch, the tensors may be the buffer's own, not copies.

        For a buffer in a folder, the state says which rows of the files it consists of. They are not overwritten
        before a later `commit`.
        """
        return {
            "capacity": self.capacity,
            "offered": self.offered,
            "seen": self.seen,
            "names": list(self._storage.layout) if self.offered else [],
            "form": self._form if self.offered else {},
            "generator": self.generator.get_state(),
            **({} if self.policy == "reservoir" else {"policy": self.policy}),
            **({"stored": self.stored} if self._holes else {}),
            **self._stored_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the buffer that gave `state` was. A state that does not fit raises and changes nothing."""
        self.check_state(state)
        self._restore(state)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `state` is damaged or does not fit this buffer."""
        check_schema(state)
        if ("keys" in state) != self.balanced:
            raise UsageError("one of the saved buffer and this one is balanced, the other is not; make them alike.")
        if state["capacity"] != self.capacity:
            raise UsageError(
                f"the saved buffer has {state['capacity']} slots, this one {self.capacity}; "
                f"make it with a buffer size of {state['capacity']}."
            )
        policy, padding = state.get("policy", "reservoir"), state.get("padding")
        fills = None if self.padding is None else fills_of(state["names"], self.padding)
        for what, saved, own in (("policy", policy, self.policy), ("padding", padding, fills)):
            if saved != own:
                raise UsageError(
                    f"the saved buffer has the {what} {saved!r}, this one {own!r}; make it with {saved!r}."
                )
        if self.offered and state["columns"] and "folder" not in state:
            check_fit(layout_of_state(state), self._storage.layout, "the saved samples")
        restore(torch.Generator(self.generator.device), state["generator"])
        self._storage.check(state)

    def commit(self, state: dict[str, Any] | None = None) -> None:
        """For a buffer in a folder: be found in `state`, or as it is now, when the folder is opened again.

        Rows that only earlier states refer to may then be overwritten. A learner's `save` and `load` commit when the
        checkpoint is on the disk, so that checkpoint and folder fit together whenever the process is killed.
        """
        self._storage.commit(state or self.state_dict())

    def close(self) -> None:
        """Leave the folder, if the buffer is in one, to others. Samples added after the last `commit` are lost."""
        self._storage.close()

    def _layout(self, parts: dict[str, Tensor]) -> Layout:
        """The columns of samples; raises if they do not fit the padding."""
        return layout_of(parts, () if self.padding is None else check_lengths(parts, self.padding))

    def _admit(self, x: Nested, y: Nested, logits: Nested | None, plan: Plan | None = None) -> tuple[list[Tensor], int]:
        """The tensors of samples, one for each column, and their number; raises if they do not fit or lack room."""
        parts, count = parts_of(x, y, logits)
        layout = self._layout(parts)
        if self.offered:
            check_fit(layout, self._storage.layout)
        else:  # until a sample is stored, the columns may still change
            self._storage.make(layout)
            self._form = {"x": outline(x, "x"), "y": outline(y, "y")}
            if logits is not None and not isinstance(logits, Tensor):
                self._form["logits"] = outline(logits, "logits")
        ordered = [parts[name] for name in self._storage.layout]
        self._storage.reserve(ordered, None if plan is None else plan.lengths)
        return ordered, count

    def _check_draw(self, n: int) -> None:
        if not self.stored:
            raise UsageError("the buffer is empty: add samples before reading them.")
        if n < 1:
            raise UsageError(f"at least 1 sample must be drawn, not {n}.")

    def _draw(self, columns: list[Tensor]) -> Draw:
        """Rows of the columns, nested as samples were."""
        named = dict(zip(self._storage.layout, columns, strict=True))
        logits = rebuild(self._form["logits"], named) if "logits" in self._form else named.get("logits")
        return Draw(rebuild(self._form["x"], named), rebuild(self._form["y"], named), logits)

    def _stored_state(self) -> dict[str, Any]:
        """The part of the state that says which samples are stored."""
        return self._storage.state(self.stored)

    def _restore(self, state: dict[str, Any]) -> None:
        """Take over a state that was checked."""
        self._storage.load(state)  # first: it may fail
        restore(self.generator, state["generator"])
        self._form = state["form"]
        # In place: a captured step reads from the addresses it was captured with.
        self.seen.copy_(state["seen"])
        self.offered = state["offered"]
        full = min(self.offered, self.capacity)
        self._holes = full - state.get("stored", full)


def open_storage(
    storage: str | Path, capacity: int, device: torch.device, padding: Mapping[str, float] | None
) -> Storage:
    """The storage that a user named: "device", "host", or a folder, for samples that are drawn on `device`."""
    if isinstance(storage, Path):
        if padding is not None:
            return RaggedFolder(storage, capacity, device, padding)
        return Folder(storage, capacity, device)
    if storage not in ("device", "host"):
        raise UsageError(f"storage must be 'device', 'host' or the Path of a folder, not {storage!r}.")
    home = device if storage == "device" else torch.device("cpu")
    return Memory(capacity, device, home) if padding is None else RaggedMemory(capacity, device, home, padding)
