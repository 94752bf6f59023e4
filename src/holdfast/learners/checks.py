"""What a learner checks of its settings, of what comes in, and of what comes out. Each raises, or has no effect."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from holdfast.errors import TrainingError, UsageError
from holdfast.learners.growing import Head
from holdfast.nested import Nested, leaves, rows

__all__ = [
    "check_class_weights",
    "check_finite",
    "check_form",
    "check_leap",
    "check_loss",
    "check_optimizer",
    "check_outputs",
    "check_shapes",
    "check_sizes",
    "check_weights",
    "largest_label",
]

LEAP = 1000
"""A label may make a head grow by so many outputs at once; more is rather a mistake in the label."""


# --- settings --------------------------------------------------------------------------------------------------------


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


def check_shapes(model: nn.Module) -> None:
    """No layer may still wait for a first minibatch to learn its shape from, as PyTorch's lazy ones do."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise UsageError(
                f"{name} has no shape yet: pass a minibatch through the model, as in model(x), before making its "
                "optimiser and its learner."
            )


def check_optimizer(model: nn.Module, optimizer: object) -> None:
    """The optimiser must update something of the model, as far as it says what it updates."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    if not any(id(parameter) in updated for parameter in model.parameters()):
        raise UsageError(
            "the optimiser updates none of the model's parameters: make it from the parameters of this very model, "
            "as in torch.optim.SGD(model.parameters(), lr=0.1)."
        )


def check_class_weights(given: Tensor | Sequence[float], device: torch.device) -> Tensor:
    """The weights, (C,) on the device."""
    weights = torch.as_tensor(given, device=device).detach()
    weights = weights if weights.is_floating_point() else weights.float()
    if weights.dim() != 1 or not bool((weights.isfinite() & (weights > 0)).all()):
        raise UsageError("class_weights must be one finite number above 0 for each of the model's outputs.")
    return weights


# --- what comes in ---------------------------------------------------------------------------------------------------


def check_form(x: Nested, y: Nested, labels: bool) -> None:
    """As many targets as inputs, and at least one; `labels` are whole numbers in one dimension."""
    count = rows(x)
    if count == 0:
        raise UsageError("a minibatch must have at least one sample.")
    if not labels:
        if rows(y, "y") != count:
            raise UsageError(f"{count} inputs need as many targets, not {rows(y, 'y')}.")
        return
    if not isinstance(y, Tensor):
        raise UsageError(f"labels must be a tensor, not of type {type(y).__name__}; torch.as_tensor makes one.")
    if y.dim() != 1 or y.shape[0] != count:
        raise UsageError(f"{count} inputs need as many labels in one dimension, not shape {tuple(y.shape)}.")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise UsageError(f"labels must be whole numbers that name classes, not {y.dtype}.")


def largest_label(y: Tensor) -> int:
    """The largest label; a negative one raises. Waits for the device that the labels are on."""
    if y.shape[0] <= 256:
        values = y.tolist()  # of so few, faster than asking PyTorch twice
        low, high = min(values), max(values)
    else:
        low, high = (int(each.item()) for each in y.aminmax())
    if low < 0:
        raise UsageError(f"label {low} names no output of the model: they are counted from 0.")
    return int(high)


def check_leap(label: int, outputs: int) -> None:
    """A head of so many outputs must not have to grow beyond reason."""
    if label >= outputs + LEAP:
        raise UsageError(
            f"label {label} would make the head grow from {outputs} to {label + 1} outputs at once; "
            f"if that is meant, call grow({label + 1}) before."
        )


# --- what comes out --------------------------------------------------------------------------------------------------


def check_outputs(outputs: int, label: int, head: Head | None, class_weights: Tensor | None) -> None:
    """The model's outputs must suit the largest label and what the learner was told about the model."""
    if label >= outputs:
        raise UsageError(
            f"labels up to {label} do not fit the model: its outputs are 0..{outputs - 1}. "
            'Name its last layer, as in head="classifier", to let it grow.'
        )
    if head is not None and head.outputs != outputs:
        raise UsageError(f"'{head.name}' is not the last layer: it has {head.outputs} outputs, the model {outputs}.")
    if class_weights is not None and len(class_weights) != outputs:
        raise UsageError(f"there are {len(class_weights)} class weights, but the model has {outputs} outputs.")


def check_loss(loss: Tensor, read: bool, minibatch: tuple[Nested, Nested] | None) -> None:
    """A minibatch's loss must be one number, and a finite one if it is to be `read`, which waits for the device."""
    if loss.dim():
        raise UsageError(f"the loss has shape {tuple(loss.shape)}; it must be one number, the mean over samples.")
    if not loss.requires_grad:
        raise UsageError(
            "there is nothing to learn: the loss depends on no parameter that requires a gradient. "
            "Are all of them frozen, or is this under torch.no_grad()?"
        )
    if read and not math.isfinite(loss.item()):
        parts = {} if minibatch is None else leaves(minibatch[0], "x") | leaves(minibatch[1], "y")
        for name, part in parts.items():
            if not part.isfinite().all():
                raise TrainingError(
                    f"the loss is {loss.item()}, so no step was made: {name} holds numbers that are not finite. "
                    "Leave such samples out, or give those numbers a value, before observing them."
                )
        raise TrainingError(
            f"the loss is {loss.item()}, so no step was made. Go back to the last checkpoint if the weights are broken "
            "(check_finite tells), and try a smaller learning rate or clip=1.0."
        )


def check_finite(model: nn.Module) -> None:
    """No weight may be infinite or NaN, and no buffer of the model, such as BatchNorm's, NaN."""
    broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    broken += [name for name, value in model.named_buffers() if value.isnan().any()]
    if broken:
        raise TrainingError(
            f"the model is broken: {broken[0]} is no longer finite. Go back to the last checkpoint, and try a smaller "
            "learning rate or clip=1.0."
        )
