"""A reservoir that stores as many samples of each class as of any other, whatever their shares of the stream are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.buffer.reservoir import Reservoir
from holdfast.errors import UsageError
from holdfast.nested import Nested
from holdfast.pure import pure

__all__ = ["BalancedReservoir", "place_balanced"]

EMPTY = 2**62
"""The label of a slot that holds no sample; it comes after all classes."""


@pure
def place_balanced(
    uniforms: Tensor, labels: Tensor, stored_keys: Tensor, stored_labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The slot of each of B offered samples, (B,) int64, capacity for "nowhere"; and the new keys and labels of slots.

    `uniforms` (B,) float64 are the samples' keys, `labels` (B,) int64 their classes; `stored_keys` and `stored_labels`
    (capacity,) those of the slots. Samples of a class are ranked by their keys. The first of every class are stored,
    then the second of every class, and so on while there is room; of equal ranks, the lower class goes first.

    What is stored is therefore the same as if all samples of the stream were ranked at once: a sample that had no room
    never has room again, since ranks only grow. Keys are independent of everything else, so the stored samples of a
    class are a uniform sample of all its samples.
    """
    capacity, keys, classes = len(stored_keys), torch.cat([stored_keys, uniforms]), torch.cat([stored_labels, labels])
    by_key = keys.argsort(stable=True)
    order = by_key[classes[by_key].argsort(stable=True)]
    ordered = classes[order]
    ranks = torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
    ranks = torch.where(ordered == EMPTY, EMPTY, ranks)
    # `order` has the lower classes first, and sorting by rank is stable.
    chosen = order[ranks.argsort(stable=True)][:capacity]
    stays = torch.zeros_like(classes, dtype=torch.bool).index_fill_(0, chosen, True)
    # The i-th new sample that is stored takes the i-th slot that is empty or gives up its sample.
    stays = stays & (classes != EMPTY)
    free, accepted = stays[:capacity].to(torch.int8).argsort(stable=True), stays[capacity:]
    slots = torch.where(accepted, free[(accepted.cumsum(0) - 1).clamp(min=0) % capacity], capacity)
    room = torch.zeros(1, dtype=torch.int64, device=slots.device)
    new_keys = torch.cat([stored_keys, room.to(stored_keys.dtype)]).index_copy(0, slots, uniforms)
    new_labels = torch.cat([stored_labels, room]).index_copy(0, slots, labels)
    return slots, new_keys[:capacity], new_labels[:capacity]


class BalancedReservoir(Reservoir):
    """A reservoir in memory that divides its slots evenly among the classes seen so far, exactly and vectorised.

    A class with fewer samples than its share is stored whole, and the others share the rest. Given their number, the
    stored samples of a class are a uniform sample of all that were offered. `y` are labels, (B,) int64.
    """

    balanced = True

    def __init__(
        self,
        capacity: int,
        *,
        generator: torch.Generator | None = None,
        storage: str | Path = "device",
        padding: Mapping[str, float] | None = None,
    ) -> None:
        if isinstance(storage, Path):
            raise UsageError("a balanced buffer is in memory: give storage='device' or 'host', no folder.")
        super().__init__(capacity, generator=generator, storage=storage, padding=padding)
        self.keys = torch.full((self.capacity,), torch.inf, dtype=torch.float64, device=self.device)
        self.labels = torch.full((self.capacity,), EMPTY, dtype=torch.int64, device=self.device)

    def check(self, x: Nested, y: Nested) -> None:
        """Raise if samples like these do not fit the buffer; `y` must be labels."""
        if not isinstance(y, Tensor) or y.dim() != 1 or y.dtype != torch.int64:
            raise UsageError("a balanced buffer needs labels, one whole number for each sample.")
        super().check(x, y)

    def plan(self, x: Nested, y: Nested) -> None:
        """Nothing: to find the slots is to take them."""

    def slots_for(self, uniforms: Tensor, y: Nested) -> Tensor:
        """The slot of each offered sample."""
        slots, keys, labels = place_balanced(uniforms, y, self.keys, self.labels)
        self.keys.copy_(keys)
        self.labels.copy_(labels)
        return slots

    def replace(self, x: Nested, y: Nested, logits: Nested | None = None) -> None:
        """Refused: who chooses samples needs no buffer that balances them."""
        raise UsageError("this method chooses its samples itself: leave out balanced.")

    def state_dict(self) -> dict[str, Any]:
        """All that decides what the buffer does next, among it the keys of stored samples."""
        return {**super().state_dict(), "keys": self.keys, "labels": self.labels}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `state` is damaged or does not fit this buffer."""
        super().check_state(state)
        for name, own in (("keys", self.keys), ("labels", self.labels)):
            saved = state.get(name)
            if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (own.shape, own.dtype):
                raise UsageError(f"the saved buffer is damaged: its {name} do not fit its {self.capacity} slots.")

    def _chosen(self, state: dict[str, Any], kept: Tensor) -> dict[str, Any]:
        """The empty slots take whatever comes next: nothing tells which keys the forgotten classes would have had."""
        kept = kept.to(self.device)
        keys, labels = torch.full_like(self.keys, torch.inf), torch.full_like(self.labels, EMPTY)
        keys[: len(kept)], labels[: len(kept)] = self.keys[kept], self.labels[kept]
        return super()._chosen(state, kept) | {"keys": keys, "labels": labels}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self.keys.copy_(state["keys"])
        self.labels.copy_(state["labels"])
