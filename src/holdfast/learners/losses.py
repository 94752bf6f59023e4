"""What one step gives: its loss, the terms of it, and the samples to offer to the buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.buffer.base import Plan
from holdfast.nested import Nested

__all__ = ["NEVER", "Loss", "Losses", "Offer", "widen"]

Loss = Callable[[Tensor, Any], Tensor]
"""(outputs, targets) -> the mean over samples, 0-d."""

NEVER = -1e9
"""An output that leaves its class no probability; not infinite, as 0 times infinity is NaN."""


class Offer(NamedTuple):
    """A minibatch for the buffer: the inputs as they came, their targets, and the outputs to store with them."""

    x: Nested
    y: Nested
    logits: Nested | None = None
    plan: Plan | None = None
    """Where the samples go, if that was decided beforehand: these are then those that are stored, and no others."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `reserve` and `add` of a buffer get: a plan only if there is one, for some buffers know of none."""
        return self[:3] if self.plan is None else self


class Losses:
    """The loss of one step and the terms it is made of, each a 0-d tensor.

    `losses.total` is what the step descends; every term is an attribute as well, as in `losses.replay`. The terms
    `current`, `replay` and `consistency` are 0 for methods without them. `kept` is what else the method's `commit`
    needs of the step: there may be other losses before it.
    """

    __slots__ = ("descended", "kept", "offer", "terms", "total")

    def __init__(self, total: Tensor, *, offer: Offer | None = None, kept: Any = None, **terms: Tensor) -> None:
        self.total, self.terms, self.offer, self.kept = total, terms, offer, kept
        self.descended = False  # whether the learner's own backward pass was made

    def __getattr__(self, name: str) -> Tensor:
        if name in self.__slots__ or name.startswith("__"):  # copies and pickles ask before there is anything
            raise AttributeError(name)
        if name in self.terms:
            return self.terms[name]
        if name in ("current", "replay", "consistency"):
            return torch.zeros_like(self.total)
        raise AttributeError(f"this step has no loss term '{name}'; it has {', '.join(self.as_dict())}.")

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.as_dict().values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Losses) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]

    def as_dict(self) -> dict[str, Tensor]:
        """The total and the terms by name."""
        return {"total": self.total, **self.terms}

    def detach(self) -> Losses:
        """The same numbers without gradient, and without the minibatch."""
        terms = {name: term.detach() for name, term in self.terms.items()}
        return Losses(self.total.detach(), offer=None, **terms)

    def __repr__(self) -> str:
        return f"Losses({', '.join(f'{name}={term.item():.4g}' for name, term in self.as_dict().items())})"


def widen(outputs: Tensor) -> Tensor:
    """Outputs in float32, or float64 if they are: losses in bfloat16 would be too coarse."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
