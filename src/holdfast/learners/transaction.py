"""A step is made whole or not at all: checks of what comes in and out, and the way back if one of them fails."""

from __future__ import annotations

import math
import sys
import warnings
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from holdfast.augment import draws_once
from holdfast.errors import HoldfastError, TrainingError, UsageError
from holdfast.learners.losses import Losses
from holdfast.learners.positions import IGNORED
from holdfast.nested import Nested, leaves, rows, transform
from holdfast.rng import global_generators

if TYPE_CHECKING:
    from holdfast.learners.base import Learner

__all__ = ["Transaction", "check_finite", "check_model"]

LEAP = 1000
"""The most outputs that one label may add to a head. A larger leap is more likely a mistake in the label."""

READ_INTERVAL = 100
"""On a GPU, the loss is read every so many steps, because reading it waits for the device."""

STATISTIC_BYTES = 2**20
"""Model buffers up to this size are copied before every step on a CPU. Larger ones are tables, too slow to copy."""

STEP = "make a step"
EXAMPLE = "torch.optim.SGD(model.parameters(), lr=0.1)"


class Transaction:
    """The checks of a learner's steps, and a copy of what a forward pass changes.

    `begin` checks a minibatch before anything changes, `approve` checks the loss before the backward pass. A step that
    is refused in between is rolled back: the model's buffers and all generators are as they were. Of several ranks,
    all refuse what one refuses, and stay in step.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._outputs: int | None = None
        """The model's number of outputs, once it is known."""
        self._unsure = False
        """Whether a label may lie beyond the outputs; the forward pass will tell."""
        self._minibatch: tuple[Nested, Nested] | None = None
        self._before: tuple[list[tuple[Tensor, Tensor]], list[tuple[torch.Generator, Tensor]]] | None = None
        """Copies of the model's buffers and of the generators' states."""
        # Found once: walking through all modules takes as long as copying what they hold.
        self._stateful = [module for module in learner.model.modules() if module._buffers]
        self._generators: list[torch.Generator] = []
        self._viewed = False
        """Whether `augment` was examined."""
        self._called = False
        """Whether it was examined who calls `observe`."""
        self._told_of_eval = False
        self._unread = 0
        """Steps since the loss was last read."""

    def check_caller(self) -> None:
        """Refuse whole steps inside a Trainer of transformers, which would step again with the same gradients."""
        frame = None if self._called else sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_name == "training_step":
                kinds = type(frame.f_locals.get("self")).__mro__
                if any(kind.__module__.partition(".")[0] == "transformers" for kind in kinds):
                    raise UsageError(
                        "observe inside the training_step of a Trainer would make every update twice: its optimiser "
                        "steps again. Use holdfast.integrations.transformers.ReplayTrainer, or losses and commit."
                    )
            frame = frame.f_back
        self._called = True

    def begin(self, x: Nested, y: Nested) -> tuple[Nested, Nested]:
        """The minibatch on the learner's device. It is checked before anything changes; the head grows if it must."""
        learner = self.learner
        if not learner.validate:
            return self._admit(x, y)
        if learner.ranks is None:
            x, y = self._admit(x, y)
        else:
            with learner.ranks.together("take a minibatch") as meeting:
                x, y = self._admit(x, y)
                meeting.count = int(self._unsure)
            # All ranks make a copy if one does: generators that go in step are rolled back on all ranks or on none.
            self._unsure = any(meeting.counts)
        if not self._viewed:
            self._viewed = True
            _warn_of_alike_views(learner, x, y)
        if not (learner.model.training or self._told_of_eval):
            self._told_of_eval = True
            _warn_of_eval_mode(learner.model)
        self._minibatch, self._before = (x, y), None
        if self._unsure or learner.device.type == "cpu" or self._may_show_one(x):
            self._copy()
        return x, y

    def _may_show_one(self, x: Nested) -> bool:
        """Whether the model may see a single sample, which BatchNorm refuses after it has counted it."""
        learner, buffer = self.learner, self.learner.buffer
        sizes = [getattr(learner, name, None) for name in ("replay_size", "consistency_size")]
        shared = getattr(learner, "replay", None) is not None  # a share may come to one sample
        return shared or 1 in (rows(x), 0 if buffer is None else buffer.stored, *sizes)

    def _admit(self, x: Nested, y: Nested) -> tuple[Nested, Nested]:
        """What `begin` does without the other ranks."""
        learner, labels, given = self.learner, self.learner.labelled, y
        if y is None:
            raise UsageError("observe needs inputs and targets: observe(x, y), or observe(*batch) for a pair of them.")
        if learner.validate:
            _check_form(x, y, labels, learner.positions is not None)
            _check_content(x, y, stored=learner.buffer is not None)

        def moved(part: Tensor) -> Tensor:
            # A tensor of inference mode cannot take part in a backward pass; a copy of it can.
            return part.to(learner.device, copy=part.is_inference())

        x = transform(moved, x)
        y = moved(y).to(torch.int64) if labels else transform(moved, y)
        if learner.validate and learner.buffer is not None:
            learner.buffer.check(x, y)
        if labels and learner.positions is not None and learner.validate:
            # Without a mask, the labels as they came: they may be on the host, which need not wait for them.
            masked = learner.positions.mask is not None
            self._expect(_largest_supervised(learner.positions.labels(x, y) if masked else given))
        elif labels and (learner.validate or learner.head is not None):
            self._expect(_largest_label(given))
        return x, y

    def _expect(self, label: int) -> None:
        """Let the head grow to the largest label, and find out whether the label may lie beyond the outputs."""
        head = self.learner.head
        if head is not None and label >= head.outputs:
            if label >= head.outputs + LEAP:
                raise UsageError(
                    f"label {label} would make the head grow from {head.outputs} to {label + 1} outputs at once; "
                    f"if that is meant, call grow({label + 1}) before."
                )
            self.learner.grow(label + 1)
        outputs = self._outputs if head is None else head.outputs
        self._unsure = outputs is None or label >= outputs

    def _copy(self) -> None:
        """Copy what a forward pass changes."""
        learner = self.learner
        if not self._generators:
            own = [learner.view_generator, None if learner.buffer is None else learner.buffer.generator]
            self._generators += [each for each in own if each is not None]
            self._generators += global_generators(learner.device).values()
        copies = []
        for module in self._stateful:
            for each in module._buffers.values():
                if each is not None and (self._unsure or each.nbytes <= STATISTIC_BYTES):
                    copies.append((each, each.clone()))
        self._before = copies, [(each, each.get_state()) for each in self._generators]

    def check_labels(self, y: Tensor, outputs: Tensor) -> None:
        """Labels must name one of the model's outputs; needed before cross-entropy."""
        learner = self.learner
        if not learner.validate or not learner.labelled:
            return
        try:
            if learner.positions is not None:
                learner.positions.check(outputs, y)
            elif outputs.dim() != 2 or rows(outputs) < rows(y):
                raise UsageError(
                    f"the model's outputs have shape {tuple(outputs.shape)}; cross-entropy needs (samples, classes). "
                    "Say where the classes are, as in class_dim=-1, or give a loss of your own."
                )
            count = outputs.shape[1 if learner.positions is None else learner.positions.class_dim]
            if self._unsure or count != self._outputs:
                self._check_outputs(count, int(y.max()))
        except UsageError as error:
            self.refuse(error)
        self._outputs = count

    def _check_outputs(self, outputs: int, label: int) -> None:
        """The model's outputs must suit the largest label and what the learner was told about the model."""
        head, weights = self.learner.head, self.learner.class_weights
        if label >= outputs:
            raise UsageError(
                f"labels up to {label} do not fit the model: its outputs are 0..{outputs - 1}. "
                'Name its last layer, as in head="classifier", to let it grow.'
            )
        if head is not None and head.outputs != outputs:
            raise UsageError(
                f"'{head.name}' is not the last layer: it has {head.outputs} outputs, the model {outputs}."
            )
        if weights is not None and len(weights) != outputs:
            raise UsageError(f"there are {len(weights)} class weights, but the model has {outputs} outputs.")

    def approve(self, losses: Losses) -> None:
        """Check the loss, and that the buffer can take the minibatch, while there is a way back."""
        learner = self.learner
        if not learner.validate:
            return
        self._unread += 1
        read = learner.device.type == "cpu" or self._unread >= READ_INTERVAL
        self._unread = 0 if read else self._unread
        try:
            # With several ranks, before the backward pass, which waits for the other ranks.
            with self.learner.together(STEP):
                if losses.offer is not None and learner.buffer is not None:
                    learner.buffer.reserve(*losses.offer)
                _check_loss(losses.total, read, self._minibatch)
        except HoldfastError:
            self.roll_back()
            raise
        self._before = self._minibatch = None

    def explain(self, error: Exception, view: Nested) -> NoReturn:
        """Refuse a view that the model could not compute. Errors that do not come from the view pass as they are."""
        if isinstance(error, HoldfastError):
            self.refuse(error)
        first = str(error).partition("\n")[0]
        if not self.learner.validate or any(word in first for word in ("memory", "CUDA error")):
            raise error
        self.refuse(UsageError(_why(first, view, self.learner.model)))

    def refuse(self, error: HoldfastError) -> NoReturn:
        """Roll the forward pass back and raise `error`. The other ranks learn it in `approve` and raise as well."""
        self.roll_back()
        if self.learner.validate:
            with self.learner.together(STEP):
                raise error
        raise error

    def roll_back(self) -> None:
        """Undo what the forward pass changed, if a copy was made."""
        if self._before is not None:
            buffers, generators = self._before
            for buffer, before in buffers:
                buffer.copy_(before)
            for generator, state in generators:
                generator.set_state(state)
            self._before = None


# --- what is checked -------------------------------------------------------------------------------------------------


def check_model(model: Any, optimizer: Any) -> None:
    """A model whose layers have shapes and numbers, and an optimiser that updates them, as far as it tells."""
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


def check_finite(model: nn.Module) -> None:
    """No weight may be infinite or NaN, and no buffer of the model, such as BatchNorm's, NaN."""
    broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    broken += [name for name, value in model.named_buffers() if value.isnan().any()]
    if broken:
        raise TrainingError(
            f"the model is broken: {broken[0]} is no longer finite. Go back to the last checkpoint, and try a smaller "
            "learning rate or clip=1.0."
        )


def _warn_of_alike_views(learner: Learner, x: Nested, y: Nested) -> None:
    """Tell of an `augment` that is random, but draws once for the whole minibatch."""
    if draws_once(learner.augment, x, *([y] if learner.changes_targets else [])):
        warnings.warn(
            "augment is random, but draws once for a whole minibatch, so that all samples are changed alike. Use "
            "augment=hf.per_sample(transform), or draw for each row.",
            stacklevel=5,
        )


def _warn_of_eval_mode(model: nn.Module) -> None:
    """Tell of layers that do not learn, or do not drop, because all of the model is in eval mode."""
    if any(isinstance(each, _BatchNorm | _DropoutNd) for each in model.modules()):
        warnings.warn(
            "the model is in eval mode, so that BatchNorm and dropout work as in a test: call model.train() before "
            "learning. If that is meant, call model.train() and then eval() of those layers alone.",
            stacklevel=5,
        )


def _why(first: str, view: Nested, model: nn.Module) -> str:
    """Why the model could not compute a view, from the first line of its error."""
    if "more than 1 value per channel" in first:
        return (
            "BatchNorm cannot learn from a single sample. Leave out a last minibatch of one, as DataLoader does with "
            "drop_last=True; let the buffer, and every draw from it, have at least two samples."
        )
    own = next(model.parameters()).dtype
    parts = leaves(view, "x")
    advice = "Give the model inputs of the shape it is made for."
    if not all(part.is_floating_point() for part in parts.values()):
        advice = f"Its weights are {own}: give the learner a view of them, as in augment=lambda x: x.float() / 255."
    elif any(part.dtype != own for part in parts.values()):
        advice = f"Its weights are {own}: convert the inputs, as in x.to({own})."
    forms = ", ".join(f"{name} of shape {tuple(part.shape)}, {part.dtype}" for name, part in parts.items())
    return f"the model cannot compute {forms} ({first}). {advice}"


def _check_content(x: Nested, y: Nested, stored: bool) -> None:
    """Tensors must hold their numbers row by row; those of a learner that stores nothing may be sparse."""
    for name, part in (leaves(x, "x") | leaves(y, "y")).items():
        if part.is_meta:
            raise UsageError(f"{name} is on the meta device and holds no numbers: make it on the device of your data.")
        if part.layout != torch.strided and (stored or name.startswith("y")):
            raise UsageError(f"{name} is sparse, and a buffer stores whole rows: give {name}.to_dense().")


def _check_form(x: Nested, y: Nested, labels: bool, positions: bool) -> None:
    """As many targets as inputs, and at least one; `labels` are whole numbers, in one dimension without `positions`."""
    count = rows(x)
    if count == 0:
        raise UsageError("a minibatch must have at least one sample.")
    if not labels:
        if rows(y, "y") != count:
            raise UsageError(f"{count} inputs need as many targets, not {rows(y, 'y')}.")
        return
    if not isinstance(y, Tensor):
        raise UsageError(f"labels must be a tensor, not of type {type(y).__name__}; torch.as_tensor makes one.")
    if y.shape[:1] != (count,) or (y.dim() != 1 and not positions):
        raise UsageError(f"{count} inputs need as many labels in one dimension, not shape {tuple(y.shape)}.")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise UsageError(f"labels must be whole numbers that name classes, not {y.dtype}.")


def _largest_label(y: Tensor) -> int:
    """The largest label; a negative one raises. Waits for the device that the labels are on."""
    signed = y.to(torch.int64)
    if y.shape[0] <= 256:
        values = signed.tolist()  # faster for so few than asking PyTorch twice
        low, high = min(values), max(values)
    else:
        low, high = (int(each.item()) for each in signed.aminmax())
    if low < 0:
        label = low + 2**64 if y.dtype == torch.uint64 else low
        raise UsageError(f"label {label} names no output of the model: they are counted from 0.")
    return int(high)


def _largest_supervised(y: Tensor) -> int:
    """The largest label of a position that is supervised, of which there must be one."""
    supervised = y[y != IGNORED]
    if not len(supervised):
        raise UsageError(
            f"no position is supervised: all labels are {IGNORED}, or mask counts none that has a label. Leave such "
            "minibatches out."
        )
    return _largest_label(supervised)


def _check_loss(loss: Tensor, read: bool, minibatch: tuple[Nested, Nested] | None) -> None:
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
    raise TrainingError(
        f"the loss is {loss.item()}, so no step was made. Go back to the last checkpoint if the weights are broken "
        "(check_finite tells), and try a smaller learning rate or clip=1.0."
    )
