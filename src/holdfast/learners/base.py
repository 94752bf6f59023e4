"""What every learner has: a model, an optimiser, a view of the data, and `observe`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from holdfast.augment import View
from holdfast.buffer import Reservoir
from holdfast.config import PRECISIONS, RunConfig
from holdfast.errors import UsageError
from holdfast.learners.descent import Optimizer
from holdfast.registry import Registry, unknown_name
from holdfast.regularizers import REGULARIZERS

__all__ = ["LEARNERS", "Learner", "Losses", "Parts", "build", "method_names", "widen"]


class Losses(NamedTuple):
    """The terms of one step's loss, each a 0-d tensor without gradient; a term that does not apply is 0."""

    total: Tensor
    current: Tensor
    """Cross-entropy on the samples just observed."""
    replay: Tensor
    """Cross-entropy on samples from the buffer, before its weight alpha."""
    consistency: Tensor
    """The consistency term, before its weight beta."""

    def detach(self) -> Losses:
        """The same numbers without gradient."""
        return Losses(*(term.detach() for term in self))


@dataclass(frozen=True)
class Parts:
    """What a run hands to the learner it builds."""

    model: nn.Module
    optimizer: Optimizer
    view: View
    generator: torch.Generator
    """On the device of the run; decides what the buffer keeps and draws."""


def widen(logits: Tensor) -> Tensor:
    """Logits in float32, or float64 if they are: losses in bfloat16 would be too coarse."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_weights(**weights: float) -> None:
    """Weights of loss terms must be finite and not negative."""
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise UsageError(f"{name} must be a finite number of at least 0, not {weight!r}.")


def check_sizes(**sizes: int | None) -> None:
    """Sizes of draws must be at least 1, or None for as many as observed."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise UsageError(f"{name} must be at least 1, or None for as many samples as observed, not {size}.")


class Learner:
    """Base of all learners. A subclass says in `observe` what one step does.

    Nothing in a step waits for the device: no branch on a tensor's value, no `.item()`. That is what lets the same
    code be captured in a CUDA graph.
    """

    all_at_once: ClassVar[bool] = False
    """Whether runs give this learner all tasks' data at once."""
    buffer: Reservoir | None = None
    compilable: tuple[str, ...] = ("objective",)
    """Pure functions of tensors among the attributes, which an engine may replace by their compiled form."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        augment: View | None = None,
        precision: str = "float32",
        validate: bool = True,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.network: Callable[[Tensor], Tensor] = model
        """What computes the model's output in a step: the model, or its compiled form."""
        self.augment: View = augment or (lambda x: x)
        if precision not in PRECISIONS:
            raise unknown_name("precision", precision, list(PRECISIONS))
        self.validate = validate
        self.device = next(model.parameters()).device
        self._zero = torch.zeros((), device=self.device)
        self.reduced = precision == "bfloat16"

    @classmethod
    def from_config(cls, config: RunConfig, parts: Parts) -> Self:
        """The learner of a run."""
        raise NotImplementedError

    def observe(self, x: Tensor, y: Tensor) -> Losses:
        """Learn from one minibatch: inputs `x` (B, ...) as they are stored, labels `y` (B,)."""
        raise NotImplementedError

    def receive(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The minibatch on the learner's device, its form checked."""
        if self.validate:
            if len(x) != len(y) or y.dim() != 1:
                raise UsageError(f"{len(x)} inputs need as many labels in one dimension, not shape {tuple(y.shape)}.")
            if len(x) == 0:
                raise UsageError("a minibatch must have at least one sample.")
            if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
                raise UsageError(f"labels must be whole numbers that name classes, not {y.dtype}.")
        return x.to(self.device), y.to(self.device, torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        """The network's logits for a view, in float32 or what more the network computes in."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.reduced):
            logits: Tensor = self.network(x)
        return widen(logits)

    def descend(self, loss: Tensor) -> None:
        """One step of the optimiser along the gradient of `loss`."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def check_labels(self, y: Tensor, logits: Tensor) -> None:
        """Labels must name one of the model's outputs. Waits for the device, so runs check once per task instead."""
        if self.validate and (y.min() < 0 or y.max() >= logits.shape[1]):
            raise UsageError(
                f"labels {int(y.min())}..{int(y.max())} do not fit the model: its outputs are 0..{logits.shape[1] - 1}."
            )


LEARNERS: Registry[type[Learner]] = Registry("method")


def method_names() -> list[str]:
    """All methods a run can name: the learners, and every regularizer as consistency replay."""
    return [name for name in LEARNERS if name != "consistency"] + list(REGULARIZERS)


def build(config: RunConfig, parts: Parts) -> Learner:
    """The learner for `config.method`: one registered under that name, or consistency replay with that regularizer."""
    if config.method in LEARNERS:
        return LEARNERS[config.method].from_config(config, parts)
    if config.method in REGULARIZERS:
        return LEARNERS["consistency"].from_config(config, parts)
    raise unknown_name("method", config.method, method_names())
