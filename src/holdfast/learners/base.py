"""What every learner has: a model, an optimiser, a view of the data, and `observe`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast import checkpoint
from holdfast.augment import View
from holdfast.buffer import Reservoir
from holdfast.config import PRECISIONS, RunConfig
from holdfast.errors import UsageError
from holdfast.learners.descent import BfloatTwin, Optimizer
from holdfast.nested import Nested, rows, transform
from holdfast.ranks import Ranks
from holdfast.registry import Registry, unknown_name
from holdfast.regularizers import REGULARIZERS
from holdfast.rng import generator as seeded_generator
from holdfast.rng import global_generators, global_state, restore, restore_globally
from holdfast.sharded import ShardedReservoir

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

    A model in DistributedDataParallel makes this one learner of all ranks: each observes minibatches of its own, and
    together they have one buffer. Every rank calls the same methods at the same time. The buffer's size counts the
    samples of all ranks; sizes of draws, and the losses, are a rank's own. `model` is then the module inside, which one
    rank can use alone, and checkpoints are those of a learner without ranks.
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
        precision: str = "float32",
        validate: bool = True,
    ) -> None:
        self.network: Callable[[Any], Tensor] = model
        """What computes the model's output in a step: the model, its compiled form, or what spreads it over ranks."""
        self.model, self.optimizer = model, optimizer
        self.ranks: Ranks | None = None
        """The processes that learn together, if there are several."""
        if isinstance(model, DistributedDataParallel):
            self.model, self.ranks = model.module, Ranks(model.process_group)
        self.augment: View = augment or (lambda x: x)
        if precision not in PRECISIONS:
            raise unknown_name("precision", precision, list(PRECISIONS))
        self.validate = validate
        self.device = next(model.parameters()).device
        self._zero = torch.zeros((), device=self.device)
        self.reduced = precision == "bfloat16"

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

    def receive(self, x: Nested, y: Tensor) -> tuple[Nested, Tensor]:
        """The minibatch on the learner's device, its form checked."""
        if self.validate:
            count = rows(x)
            if y.dim() != 1 or len(y) != count:
                raise UsageError(f"{count} inputs need as many labels in one dimension, not shape {tuple(y.shape)}.")
            if count == 0:
                raise UsageError("a minibatch must have at least one sample.")
            if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
                raise UsageError(f"labels must be whole numbers that name classes, not {y.dtype}.")
        x, y = transform(lambda part: part.to(self.device), x), y.to(self.device, torch.int64)
        if self.validate and self.buffer is not None:
            self.buffer.check(x, y)
        return x, y

    def forward(self, x: Nested) -> Tensor:
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

    def state_dict(self) -> dict[str, Any]:
        """All that decides what the next steps do: model, optimiser, buffer, generators.

        Among the generators are PyTorch's global ones, of the CPU and of the model's device, from which layers such as
        dropout draw. As with PyTorch's, the tensors are the learner's own: save them, or copy them before learning on.
        A learner with more state than that extends this method and `load_state_dict`.
        """
        state: dict[str, Any] = {"learner": type(self).__name__, "model": dict(self.model.state_dict())}
        state["global"] = global_state(self.device)
        if hasattr(self.optimizer, "state_dict"):
            state["optimizer"] = {"type": type(self.optimizer).__name__, "state": self.optimizer.state_dict()}
        if self.buffer is not None:
            state["buffer"] = self.buffer.state_dict()
        if (generator := self._view_generator()) is not None:
            state["augment"] = generator.get_state()
        if self.ranks is not None:
            self._add_ranks(self.ranks, state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the learner that gave `state` was; this one must have been made the same way.

        PyTorch's global generators are put back as well, for the whole process.
        """
        with self._together("continue from a saved learner"):
            self._check_state(state)
        self._restore(state)
        if self.buffer is not None:
            self.buffer.load_state_dict(state["buffer"])
        if hasattr(self.optimizer, "load_state_dict"):
            # A copy: torch.optim keeps the tensors it is given, which may be another learner's own.
            self.optimizer.load_state_dict(deepcopy(state["optimizer"]["state"]))
        self.model.load_state_dict(state["model"])
        if isinstance(self.optimizer, BfloatTwin):
            self.optimizer.refresh()

    def save(self, path: Path | str, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint that replaces the one in the file `path` once it is whole.

        `extra` is kept with it: the position in the stream, a scheduler's state_dict; numbers, texts, tensors, and
        dicts and lists of them. Of several ranks, the first writes the whole; all return once it is there. Of a buffer
        in a folder, the checkpoint says which rows it consists of, and the folder keeps those of the checkpoint written
        or loaded last, of this one alone.
        """
        state = {"learner": self.state_dict(), "extra": dict(extra or {})}
        with self._together("save a checkpoint"):
            if self.ranks is None or self.ranks.rank == 0:
                checkpoint.write(Path(path), "learner", state)
        if self.buffer is not None:
            self.buffer.keep(state["learner"]["buffer"])

    def load(self, path: Path | str) -> dict[str, Any]:
        """Continue from the checkpoint in the file `path`; returns the `extra` that was saved with it.

        It may be of any number of ranks, or of a learner without. Each rank reads it, so all must see the file.
        """
        with self._together("read a checkpoint"):
            state = checkpoint.read(Path(path), "learner").state
        self.load_state_dict(state["learner"])
        if self.buffer is not None:
            self.buffer.keep()
        extra: dict[str, Any] = state["extra"]
        return extra

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

    def _restore(self, state: dict[str, Any]) -> None:
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
            "buffer": self.buffer is not None,
            "augment": self._view_generator() is not None,
        }
        for name, needed in own.items():
            if needed != (name in state):
                has, lacks = ("this", "the saved") if needed else ("the saved", "this")
                raise UsageError(f"{has} learner keeps state of its {name}, {lacks} one does not; make them alike.")
        if self.buffer is not None:
            self.buffer.check_state(state["buffer"])
        saved, forms = (
            {name: f"{tuple(value.shape)} {value.dtype}" for name, value in values.items() if isinstance(value, Tensor)}
            for values in (state["model"], self.model.state_dict())
        )
        differing = sorted(name for name in saved | forms if saved.get(name) != forms.get(name))
        if differing:
            name = differing[0]
            raise UsageError(
                f"the saved model does not fit this one: {name} is {saved.get(name, 'missing')} in the file and "
                f"{forms.get(name, 'missing')} here. Build the model as it was when saved."
            )
        self._check_optimizer(state.get("optimizer"))

    def _check_optimizer(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        if state["type"] != type(self.optimizer).__name__:
            raise UsageError(f"the saved optimiser is {state['type']}, this one {type(self.optimizer).__name__}.")
        groups = getattr(self.optimizer, "param_groups", [])
        saved, own = (
            [len(group["params"]) for group in each] for each in (state["state"].get("param_groups", []), groups)
        )
        if saved != own:
            raise UsageError(
                f"the saved optimiser does not fit this one: it updates groups of {saved} parameters, this one {own}. "
                "Build the optimiser as it was when saved."
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
