"""What every learner has: a model, an optimiser, a view of the data, and `observe`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from holdfast import checkpoint
from holdfast.augment import View
from holdfast.buffer import Reservoir, ShardedReservoir
from holdfast.config import PRECISIONS, RunConfig
from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.learners import checks, fitting
from holdfast.learners.descent import BfloatTwin, Optimizer, Scheduler, forget_gradients
from holdfast.learners.growing import Head
from holdfast.nested import Nested, leaves, rows, transform
from holdfast.ranks import Ranks
from holdfast.registry import Registry, unknown_name
from holdfast.regularizers import REGULARIZERS
from holdfast.rng import check_globally, global_generators, global_state, restore, restore_globally
from holdfast.rng import generator as seeded_generator

__all__ = ["LEARNERS", "Learner", "Loss", "Losses", "Parts", "build", "method_names", "refuse_options", "widen"]

STEP = "make a step"

Loss = Callable[[Tensor, Any], Tensor]
"""(outputs, targets) -> the mean over samples, 0-d."""


class Losses(NamedTuple):
    """The terms of one step's loss, each a 0-d tensor without gradient; a term that does not apply is 0."""

    total: Tensor
    current: Tensor
    """Cross-entropy, or the loss given instead, on the samples just observed."""
    replay: Tensor
    """The same on samples from the buffer, before its weight alpha."""
    consistency: Tensor
    """The consistency term, before its weight beta."""

    def detach(self) -> Losses:
        """The same numbers without gradient."""
        return Losses(*(term.detach() if term.requires_grad else term for term in self))


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


class Learner:
    """Base of all learners. A subclass says in `observe` what one step does.

    What all of them take:

    `augment` turns inputs as they are stored into what the network sees, in new tensors. `loss`, a function (outputs,
    targets) -> mean over samples, replaces cross-entropy; targets are then whatever it understands, with one row per
    sample: numbers for a regression, masks, dicts of tensors. `class_weights` are cross-entropy's, one positive number
    per class. `clip` limits the norm of the gradient of all that the optimiser updates. `scheduler`, any of
    torch.optim.lr_scheduler, steps once per minibatch and is saved with the learner. `precision="bfloat16"` computes
    the network under autocast; weights, losses and what the buffer holds stay in float32, so that any optimiser works.

    `head` names the model's last nn.Linear and lets it grow: a label beyond its outputs adds what is missing, new ones
    initialised as in a new layer (`seed` decides), while the optimiser keeps its state; see also `grow`. Regularizers
    that are means over classes, such as "mse", weigh more as long as there are few.

    With `validate`, what comes in is checked before anything changes, and a loss that is not finite raises. On a CPU no
    step is made then and the learner is as it was, generators and BatchNorm's statistics included, whether a NaN in the
    minibatch is the cause or anything else; only buffers of the model above 1 MiB stay as the forward pass left them,
    and a head that grew for the labels stays grown. On a GPU the loss is looked at every 100 steps, since looking waits
    for the device, and steps in between have been made. Without `validate`, nothing in a step waits: no branch on a
    tensor's value, no `.item()`. That is what lets the same code be captured in a CUDA graph.

    A model in DistributedDataParallel makes this one learner of all ranks: each observes minibatches of its own, and
    together they have one buffer. Every rank calls the same methods at the same time; with `validate`, what one of them
    refuses, all refuse. The buffer's size counts the samples of all ranks; sizes of draws, and the losses, are a rank's
    own. `model` is then the module inside, which one rank can use alone, and checkpoints are those of a learner without
    ranks. Its head cannot grow.
    """

    all_at_once: ClassVar[bool] = False
    """Whether runs give this learner all tasks' data at once."""
    buffer: Reservoir | None = None
    compilable: tuple[str, ...] = ()
    """Pure functions of tensors among the attributes, which an engine may replace by their compiled form."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        augment: View | None = None,
        loss: Loss | None = None,
        class_weights: Tensor | Sequence[float] | None = None,
        clip: float | None = None,
        scheduler: Scheduler | None = None,
        head: str | None = None,
        precision: str = "float32",
        validate: bool = True,
        seed: int = 0,
    ) -> None:
        self.network: Callable[[Any], Tensor] = model
        """What computes the model's output in a step: the model, its compiled form, or what spreads it over ranks."""
        # torch.compile wraps a model; what is inside has the names that checkpoints and `head` go by.
        self.model, self.optimizer = getattr(model, "_orig_mod", model), optimizer
        self.ranks: Ranks | None = None
        """The processes that learn together, if there are several."""
        if isinstance(model, DistributedDataParallel):
            self.model, self.ranks = model.module, Ranks(model.process_group)
        checks.check_shapes(self.model)
        checks.check_optimizer(self.model, optimizer)
        self.augment: View = augment or (lambda x: x)
        if precision not in PRECISIONS:
            raise unknown_name("precision", precision, list(PRECISIONS))
        self.validate = validate
        self.device = next(model.parameters()).device
        self._zero = torch.zeros((), device=self.device)
        self.reduced = precision == "bfloat16"
        if loss is not None and (class_weights is not None or head is not None):
            raise UsageError("class_weights and head belong to cross-entropy; with a loss of your own, leave them out.")
        if clip is not None and not (math.isfinite(clip) and clip > 0):
            raise UsageError(f"clip must be a finite number above 0, or None for no clipping, not {clip!r}.")
        self.loss, self.clip, self.scheduler, self.seed = loss, clip, scheduler, seed
        self.class_weights = None if class_weights is None else checks.check_class_weights(class_weights, self.device)
        self._wants_loss = scheduler is not None and "metrics" in signature(scheduler.step).parameters
        """As ReduceLROnPlateau does."""
        if head is not None and self.ranks is not None:
            raise UsageError(
                "a model in DistributedDataParallel cannot grow its head: it would not notice the new parameters. "
                "Give the head as many outputs as there will be classes."
            )
        self.head = None if head is None else Head(self.model, head, optimizer)
        self._outputs: int | None = None
        """How many outputs the model had when last seen."""
        self._before: tuple[list[tuple[Tensor, Tensor]], list[tuple[torch.Generator, Tensor]]] | None = None
        """What a forward pass moves as it was before: the model's buffers and the generators."""
        self._unsure = False
        """Whether labels may lie beyond the outputs, which only these can tell."""
        self._given: tuple[Nested, Nested] | None = None
        """The minibatch at hand."""
        self._stateful = [module for module in self.model.modules() if module._buffers]
        """Found once: going through all modules takes as long as copying what these hold."""
        self._drawn_from: list[torch.Generator] = []
        """The generators of a step, found at the first one."""
        self._unwatched = 0
        """Steps since the loss was last looked at."""

    def reserve(
        self, capacity: int, seed: int, generator: torch.Generator | None, storage: str | Path = "device"
    ) -> Reservoir:
        """A buffer of `capacity` samples, of all ranks together if there are several."""
        if self.ranks is None:
            generator = generator or seeded_generator(seed, "buffer", self.device)
            return Reservoir(capacity, generator=generator, storage=storage)
        generator = generator or seeded_generator(seed, "buffer")
        return ShardedReservoir(capacity, ranks=self.ranks, generator=generator, device=self.device, storage=storage)

    @classmethod
    def from_config(cls, config: RunConfig, parts: Parts) -> Self:
        """The learner of a run."""
        raise NotImplementedError

    def observe(self, x: Nested, y: Tensor) -> Losses:
        """Learn from one minibatch: inputs `x` (B, ...) as they are stored, labels `y` (B,).

        `x` is a tensor, or dicts, tuples and lists of tensors; `augment` and the model get it in the same form.
        """
        raise NotImplementedError

    def receive(self, x: Nested, y: Nested) -> tuple[Nested, Nested]:
        """The minibatch on the learner's device, checked before anything is changed; the head grows if it must."""
        if self.validate and self.ranks is not None:
            with self.ranks.together("take a minibatch") as meeting:
                x, y = self._take(x, y)
                meeting.count = int(self._unsure)
            # What one remembers, all must: generators that go in step are put back on all ranks or on none.
            self._unsure = any(meeting.counts)
        else:
            x, y = self._take(x, y)
        if self.validate:
            self._given = x, y
            self._before = None
            if self._unsure or self.device.type == "cpu":
                self._remember()
        return x, y

    def view(self, x: Nested) -> Nested:
        """What `augment` shows the network of a minibatch that is the caller's own, and must stay as it is."""
        if not self.validate:
            return self.augment(x)
        before, shown = _versions(x), self.augment(x)
        if _versions(x) != before:
            self.refuse(
                UsageError(
                    "augment changed the minibatch itself, which is the caller's: let it return new tensors, as in "
                    "x - mean instead of x.sub_(mean), or begin with x = x.clone()."
                )
            )
        return shown

    def forward(self, x: Nested) -> Tensor:
        """The network's logits for a view, in float32 or what more the network computes in."""
        with self.autocast():
            logits: Tensor = self.network(x)
        if not isinstance(logits, Tensor):
            self.refuse(
                UsageError(
                    f"the model returns a {type(logits).__name__}; a learner needs one tensor. "
                    "Wrap the model in a module that returns the outputs alone."
                )
            )
        return widen(logits)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision in which the network computes."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.reduced else nullcontext()

    def criterion(self, outputs: Tensor, targets: Nested) -> Tensor:
        """The mean loss of a minibatch: cross-entropy, or what was given instead."""
        if self.loss is not None:
            return self.loss(outputs, targets)
        weights = self.class_weights
        return F.cross_entropy(outputs, targets, None if weights is None else weights.to(outputs.dtype))

    def descend(self, loss: Tensor) -> None:
        """One step of the optimiser along the gradient of `loss`."""
        if self.validate:
            self._unwatched += 1
            due = self.device.type == "cpu" or self._unwatched >= 100
            self._unwatched = 0 if due else self._unwatched
            try:
                if self.ranks is None:
                    checks.check_loss(loss, due, self._given)
                else:
                    with self.ranks.together(STEP):  # before the backward pass, which waits for the other ranks
                        checks.check_loss(loss, due, self._given)
            except HoldfastError:
                self.take_back()
                raise
            self._before = self._given = None
        forget_gradients(self.optimizer)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self._updated(), self.clip)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step(*([loss.detach()] if self._wants_loss else []))

    def grow(self, outputs: int) -> None:
        """Give the head so many outputs, if it has fewer. New classes weigh 1 where there are `class_weights`."""
        if self.head is None:
            raise UsageError('the head of this learner is fixed: name the last nn.Linear, as in head="classifier".')
        before = self.head.outputs
        if outputs <= before:
            return
        # A generator of its own, made from how far the head has grown: nothing more to save.
        grow = self.head.growth(outputs, self.optimizer, seeded_generator(self.seed, f"head {before}"))
        weights = self.class_weights
        if weights is not None and len(weights) < outputs:
            weights = torch.cat([weights, weights.new_ones(outputs - len(weights))])
        if self.buffer is not None:
            self.buffer.widen(outputs)  # a full disk may prevent it, and then nothing has grown
        grow()
        self.class_weights = weights

    def check_labels(self, y: Tensor, logits: Tensor) -> None:
        """Labels must name one of the model's outputs; what the forward pass moved is put back if they do not."""
        if not self.validate or self.loss is not None:
            return
        if logits.dim() != 2 or rows(logits) < rows(y):
            self.refuse(
                UsageError(
                    f"the model's outputs have shape {tuple(logits.shape)}; cross-entropy needs (samples, classes). "
                    "Give a loss of your own for outputs of another form."
                )
            )
        outputs = logits.shape[1]
        if self._unsure or outputs != self._outputs:
            try:
                checks.check_outputs(outputs, int(y.max()), self.head, self.class_weights)
            except UsageError as error:
                self.refuse(error)
            self._outputs = outputs

    def check_offer(self, x: Nested, y: Nested, logits: Tensor | None = None) -> None:
        """The buffer must take what this step will offer: asked before its first samples, when nothing stored tells."""
        if self.validate and self.buffer is not None:
            try:
                self.buffer.check_whole(x, y, logits)
            except HoldfastError as error:
                self.refuse(error)

    def refuse(self, error: HoldfastError) -> NoReturn:
        """Raise `error` between the forward pass and `descend`, with what the forward pass moved put back.

        The other ranks raise as well: `descend`, where they are or will be, tells them.
        """
        self.take_back()
        if self.validate:
            with self._together(STEP):
                raise error
        raise error

    def take_back(self) -> None:
        """Put back what the forward pass moved, if that was remembered."""
        if self._before is not None:
            buffers, generators = self._before
            for buffer, before in buffers:
                buffer.copy_(before)
            for generator, state in generators:
                generator.set_state(state)
            self._before = None

    def check_finite(self) -> None:
        """Raise if a weight is no longer finite, or a buffer of the model, such as BatchNorm's, has become NaN."""
        checks.check_finite(self.model)

    def state_dict(self) -> dict[str, Any]:
        """All that decides what the next steps do: model, optimiser, scheduler, buffer, generators.

        Among the generators are PyTorch's global ones, of the CPU and of the model's device, from which layers such as
        dropout draw. As with PyTorch's, the tensors are the learner's own: save them, or copy them before learning on.
        A learner with more state than that extends this method and `load_state_dict`.
        """
        state: dict[str, Any] = {"learner": type(self).__name__, "model": dict(self.model.state_dict())}
        state["global"] = global_state(self.device)
        if hasattr(self.optimizer, "state_dict"):
            state["optimizer"] = {"type": type(self.optimizer).__name__, "state": self.optimizer.state_dict()}
        if self.scheduler is not None:
            state["scheduler"] = {"type": type(self.scheduler).__name__, "state": self.scheduler.state_dict()}
        if self.buffer is not None:
            state["buffer"] = self.buffer.state_dict()
        if (generator := self._view_generator()) is not None:
            state["augment"] = generator.get_state()
        if self.ranks is not None:
            self._add_ranks(self.ranks, state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the learner that gave `state` was; this one must have been made the same way.

        A head that may grow does so first, if the saved one had. PyTorch's global generators are put back as well, for
        the whole process.
        """
        with self._together("continue from a saved learner"):
            self._check_state(state)
        if self.head is not None:
            self.grow(len(state["model"][f"{self.head.name}.weight"]))
        if self.buffer is not None:
            self.buffer.load_state_dict(state["buffer"])
        if hasattr(self.optimizer, "load_state_dict"):
            # A copy: torch.optim keeps the tensors it is given, which may be another learner's own.
            self.optimizer.load_state_dict(deepcopy(state["optimizer"]["state"]))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(deepcopy(state["scheduler"]["state"]))
        self.model.load_state_dict(state["model"])
        if isinstance(self.optimizer, BfloatTwin):
            self.optimizer.refresh()
        self._restore_generators(state)  # last, in case something above draws from the global ones

    def save(self, path: Path | str, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint that replaces the one in the file `path` once it is whole.

        `extra` is kept with it: the position in the stream, metrics; numbers, texts, tensors, and dicts and lists of
        them. A model that is broken, see `check_finite`, raises and does not replace one that was not. Of several
        ranks, the first writes the whole; all return once it is there. Of a buffer in a folder, the checkpoint says
        which rows it consists of; the folder keeps those of the checkpoint written or loaded last, and of no other.
        """
        with self._together("check the model"):
            self.check_finite()
        state = {"learner": self.state_dict(), "extra": dict(extra or {})}
        with self._together("save a checkpoint"):
            if self.ranks is None or self.ranks.rank == 0:
                checkpoint.write(Path(path), "learner", state)
        if self.buffer is not None:
            self.buffer.commit(state["learner"]["buffer"])

    def load(self, path: Path | str) -> dict[str, Any]:
        """Continue from the checkpoint in the file `path`; returns the `extra` that was saved with it.

        It may be of any number of ranks, or of a learner without. Each rank reads it, so all must see the file.
        """
        with self._together("read a checkpoint"):
            state = checkpoint.read(Path(path), "learner").state
        try:
            self.load_state_dict(state["learner"])
            extra: dict[str, Any] = state["extra"]
        except HoldfastError:
            raise
        except checkpoint.NONSENSE as error:
            raise CheckpointError(
                f"{path} is whole, but not what such a learner saves: {error!r}. Part of it may have been taken over; "
                "make the learner anew."
            ) from error
        if self.buffer is not None:
            self.buffer.commit()
        return extra

    def _take(self, x: Nested, y: Nested) -> tuple[Nested, Nested]:
        """What `receive` does that needs no other rank."""
        if self.validate:
            checks.check_form(x, y, labels=self.loss is None)
        known = self.loss is not None  # what the targets are is between the caller and the loss
        given = y
        x = transform(lambda part: part.to(self.device), x)
        y = transform(lambda part: part.to(self.device), y) if known else y.to(self.device, torch.int64)
        if self.validate and self.buffer is not None:
            self.buffer.check(x, y)
        if not known and (self.validate or self.head is not None):
            self._expect(checks.largest_label(given))
        return x, y

    def _expect(self, label: int) -> None:
        """Let the head grow to the largest label; tell if it may lie beyond the outputs."""
        if self.head is not None and label >= self.head.outputs:
            checks.check_leap(label, self.head.outputs)
            self.grow(label + 1)
        outputs = self._outputs if self.head is None else self.head.outputs
        self._unsure = outputs is None or label >= outputs

    def _remember(self) -> None:
        """Copy what a forward pass moves, for `take_back`."""
        if not self._drawn_from:
            own = [self._view_generator(), None if self.buffer is None else self.buffer.generator]
            self._drawn_from += [each for each in own if each is not None]
            self._drawn_from += global_generators(self.device).values()
        kept = []
        for module in self._stateful:
            # Not what is large: that is a table rather than a statistic, and copying it every step would cost.
            found = [each for each in module._buffers.values() if each is not None]
            kept += [(each, each.clone()) for each in found if self._unsure or each.nbytes <= 2**20]
        self._before = kept, [(each, each.get_state()) for each in self._drawn_from]

    def _updated(self) -> list[Tensor]:
        """The parameters that the optimiser updates; others may hold gradients that nobody ever clears."""
        groups = getattr(self.optimizer, "param_groups", None)
        if groups is None:
            return list(self.model.parameters())
        return [parameter for group in groups for parameter in group["params"]]

    def _together(self, action: str) -> AbstractContextManager[object]:
        """What fails inside on one rank fails on all of them."""
        return nullcontext() if self.ranks is None else self.ranks.together(action)

    def _add_ranks(self, ranks: Ranks, state: dict[str, Any]) -> None:
        """Make `state` the same on all ranks: the first one's, with what is each rank's own beside it."""
        with ranks.together("read the learner") as meeting:
            meeting.form = f"views {'with' if 'augment' in state else 'without'} a generator"
        state["ranks"] = {"global": {kind: ranks.gather(each) for kind, each in state["global"].items()}}
        state["global"] = {kind: each[0] for kind, each in state["ranks"]["global"].items()}
        if "augment" in state:
            state["ranks"]["augment"] = ranks.gather(state["augment"])
            state["augment"] = state["ranks"]["augment"][0]

    def _restore_generators(self, state: dict[str, Any]) -> None:
        """Put the generators back; of several ranks, each its own."""
        restore_globally(state["global"], self.device)
        if (view := self._view_generator()) is not None:
            restore(view, state["augment"])
        if self.ranks is None:
            return
        saved = state.get("ranks", {})
        for kind, each in global_generators(self.device).items():
            self.ranks.restore(each, saved.get("global", {}).get(kind, [state["global"][kind]]))
        if view is not None:
            self.ranks.restore(view, saved.get("augment", [state["augment"]]))

    def _view_generator(self) -> torch.Generator | None:
        """The generator that decides augmentation, where the view has one."""
        generator = getattr(self.augment, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raise before anything is changed if `state` is of another learner."""
        if state["learner"] != type(self).__name__:
            raise UsageError(f"this is a {type(self).__name__}, but the saved learner is a {state['learner']}.")
        own = {
            "optimizer": hasattr(self.optimizer, "load_state_dict"),
            "scheduler": self.scheduler is not None,
            "buffer": self.buffer is not None,
            "augment": self._view_generator() is not None,
        }
        fitting.check_parts(state, own)
        check_globally(state["global"], self.device)
        if self.buffer is not None:
            self.buffer.check_state(state["buffer"])
        fitting.check_model(state["model"], self.model, self.head)
        if "optimizer" in state:
            fitting.check_optimizer(state["optimizer"], self.optimizer)
        if self.scheduler is not None:
            fitting.check_scheduler(state["scheduler"], self.scheduler)


def _versions(x: Nested) -> Any:
    """PyTorch's counts of what was done to each tensor in place. Those of inference mode have none, nor allow it."""
    if isinstance(x, Tensor):
        return None if x.is_inference() else x._version
    return [_versions(part) for part in leaves(x, "x").values()]


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


def refuse_options(config: RunConfig) -> None:
    """Raise if a method without a regularizer is given options of one: they would count for nothing."""
    for name, _ in config.options:
        raise UsageError(f"{config.method} has no regularizer, and so no option regularizer.{name}.")
