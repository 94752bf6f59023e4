"""What a learner checks: its model and optimiser, minibatches, labels, tasks, losses; each sentence says what to do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from holdfast.augment import draws_once
from holdfast.errors import DivergenceError, TrainingError, UsageError
from holdfast.learners.positions import IGNORED
from holdfast.nested import Nested, leaves, rows

if TYPE_CHECKING:
    from holdfast.learners.base import Learner

__all__ = [
    "check_begun",
    "check_loss",
    "check_minibatch",
    "check_model",
    "largest_label",
    "named_classes",
    "warn_of_alike_views",
    "warn_of_eval_mode",
    "why_not_computed",
]

EXAMPLE = "torch.optim.SGD(model.parameters(), lr=0.1)"


def check_model(model: Any, optimizer: Any) -> None:
    """Raise unless layers of the model have shapes and numbers, and the optimiser, as far as it tells, updates them."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model must be a torch.nn.Module, not {_kind(model)}.")
    if isinstance(optimizer, type) or not (hasattr(optimizer, "step") and hasattr(optimizer, "zero_grad")):
        raise UsageError(f"the optimiser must be made first, as in {EXAMPLE}; this is {_kind(optimizer)}.")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} computes the loss several times a step, but a stream shows each minibatch "
            f"once: use another optimiser, as in {EXAMPLE}."
        )
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            raise UsageError(f"{name} is on the meta device and holds no numbers: give the model its weights first.")
        if is_lazy(value):
            raise UsageError(
                f"{name} has no shape yet: pass a minibatch through the model, as in model(x), before making its "
                "optimiser and its learner."
            )
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    if not any(id(parameter) in updated for parameter in model.parameters()):
        raise UsageError(
            "the optimiser updates none of the model's parameters: make it from the parameters of this very model, "
            f"as in {EXAMPLE}."
        )
    left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in updated]
    if left:
        warnings.warn(
            f"the optimiser does not hold {len(left)} of the model's parameters, so they stay as they are: "
            f"{', '.join(left[:3])}{', ...' if left[3:] else ''}. Give it model.parameters(); those that are meant to "
            "stay get requires_grad_(False), which also saves their gradients.",
            stacklevel=4,
        )


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def warn_of_alike_views(learner: Learner, x: Nested, y: Nested) -> None:
    """Tell of an `augment` that is random, but draws once for the whole minibatch."""
    if draws_once(learner.augment, x, *([y] if learner.changes_targets else [])):
        warnings.warn(
            "augment is random, but draws once for a whole minibatch, so that all samples are changed alike. Use "
            "augment=hf.per_sample(transform), or draw for each row.",
            stacklevel=5,
        )


def warn_of_eval_mode(model: nn.Module) -> None:
    """Tell of layers that do not learn, or do not drop, because all of the model is in eval mode."""
    if any(isinstance(each, _BatchNorm | _DropoutNd) for each in model.modules()):
        warnings.warn(
            "the model is in eval mode, so that BatchNorm and dropout work as in a test: call model.train() before "
            "learning. If that is meant, call model.train() and then eval() of those layers alone.",
            stacklevel=5,
        )


def why_not_computed(first: str, view: Nested, model: nn.Module) -> str:
    """Why the model could not compute a view, from the first line of its error."""
    if "more than 1 value per channel" in first:
        return (
            "BatchNorm cannot learn from a single sample. Leave out a last minibatch of one, as DataLoader does with "
            "drop_last=True; let the buffer, and every draw from it, have at least two samples."
        )
    if "index out of range in self" in first:
        return (
            "a number in x has no row in one of the model's embeddings: every token must be below the size of the "
            "vocabulary, and no text longer than the positions that the model has. Was it another tokenizer's?"
        )
    own = next(model.parameters()).dtype
    parts = leaves(view, "x")
    advice = "Give the model inputs of the shape it is made for."
    if any(part.dtype == torch.uint8 for part in parts.values()):
        advice = f"Its weights are {own}: give the learner a view of them, as in augment=lambda x: x.float() / 255."
    elif any(part.is_floating_point() and part.dtype != own for part in parts.values()):
        advice = f"Its weights are {own}: convert the inputs, as in x.to({own})."
    forms = ", ".join(f"{name} of shape {tuple(part.shape)}, {part.dtype}" for name, part in parts.items())
    return f"the model cannot compute {forms} ({first}). {advice}"


def check_minibatch(learner: Learner, x: Nested, y: Nested) -> None:
    """Raise unless there are inputs and as many targets, in tensors with numbers; those to be stored are not sparse."""
    count = rows(x)
    if count == 0:
        raise UsageError("a minibatch must have at least one sample.")
    if learner.labelled:
        _check_labels(y, count, learner.positions is not None)
    elif rows(y, "y") != count:
        raise UsageError(f"{count} inputs need as many targets, not {rows(y, 'y')}.")
    for name, part in (leaves(x, "x") | leaves(y, "y")).items():
        if part.is_meta:
            raise UsageError(f"{name} is on the meta device and holds no numbers: make it on the device of your data.")
        if part.layout != torch.strided and (learner.buffer is not None or name.startswith("y")):
            raise UsageError(f"{name} is sparse, and a buffer stores whole rows: give {name}.to_dense().")


def _check_labels(y: Nested, count: int, positions: bool) -> None:
    """Raise unless labels are whole numbers: one for each of `count` samples, or with `positions` for each position."""
    if not isinstance(y, Tensor):
        raise UsageError(f"labels must be a tensor, not of type {type(y).__name__}; torch.as_tensor makes one.")
    if y.shape[:1] != (count,) or (y.dim() != 1 and not positions):
        raise UsageError(f"{count} inputs need as many labels in one dimension, not shape {tuple(y.shape)}.")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise UsageError(f"labels must be whole numbers that name classes, not {y.dtype}.")


def largest_label(y: Tensor, positions: bool) -> int:
    """The largest label; a negative one raises. Waits for the device that the labels are on.

    With `positions`, labels `IGNORED` do not count, but there must be others.
    """
    signed = y.to(torch.int64)
    if positions:
        # For the smallest label, those that do not count are replaced by the largest; if none counts, it is `IGNORED`.
        most = signed.amax()
        low, high = torch.stack([torch.where(signed == IGNORED, most, signed).amin(), most]).tolist()  # waits once
        if low == high == IGNORED:
            raise UsageError(
                f"no position is supervised: all labels are {IGNORED}, or mask counts none that has a label. Leave "
                "such minibatches out."
            )
    elif y.shape[0] <= 256:
        values = signed.tolist()  # faster for so few than asking PyTorch twice
        low, high = min(values), max(values)
    else:
        low, high = (int(each.item()) for each in signed.aminmax())
    if low < 0:
        label = low + 2**64 if y.dtype == torch.uint64 else low
        raise UsageError(f"label {label} names no output of the model: they are counted from 0.")
    return int(high)


def named_classes(classes: Iterable[int], outputs: int) -> list[int]:
    """The classes of a task, each of which must name an output."""
    numbers = [int(each) for each in classes]
    if wrong := [each for each in numbers if not 0 <= each < outputs]:
        raise UsageError(f"begin_task: the model has outputs 0..{outputs - 1}, and none for {wrong[0]}.")
    return numbers


def check_begun(learner: Learner, seen: Tensor, y: Tensor) -> None:
    """Labels must be of classes that `begin_task` has named: those `seen`."""
    if learner.validate and not bool(seen[y].all()):
        learner.refuse(UsageError("a label belongs to no task so far: call begin_task(classes) when a task begins."))


def check_loss(loss: Tensor, read: bool, minibatch: tuple[Nested, Nested] | None) -> None:
    """The loss must be one number with a gradient. Where it is `read`, which waits for the device, a finite one."""
    if loss.dim():
        raise UsageError(f"the loss has shape {tuple(loss.shape)}; it must be one number, the mean over samples.")
    if not loss.requires_grad:
        raise UsageError(
            "there is nothing to learn: the loss depends on no parameter that requires a gradient. "
            "Are all of them frozen, or is this under torch.no_grad()?"
        )
    if not read or math.isfinite(loss.item()):
        return
    parts = {} if minibatch is None else leaves(minibatch[0], "x") | leaves(minibatch[1], "y")
    for name, part in parts.items():
        if not part.isfinite().all():
            raise TrainingError(
                f"the loss is {loss.item()}, so no step was made: {name} holds numbers that are not finite. "
                "Leave such samples out, or give those numbers a value, before observing them."
            )
    raise DivergenceError(
        f"the loss is {loss.item()}, so no step was made. Go back to the last checkpoint if the weights are broken "
        "(check_finite tells), and try a smaller learning rate or clip=1.0."
    )
