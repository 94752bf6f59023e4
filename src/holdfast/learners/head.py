"""A last layer that gets more outputs while learning goes on; what the optimiser keeps for it grows as well."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.learners.optimizers import Optimizer, PlainSgd, made_again
from holdfast.registry import unknown_name
from holdfast.rng import generator as seeded_generator

if TYPE_CHECKING:
    from holdfast.learners.base import Learner

__all__ = ["Head", "grow_head"]


class Head:
    """The nn.Linear of a model that gives its outputs."""

    def __init__(self, model: nn.Module, name: str, optimizer: Optimizer) -> None:
        """`name` is the layer's as in `model.named_modules()`; the optimiser must be one that can take new weights."""
        layers = {each: layer for each, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        if name not in layers:
            raise unknown_name("head (an nn.Linear of the model)", name, list(layers))
        self.name, self.layer = name, layers[name]
        for part in ("weight", "bias"):
            if part not in self.layer._parameters:
                raise UsageError(f"the {part} of '{name}' is computed from other parameters, so that it cannot grow.")
        self._check_shared(model)
        _groups(optimizer)

    def _check_shared(self, model: nn.Module) -> None:
        """Raise if another layer has a parameter of this one: it would not grow with it."""
        own = {id(each): part for part, each in self.layer.named_parameters(recurse=False)}
        for other, layer in model.named_modules():
            shared = [own[id(each)] for each in layer.parameters(recurse=False) if id(each) in own]
            if shared and layer is not self.layer:
                raise UsageError(
                    f"'{self.name}' shares its {shared[0]} with '{other}', so that it cannot grow: give it weights of "
                    "its own, or leave out head= and give it as many outputs as there will be classes."
                )

    @property
    def outputs(self) -> int:
        """How many outputs the layer has."""
        return self.layer.out_features

    def parameters(self) -> dict[str, nn.Parameter]:
        """The layer's own, by their names in the model."""
        return {f"{self.name}.{name}": each for name, each in self.layer.named_parameters(recurse=False)}

    def growth(self, outputs: int, optimizer: Optimizer, generator: torch.Generator) -> Callable[[], None]:
        """A function that adds outputs until there are so many: old ones stay, new ones begin as in a new nn.Linear.

        Whatever can fail does so here, where nothing has changed yet.
        """
        bound = self.layer.in_features**-0.5  # what nn.Linear begins with, weights and biases
        groups, states = _groups(optimizer), getattr(optimizer, "state", {})
        made = []
        for name, old in self.layer.named_parameters(recurse=False):
            rows = torch.empty(outputs - len(old), *old.shape[1:]).uniform_(-bound, bound, generator=generator)
            new = nn.Parameter(torch.cat([old.detach(), rows.to(old)]), requires_grad=old.requires_grad)
            if old.grad is not None:  # of minibatches before this one, whose update is still to come
                new.grad = torch.cat([old.grad, torch.zeros_like(rows).to(old.grad)])
            made.append((name, old, new, _state(optimizer, groups, old, new)))

        def grow() -> None:
            for name, old, new, state in made:
                setattr(self.layer, name, new)
                for group in groups:
                    group["params"][:] = [new if each is old else each for each in group["params"]]
                states.pop(old, None)
                if state:
                    states[new] = state
                old.grad = None
                if old.requires_grad:  # of losses whose backward pass is still to come
                    old.register_post_accumulate_grad_hook(partial(self._hand_on, name))  # type: ignore[no-untyped-call]
            self.layer.out_features = outputs

        return grow

    def _hand_on(self, name: str, old: Tensor) -> None:
        """Add the gradient of a parameter that the layer had before to that of the one it has now."""
        new = getattr(self.layer, name)
        assert old.grad is not None
        more = torch.zeros_like(new)
        more[: len(old)] = old.grad
        new.grad = more if new.grad is None else new.grad + more
        old.grad = None


def grow_head(learner: Learner, outputs: int) -> None:
    """`Learner.grow`: the head, what the optimiser keeps for it, the class weights and the stored logits."""
    if learner.head is None:
        raise UsageError('the head of this learner is fixed: name the last nn.Linear, as in head="classifier".')
    before = learner.head.outputs
    if outputs <= before:
        return
    # A generator of its own, made from the present number of outputs: nothing more to save.
    grow = learner.head.growth(outputs, learner.optimizer, seeded_generator(learner.seed, f"head {before}"))
    weights = learner.class_weights
    if weights is not None and len(weights) < outputs:
        weights = torch.cat([weights, weights.new_ones(outputs - len(weights))])
    if learner.buffer is not None:
        learner.buffer.widen(outputs)  # a full disk may prevent it, and then nothing has grown
    grow()
    learner.class_weights = weights
    if learner.on_grow is not None:
        learner.on_grow(learner)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Where the optimiser keeps its parameters, each time a list in "params"."""
    if type(optimizer) is PlainSgd:
        return [{"params": optimizer.parameters}]
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"an optimiser of type {type(optimizer).__name__} has no param_groups in which a grown head could take its "
            "old place; use one of torch.optim."
        )
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def _state(optimizer: Any, groups: list[dict[str, Any]], old: nn.Parameter, new: nn.Parameter) -> dict[str, Any]:
    """What the optimiser is to keep for `new`, to go on where it was with `old`; empty if it keeps nothing."""
    kept = getattr(optimizer, "state", {}).get(old)
    group = next((group for group in groups if any(each is old for each in group["params"])), None)
    if not kept or group is None:
        return {}
    try:
        return _extended(kept, _beginning(optimizer, group, new), old)
    except Exception as error:  # an optimiser may be anybody's, and do anything
        raise UsageError(
            f"the head cannot grow: what an optimiser of type {type(optimizer).__name__} would keep for a new "
            f"parameter could not be found out ({type(error).__name__}: {error}). Use one of torch.optim, or give the "
            "head as many outputs as there will be classes."
        ) from error


def _beginning(optimizer: Any, group: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """What the optimiser would keep for a new parameter: not always zeros, in Rprop for instance a step size.

    Found by a twin of the optimiser that makes one step of a parameter and a gradient of zeros.
    """
    stand_in = nn.Parameter(torch.zeros_like(like))
    stand_in.grad = torch.zeros_like(like)
    alone = {name: deepcopy(value) for name, value in group.items() if name != "params"} | {"params": [stand_in]}
    twin = _twin(optimizer)
    twin.state, twin.param_groups = defaultdict(dict), [alone]
    try:
        twin.step()
    except KeyError:  # some make it when they are made, such as Adagrad before torch 2.13
        twin = made_again(optimizer, alone, [stand_in])
    beginning: dict[str, Any] = twin.state[stand_in]
    return beginning


def _twin(optimizer: Any) -> Any:
    """A copy of the optimiser without its parameters, their state and its hooks.

    Not made by `copy`: torch.optim leaves out what a subclass adds. All is copied, since an attribute may be another
    optimiser, whose steps would move the model. `step` is left out: a scheduler's would make the original step.
    """
    twin = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "step")}
    own = {name: type(value)() if name.endswith("_hooks") else value for name, value in own.items()}
    vars(twin).update(deepcopy(own, {id(optimizer): twin}))
    return twin


def _extended(kept: dict[str, Any], beginning: dict[str, Any], old: Tensor) -> dict[str, Any]:
    """`kept`, with rows from `beginning` added to what has a row per output; all else, such as a count, as it is."""
    extended = dict(kept)
    for name, value in kept.items():
        start = beginning.get(name)
        if isinstance(value, Tensor) and isinstance(start, Tensor) and value.shape != start.shape:
            extended[name] = torch.cat([value, start[len(value) :]])
        elif isinstance(value, Tensor) and value.shape == old.shape and not isinstance(start, Tensor):
            raise ValueError(f"nothing says how its {name} begins")
    return extended
