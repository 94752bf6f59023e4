"""What a learner is: a model, an optimiser, a buffer, and one method, `observe`, that learns from a minibatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from inspect import cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from holdfast.augment import View, takes_targets
from holdfast.buffer import Reservoir
from holdfast.config import RunConfig
from holdfast.errors import DivergenceError, HoldfastError, UsageError
from holdfast.learners.checks import check_model
from holdfast.learners.head import Head, grow_head
from holdfast.learners.losses import Losses, widen
from holdfast.learners.optimizers import Optimizer, clip_gradients, fitting, forget_gradients, gradients_of
from holdfast.learners.options import Options, ReplayOptions, check_class_weights, complete
from holdfast.learners.positions import Positions
from holdfast.learners.saving import load_state, networks_of, read_learner, state_of, write_learner
from holdfast.learners.transaction import Transaction
from holdfast.models import GroupedForward, by_keywords, is_pretrained
from holdfast.nested import Nested, concat, rows, transform
from holdfast.ranks import Meeting, Ranks

if TYPE_CHECKING:
    from holdfast.learners.making import Parts

__all__ = ["Learner"]


class Learner:
    """Base of all learners. A method says in `compute_losses` what one step descends; the rest is here.

    `observe(x, y)` is the whole step. In a loop of your own, take it apart: `losses = learner.losses(x, y)` moves no
    weight, then comes any backward pass on `losses.total` and any step of the optimiser, then `learner.commit(losses)`
    offers the minibatch to the buffer. `learner.descend(losses)` is the usual backward pass and step, with `clip` and
    `scheduler`; methods that change gradients need it.

    A method overrides, only where it needs to:

    - `compute_losses(x, y)`: the loss of a step, its terms (named in `terms`), and what to offer to the buffer;
    - `backward(losses)`: the gradients, where they are not simply those of the total;
    - `commit(losses)`: what follows the update, such as averaging weights;
    - `evaluated()`: the network that counts, where it is not the one that is trained; and `wrap(model, **settings)`
      where it has parts that the model does not have;
    - `own_state` or `extra_state()`: modules, tensors and generators of its own, which are saved and restored;
    - `begin_task(classes)` and `end_task(x, y)`: called where a stream has boundaries.

    Keyword arguments of its constructor are its settings: `--set decay=0.9` reaches `__init__(..., decay=0.9)`.

    A model in DistributedDataParallel makes this one learner of all ranks: each observes minibatches of its own, and
    together they have one buffer. Every rank calls the same methods at the same time; with `validate`, all refuse what
    one of them refuses. The buffer's size counts the samples of all ranks; sizes of draws, and the losses, are a rank's
    own. `model` is then the module inside, which one rank can use alone, and checkpoints are those of a learner without
    ranks. Its head cannot grow.
    """

    needs_buffer: ClassVar[bool] = False
    """Whether runs must say how many samples to store."""
    needs_boundaries: ClassVar[bool] = False
    """Whether the method only makes sense on a stream with task boundaries."""
    grows: ClassVar[bool] = True
    """Whether its head may grow. Methods with copies of the network, or with state for each class, are fixed."""
    uses_parameters: ClassVar[bool] = False
    """Whether the method computes with the model's parameters or their gradients. Engines then train no copy."""
    capturable: bool = True
    """Whether a step is graph-safe. If not, it runs eagerly on a GPU, and may wait for values from the device."""
    all_at_once: ClassVar[bool] = False
    """Whether runs give this learner all tasks' data at once."""
    learns_mixtures: ClassVar[bool] = False
    """Whether `augment` may change targets, as mixup does: the method uses those that `show` gives, and no others."""
    takes_positions: ClassVar[bool] = False
    """Whether a sample may have classes at many positions: the method leaves outputs to `criterion` and `compare`."""
    terms: ClassVar[tuple[str, ...]] = ("current", "replay", "consistency")
    """Names of the loss terms, in the order in which they are shown."""
    passes: tuple[tuple[int, int], ...] = ((1, 1),)
    """The passes of its steps through the network, each as (how many minibatches are in it, how many groups BatchNorm
    makes of them). A GPU's kernels for these are compiled while a run is set up; for others, in the step itself."""
    own_state: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that `extra_state` gives: modules, tensors and generators of the method."""
    buffer: Reservoir | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__doc__:  # there is none under python -OO
            shared = [ReplayOptions, Options] if cls.needs_buffer else [Options]
            cls.__doc__ = "\n\n".join(cleandoc(each.__doc__ or "") for each in (cls, *shared))

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Unpack[Options]) -> None:
        given = complete(options, type(self))
        self.network: Callable[[Any], Tensor] = given["network"] or model
        """What computes the model's outputs in a step: the model, or what compiles it or spreads it over ranks."""
        # torch.compile wraps a model; the one inside has the names that checkpoints and `head` use.
        self.model, self.optimizer = getattr(model, "_orig_mod", model), optimizer
        self.ranks: Ranks | None = None
        """The processes that learn together, if there are several."""
        if isinstance(model, DistributedDataParallel):
            self.model, self.ranks = model.module, Ranks(model.process_group)
        check_model(self.model, optimizer)
        self.device = next(model.parameters()).device
        self.augment: View = given["augment"] or (lambda x: x)
        self.changes_targets = takes_targets(self.augment)
        """Whether `augment` gets and returns targets as well."""
        self.loss, self.clip, self.seed, self.validate = given["loss"], given["clip"], given["seed"], given["validate"]
        self.precision = given["precision"]
        self.class_weights = check_class_weights(given["class_weights"], self.device)
        self.scheduler = fitting(given["scheduler"], optimizer)
        # ReduceLROnPlateau, for instance, wants to be told the loss.
        self._schedules_by_loss = self.scheduler is not None and "metrics" in signature(self.scheduler.step).parameters
        if given["head"] is not None and self.ranks is not None:
            raise UsageError(
                "a model in DistributedDataParallel cannot grow its head: it would not notice the new parameters. "
                "Give the head as many outputs as there will be classes."
            )
        self.head = None if given["head"] is None else Head(self.model, given["head"], optimizer)
        self.on_grow = given["on_grow"]
        self.positions = None if given["class_dim"] is None else Positions(given["class_dim"], given["mask"])
        """Where outputs have classes at many positions of a sample; None if they are (samples, classes)."""
        if self.positions is not None:
            self.capturable = False  # how many positions count is known to the device alone
        self.call = given["call"] or (by_keywords if is_pretrained(self.model) else None)
        self.take_outputs = given["outputs"]
        self.labelled = self.loss is None or self.head is not None or self.positions is not None
        """Whether targets are class labels, and not something that only a loss of one's own understands."""
        self._groups = GroupedForward(self.model)
        self.alone = False
        """Whether the losses that are computed now are committed before any others are computed, see `losses`."""
        self._transaction = Transaction(self)

    def __repr__(self) -> str:
        buffer = "" if self.buffer is None else f", {self.buffer.stored} of {self.buffer.capacity} samples stored"
        return f"{type(self).__name__}({type(self.model).__name__}, {type(self.optimizer).__name__}{buffer})"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a learner cannot be pickled. Write it with learner.save(path), and load(path) into one that is made the "
            "same way; copy.deepcopy(learner) copies it."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = object.__new__(type(self))
        vars(made).update(deepcopy(vars(self), memo))
        made._transaction = Transaction(made)  # of the copy's own parts, and of this process's generators
        return made

    # --- one step ----------------------------------------------------------------------------------------------------

    def observe(self, x: Nested, y: Nested = None) -> Losses:
        """Learn from one minibatch: inputs `x` (B, ...) as they are to be stored, labels `y` (B,).

        `x` is a tensor, or dicts, tuples and lists of tensors; `augment` and the model get it in the same form.
        """
        self._transaction.check_caller()
        losses = self.losses(x, y, alone=True)
        self.descend(losses)
        self.commit(losses)
        return losses.detach()

    def losses(self, x: Nested, y: Nested = None, *, alone: bool = False, reserve: bool = True) -> Losses:
        """The losses of one minibatch, checked and differentiable; no weight moves and nothing is stored yet.

        `commit` stores the samples: until then, leave `x` and `y` as they are.

        `alone` promises that these losses are committed or dropped before the next ones are computed, as they are
        without accumulation. Then nothing is made ready for the buffer that it will not store. With `reserve=False`,
        `reserve` is called later, when the backward pass keeps the device busy, but before the weights move.
        """
        minibatch = self._transaction.begin(x, y)
        self.alone = alone
        try:
            losses: object = self.compute_losses(*minibatch)  # the class of a user may return anything
            if not isinstance(losses, Losses):
                found = type(losses).__name__
                raise UsageError(f"compute_losses of {type(self).__name__} must return Losses, not a {found}.")
        except BaseException:
            self._transaction.roll_back()
            raise
        finally:
            self.alone = False
        self._transaction.approve(losses, reserve)
        return losses

    def reserve(self, losses: Losses) -> None:
        """Take the room in the buffer that `commit` needs; if there is not enough, undo the forward pass and raise."""
        self._transaction.reserve(losses)

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """What the step descends, its terms, and what it offers to the buffer. `x` and `y` are on the device."""
        raise NotImplementedError(f"{type(self).__name__} needs a method compute_losses(x, y) that returns Losses.")

    def descend(self, losses: Losses | Tensor, optimizer: Optimizer | None = None) -> None:
        """One step along the gradient of the loss; by `optimizer` if the learner's own is wrapped in another."""
        losses = losses if isinstance(losses, Losses) else Losses(losses)
        try:
            with nullcontext() if self.ranks is None else self.ranks.waiting():  # backward sums gradients over them
                gradients = self.backward(losses)
        except BaseException:
            self._transaction.roll_back()
            raise
        self._transaction.close()
        losses.descended = True
        if self.clip is not None and gradients:
            clip_gradients(gradients, self.clip)
        (optimizer or self.optimizer).step()
        if self.scheduler is not None:
            self.scheduler.step(*([losses.total.detach()] if self._schedules_by_loss else []))

    def backward(self, losses: Losses) -> list[Tensor]:
        """Compute the gradients; returns those that the optimiser will apply, which may still be changed in place."""
        return self.gradients(losses.total)

    def commit(self, losses: Losses) -> None:
        """Finish the step after the update: offer the minibatch to the buffer."""
        if type(self).backward is not Learner.backward and not losses.descended:
            raise UsageError(
                f"{type(self).__name__} changes gradients: use observe, or learner.descend(losses) in place of a "
                "backward pass and a step of the optimiser."
            )
        self._transaction.close()
        if losses.offer is not None and self.buffer is not None:
            self.buffer.add(*losses.offer.arguments)

    # --- what a method computes with ---------------------------------------------------------------------------------

    def view(self, *inputs: Nested) -> Nested:
        """What the network is shown of these inputs, as one minibatch in new memory: augment may work in place."""
        return self.augment(concat(inputs))

    def show(self, inputs: Sequence[Nested], targets: Sequence[Nested]) -> tuple[Nested, Nested]:
        """The view of these inputs as one minibatch, and its targets, which `augment` may have changed."""
        wanted = [self.targets(x, y) for x, y in zip(inputs, targets, strict=True)]
        if self.changes_targets:
            labels = concat(wanted)
            view, changed = self.augment(concat(inputs), labels)  # new memory: it may work in place
            if self.positions is not None:
                self.positions.check_changed(changed, tuple(labels.shape))
            return view, changed
        return self.view(*inputs), wanted[0] if len(wanted) == 1 else concat(wanted)

    def learn_alone(self, x: Nested, y: Nested) -> tuple[Tensor, Tensor]:
        """The outputs for a minibatch, which are checked against its labels, and its loss."""
        view, targets = self.show([x], [y])
        outputs = self.forward(view)
        self.check_labels(y, outputs)
        return outputs, self.criterion(outputs, targets)

    def forward(self, view: Nested, network: Callable[[Any], Any] | None = None) -> Tensor:
        """The outputs for a view, in float32 or wider; of another `network` than the learner's, if one is given."""
        try:
            with self.autocast():
                return widen(self.answer(view, network))
        except (RuntimeError, ValueError, IndexError) as error:
            self._transaction.explain(error, view)

    def answer(self, view: Nested, network: Callable[[Any], Any] | None = None) -> Tensor:
        """What a network answers, called as the options `call` and `outputs` say."""
        network = network or self.network
        returned = network(view) if self.call is None else self.call(network, view)
        outputs = returned if self.take_outputs is None else self.take_outputs(returned)
        if not isinstance(outputs, Tensor):
            outputs = getattr(outputs, "logits", None)
        if not isinstance(outputs, Tensor):
            raise UsageError(
                f"the model returns a {type(returned).__name__}; a learner needs one tensor. "
                "Say where it is, as in outputs=lambda returned: returned['scores']."
            )
        return outputs

    def forward_groups(self, *inputs: Nested, widened: bool = True) -> list[Tensor]:
        """The outputs for each minibatch of inputs, with BatchNorm statistics of its own; `widened` as in `forward`."""
        return self.forward_parts(self.view(*inputs), [rows(part) for part in inputs], widened=widened)

    def forward_parts(
        self,
        view: Nested,
        sizes: Sequence[int],
        *,
        network: Callable[[Any], Tensor] | None = None,
        widened: bool = True,
    ) -> list[Tensor]:
        """The outputs for consecutive parts of a view, of these sizes; each has BatchNorm statistics of its own.

        `network` is called in place of the model if the learner needs more of the same pass than the model returns.
        """
        try:
            with self.autocast():
                outputs = self._groups(view, sizes, network or self.answer)
        except (RuntimeError, ValueError, IndexError) as error:
            self._transaction.explain(error, view)
        return [widen(each) for each in outputs] if widened else outputs

    def gradients(self, loss: Tensor, *, every: bool = False) -> list[Tensor]:
        """The gradients of a loss in the optimiser's parameters; the next call overwrites them.

        With `every`, also zeros for parameters that the loss does not depend on: gradients of two losses then match.
        """
        forget_gradients(self.optimizer)
        loss.backward()  # type: ignore[no-untyped-call]
        return gradients_of(self.optimizer, self.model, every=every)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision in which the network computes."""
        reduced = self.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16) if reduced else nullcontext()

    def criterion(self, outputs: Tensor, targets: Nested) -> Tensor:
        """The mean loss of a minibatch: cross-entropy, or the loss that was given instead."""
        weights = None if self.class_weights is None else self.class_weights.to(outputs.dtype)
        if self.positions is not None:
            return self.positions.mean(outputs, targets, self.loss, weights)
        if self.loss is None:
            return F.cross_entropy(outputs, targets, weights)
        return self.loss(outputs.clone(), transform(torch.clone, targets))  # it may work in place, and both are stored

    def targets(self, x: Nested, y: Nested) -> Nested:
        """The targets of a loss; -100 where the learner's mask says that a position does not count."""
        return y if self.positions is None else self.positions.labels(x, y)

    def check_labels(self, y: Tensor, outputs: Tensor) -> None:
        """Refuse labels that name none of the outputs. Call it before cross-entropy of the current minibatch."""
        self._transaction.check_labels(y, outputs)

    def refuse(self, error: HoldfastError) -> NoReturn:
        """Raise `error` from within `compute_losses`; the learner is as it was before the step."""
        self._transaction.refuse(error)

    def together(self, action: str) -> AbstractContextManager[Meeting]:
        """What fails inside on one rank fails on all of them."""
        return nullcontext(Meeting()) if self.ranks is None else self.ranks.together(action)

    # --- what a method may add ---------------------------------------------------------------------------------------

    def evaluated(self) -> nn.Module:
        """The network that is tested, analysed and exported."""
        return self.model

    def extra_state(self) -> dict[str, nn.Module | Tensor | torch.Generator]:
        """What the method has besides model, optimiser, scheduler and buffer; restored in place."""
        return {name: getattr(self, name) for name in self.own_state}

    def task_samples(self, x: Nested, y: Nested) -> tuple[Nested, Nested]:
        """What `end_task` is given, checked and brought to the device as a minibatch is."""
        return self._transaction.admit(x, y)

    def begin_task(self, classes: tuple[int, ...]) -> None:
        """A task of these classes begins."""

    def end_task(self, x: Tensor, y: Tensor) -> None:
        """The task whose training samples these are has ended."""

    # --- growing and saving ------------------------------------------------------------------------------------------

    def grow(self, outputs: int) -> None:
        """Give the head so many outputs, if it has fewer. New classes weigh 1 where there are `class_weights`."""
        grow_head(self, outputs)

    def check_finite(self) -> None:
        """Raise if a weight is no longer finite, or a buffer such as BatchNorm's has become NaN.

        Of the model and of the method's own networks, for instance its average.
        """
        broken = []
        for part, network in networks_of(self).items():
            broken += [part + name for name, value in network.named_parameters() if not value.isfinite().all()]
            broken += [part + name for name, value in network.named_buffers() if value.isnan().any()]
        if broken:
            raise DivergenceError(
                f"the model is broken: {broken[0]} is no longer finite. Go back to the last checkpoint, and try a "
                "smaller learning rate or clip=1.0."
            )

    @property
    def view_generator(self) -> torch.Generator | None:
        """The generator that decides augmentation, where the view has one."""
        generator = getattr(self.augment, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def state_dict(self) -> dict[str, Any]:
        """All that decides what the next steps do: model, optimiser, scheduler, buffer, generators.

        Among the generators are PyTorch's global ones, of the CPU and of the model's device, from which layers such as
        dropout draw. As with PyTorch's, the tensors are the learner's own: save them, or copy them before learning on.
        """
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the learner that gave `state` was; this one must have been made the same way.

        A head that may grow does so first, if the saved one had. PyTorch's global generators are put back as well, for
        the whole process.
        """
        load_state(self, state)

    def save(self, path: Path | str, extra: Mapping[str, Any] | None = None, *, trainable_only: bool = False) -> None:
        """Write a checkpoint that replaces the one in the file `path` once it is whole.

        `extra` is saved with it: the position in the stream, metrics; numbers, texts, tensors, and dicts and lists of
        them. A model that is broken, see `check_finite`, raises and does not replace one that was not. Of several
        ranks, the first writes the whole; all return once it is there. Of a buffer in a folder, the checkpoint lists
        the rows it consists of; the folder retains those of the last checkpoint written or loaded, and of no other.

        With `trainable_only`, frozen weights are not written, as for LoRA: `load` then needs a learner whose model has
        them already, and refuses one whose frozen weights have other names or shapes. A copy of the model, such as an
        average, is written without those of its frozen weights that equal the model's bit for bit.
        """
        write_learner(self, Path(path), dict(extra or {}), trainable_only)

    def load(self, path: Path | str) -> dict[str, Any]:
        """Continue from the checkpoint in the file `path`; returns the `extra` that was saved with it.

        It may be of any number of ranks, or of a learner without. Each rank reads it, so all must see the file.
        """
        return read_learner(self, Path(path))

    # --- runs --------------------------------------------------------------------------------------------------------

    @classmethod
    def wrap(cls, model: nn.Module, **settings: Any) -> nn.Module:
        """A network of the form that `evaluated` has, around `model`; the weights of a run are loaded into it.

        `settings` are those of the run that belong to the method.
        """
        return model

    @classmethod
    def arguments(cls, config: RunConfig) -> dict[str, Any]:
        """The arguments of the constructor that follow from a run's config, besides the method's own settings."""
        return {}

    @classmethod
    def from_config(cls, config: RunConfig, parts: Parts) -> Self:
        """The learner of a run."""
        given = cls.arguments(config) | dict(config.settings)
        if cls.needs_buffer:
            given |= {"buffer_size": config.buffer_size, "generator": parts.generator}
        return cls(
            parts.model,
            parts.optimizer,
            **given,
            augment=parts.view,
            network=parts.network,
            scheduler=parts.scheduler,
            precision=config.precision,
            validate=False,
            seed=config.seed,
        )
