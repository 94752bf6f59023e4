"""A step is made whole or not at all: checks of what comes in and out, and the way back if one of them fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from holdfast.errors import HoldfastError, UsageError
from holdfast.learners.checks import (
    check_loss,
    check_minibatch,
    largest_label,
    warn_of_alike_views,
    warn_of_eval_mode,
    why_not_computed,
)
from holdfast.learners.losses import Losses
from holdfast.models import way_back
from holdfast.nested import Nested, rows, transform
from holdfast.rng import global_generators

if TYPE_CHECKING:
    from holdfast.learners.base import Learner

__all__ = ["Transaction"]

LEAP = 1000
"""The most outputs that one label may add to a head. A larger leap is more likely a mistake in the label."""

READ_INTERVAL = 100
"""On a GPU, the loss is read every so many steps, because reading it waits for the device."""

STATISTIC_BYTES = 2**20
"""Model buffers up to this size are copied before every step on a CPU. Larger ones are tables, too slow to copy."""

STEP = "make a step"


class Transaction:
    """The checks of a learner's steps, and a copy of what a forward pass changes.

    `begin` checks a minibatch before anything changes, `approve` checks the loss before the backward pass. A step that
    is refused in between is rolled back: the model's buffers and all generators are as they were. So is one whose
    backward pass fails; then the weights move, and `close` says that there is no way back. Of several ranks, all refuse
    what one refuses, and stay in step.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._outputs: int | None = None
        """The model's number of outputs, once it is known."""
        self._unsure = False
        """Whether a label may lie beyond the outputs; the forward pass will tell."""
        self._minibatch: tuple[Nested, Nested] | None = None
        self._undo: Callable[[], None] | None = None
        """Undoes the forward pass of this step; None where there is no way back."""
        self._stateful: list[nn.Module] = []
        """The modules with buffers, of the model and of the method itself."""
        self._generators: list[torch.Generator] = []
        """All that a step may draw from. Both lists are made at the first step."""
        self._knows_caller = False
        """Whether it was examined who calls `observe`."""
        self._knows_view = False
        """Whether `augment` was examined."""
        self._told_of_eval = False
        self._steps = 0

    def check_caller(self) -> None:
        """Refuse whole steps inside a Trainer of transformers, which would step again with the same gradients."""
        frame = None if self._knows_caller else sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_name == "training_step":
                kinds = type(frame.f_locals.get("self")).__mro__
                if any(kind.__module__.partition(".")[0] == "transformers" for kind in kinds):
                    raise UsageError(
                        "observe inside the training_step of a Trainer would make every update twice: its optimiser "
                        "steps again. Use holdfast.integrations.transformers.ReplayTrainer, or losses and commit."
                    )
            frame = frame.f_back
        self._knows_caller = True

    def begin(self, x: Nested, y: Nested) -> tuple[Nested, Nested]:
        """The minibatch on the learner's device. It is checked before anything changes; the head grows if it must."""
        learner = self.learner
        if not learner.validate:  # as in a run, whose model is its own
            return self._receive(x, y)
        self._look_again()
        with learner.together("take a minibatch") as meeting:
            x, y = self._receive(x, y)
            meeting.count = int(self._unsure)
        # All ranks make a copy if one does: generators that go in step are rolled back on all ranks or on none.
        self._unsure = self._unsure or any(meeting.counts)
        if not self._knows_view:
            self._knows_view = True
            warn_of_alike_views(learner, x, y)
        if not (learner.model.training or self._told_of_eval):
            self._told_of_eval = True
            warn_of_eval_mode(learner.model)
        self._minibatch, self._undo = (x, y), None
        if self._unsure or learner.device.type == "cpu" or self._may_show_one(x):
            self._remember()
        return x, y

    def _look_again(self) -> None:
        """Find BatchNorms that were put into the model since the last step: they would mix minibatches."""
        learner = self.learner
        if learner._groups.current:
            return
        if any(isinstance(each, nn.Module) for each in learner.extra_state().values()):
            raise UsageError(
                f"the model has other BatchNorms than when its learner was made, and {type(learner).__name__} has "
                "networks of its own that do not follow: change the model first, and then make the learner."
            )
        learner._groups.renew()
        self._generators = []  # what a step changes is found anew

    def admit(self, x: Nested, y: Nested) -> tuple[Nested, Nested]:
        """Samples on the learner's device, labels as int64; checked first, if the learner checks."""
        learner = self.learner
        if learner.validate:
            check_minibatch(learner, x, y)

        def moved(part: Tensor) -> Tensor:
            # A tensor of inference mode cannot take part in a backward pass; a copy of it can.
            return part.to(learner.device, copy=part.is_inference())

        x, y = transform(moved, x), transform(moved, y)
        return x, y.to(torch.int64) if learner.labelled else y

    def _may_show_one(self, x: Nested) -> bool:
        """Whether the model may see a single sample, which BatchNorm refuses after it has counted it."""
        learner, buffer = self.learner, self.learner.buffer
        sizes = [getattr(learner, name, None) for name in ("replay_size", "consistency_size")]
        shared = getattr(learner, "replay", None) is not None  # a share may come to one sample
        return shared or 1 in (rows(x), 0 if buffer is None else buffer.stored, *sizes)

    def _receive(self, x: Nested, y: Nested) -> tuple[Nested, Nested]:
        """What `begin` does without the other ranks."""
        learner, given = self.learner, y
        if y is None:
            raise UsageError("observe needs inputs and targets: observe(x, y), or observe(*batch) for a pair of them.")
        x, y = self.admit(x, y)
        if learner.validate and learner.buffer is not None:
            learner.buffer.check(x, y)
        if learner.labelled and (learner.validate or learner.head is not None):
            # Without a mask, the labels as they came: they may be on the host, which need not wait for them.
            masked = learner.positions is not None and learner.positions.mask is not None
            self._expect(largest_label(learner.targets(x, y) if masked else given, learner.positions is not None))
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

    def _remember(self) -> None:
        """Copy what a forward pass changes."""
        if not self._generators:
            self._find_state()
        self._undo = way_back(self._stateful, self._generators, inf if self._unsure else STATISTIC_BYTES)

    def _find_state(self) -> None:
        """Look for modules and generators once: it takes as long as copying what they hold."""
        learner = self.learner
        parts = list(learner.extra_state().values())
        networks = [each for each in parts if isinstance(each, nn.Module)]
        every = (module for network in (learner.model, *networks) for module in network.modules())
        self._stateful = [module for module in every if module._buffers]
        own = [learner.view_generator, None if learner.buffer is None else learner.buffer.generator]
        self._generators = [each for each in (*own, *parts) if isinstance(each, torch.Generator)]
        self._generators += global_generators(learner.device).values()

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
            advice = 'Name its last layer, as in head="classifier", to let it grow.' if self.learner.grows else ""
            found = f"labels up to {label} do not fit the model: its outputs are 0..{outputs - 1}. {advice}"
            raise UsageError(found.rstrip())
        if head is not None and head.outputs != outputs:
            raise UsageError(
                f"'{head.name}' is not the last layer: it has {head.outputs} outputs, the model {outputs}."
            )
        counted = getattr(self.learner, "seen", None)  # a number for each class, made before the model was called
        if isinstance(counted, Tensor) and counted.dim() == 1 and len(counted) != outputs:
            raise UsageError(
                f"the model has {outputs} outputs, but its last nn.Linear has {len(counted)}: register the layer that "
                f"makes the outputs last, as {type(self.learner).__name__} counts classes there."
            )
        if weights is not None and len(weights) != outputs:
            raise UsageError(f"there are {len(weights)} class weights, but the model has {outputs} outputs.")

    def approve(self, losses: Losses, reserve: bool) -> None:
        """Check the loss, and with `reserve` that the buffer can take the minibatch, while there is a way back."""
        learner = self.learner
        if not learner.validate:
            return
        self._steps += 1
        read = learner.device.type == "cpu" or self._steps % READ_INTERVAL == 0
        # With several ranks, before the backward pass, which waits for the other ranks.
        with self._rolling_back(), learner.together(STEP):
            if reserve:
                self._reserve(losses)
            check_loss(losses.total, read, self._minibatch)
        self._minibatch = None

    def reserve(self, losses: Losses) -> None:
        """Check that the buffer can take the minibatch, if that was left out before."""
        if self.learner.validate:
            with self._rolling_back():
                self._reserve(losses)

    def _reserve(self, losses: Losses) -> None:
        if losses.offer is not None and self.learner.buffer is not None:
            self.learner.buffer.reserve(*losses.offer.arguments)

    @contextmanager
    def _rolling_back(self) -> Iterator[None]:
        try:
            yield
        except HoldfastError:
            self.roll_back()
            raise

    def explain(self, error: Exception, view: Nested) -> NoReturn:
        """Refuse a view that the model could not compute. Errors that do not come from the view pass as they are."""
        if isinstance(error, HoldfastError):
            self.refuse(error)
        first = str(error).partition("\n")[0]
        if not self.learner.validate or any(word in first for word in ("memory", "CUDA error")):
            raise error
        self.refuse(UsageError(why_not_computed(first, view, self.learner.model)))

    def refuse(self, error: HoldfastError) -> NoReturn:
        """Roll the forward pass back and raise `error`. The other ranks learn it in `approve` and raise as well."""
        self.roll_back()
        if self.learner.validate:
            with self.learner.together(STEP):
                raise error
        raise error

    def close(self) -> None:
        """Give up the way back: the weights move."""
        self._undo = None

    def roll_back(self) -> None:
        """Undo what the forward pass changed, if a copy was made."""
        if self._undo is not None:
            self._undo()
            self._undo = None
