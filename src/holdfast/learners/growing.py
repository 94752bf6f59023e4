"""A last layer that is given more outputs while learning goes on, and an optimiser that does not lose its place."""

from __future__ import annotations

from collections import defaultdict
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import UsageError
from holdfast.learners.descent import Optimizer, PlainSgd
from holdfast.registry import unknown_name

__all__ = ["Head"]


class Head:
    """The nn.Linear of a model that gives its outputs."""

    def __init__(self, model: nn.Module, name: str) -> None:
        """`name` is the layer's as in `model.named_modules()`."""
        layers = {each: layer for each, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        if name not in layers:
            raise unknown_name("head (an nn.Linear of the model)", name, list(layers))
        if isinstance(model, DistributedDataParallel):
            raise UsageError("the head of a model in DistributedDataParallel cannot grow: DDP keeps its first weights.")
        self.name, self.layer = name, layers[name]
        if "weight" not in self.layer._parameters:
            raise UsageError(f"the weight of '{name}' is computed from other parameters, so that it cannot grow.")

    @property
    def outputs(self) -> int:
        """How many outputs the layer has."""
        return self.layer.out_features

    def parameters(self) -> dict[str, nn.Parameter]:
        """The layer's own, by their names in the model."""
        return {f"{self.name}.{name}": each for name, each in self.layer.named_parameters(recurse=False)}

    def grow(self, outputs: int, optimizer: Optimizer, generator: torch.Generator) -> None:
        """Add outputs until there are so many. Old ones stay as they are, new ones begin as in a new nn.Linear."""
        bound = self.layer.in_features**-0.5  # what nn.Linear begins with, weights and biases
        for name, old in list(self.layer.named_parameters(recurse=False)):
            rows = torch.empty(outputs - len(old), *old.shape[1:]).uniform_(-bound, bound, generator=generator)
            new = nn.Parameter(torch.cat([old.detach(), rows.to(old)]), requires_grad=old.requires_grad)
            setattr(self.layer, name, new)
            _swap(optimizer, old, new)
        self.layer.out_features = outputs


def _swap(optimizer: Any, old: nn.Parameter, new: nn.Parameter) -> None:
    """Let the optimiser go on with `new` where it was with `old`."""
    if isinstance(optimizer, PlainSgd):
        optimizer.parameters[:] = [new if each is old else each for each in optimizer.parameters]
        return
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"an optimiser of type {type(optimizer).__name__} has no param_groups in which a grown head could take its "
            "old place; use one of torch.optim."
        )
    for group in optimizer.param_groups:
        if any(each is old for each in group["params"]):
            group["params"][:] = [new if each is old else each for each in group["params"]]
            if kept := optimizer.state.pop(old, None):
                optimizer.state[new] = _extended(kept, _beginning(optimizer, group, new))


def _beginning(optimizer: Any, group: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """What the optimiser would keep for a new parameter: not always zeros, in Rprop for instance a step size.

    Found by a copy of the optimiser that makes one step of a parameter and a gradient of zeros.
    """
    stand_in = nn.Parameter(torch.zeros_like(like))
    stand_in.grad = torch.zeros_like(like)
    alone = group | {"params": [stand_in]}
    twin = copy(optimizer)
    twin.state, twin.param_groups = defaultdict(dict), [alone]
    try:
        twin.step()
    except KeyError:  # some make it when they are made, such as Adagrad before torch 2.13
        known = signature(type(optimizer)).parameters
        twin = type(optimizer)(**{name: value for name, value in alone.items() if name in known})
    beginning: dict[str, Any] = twin.state[stand_in]
    return beginning


def _extended(kept: dict[str, Any], beginning: dict[str, Any]) -> dict[str, Any]:
    """`kept`, with rows from `beginning` added to what has a row per output; all else, such as a count, as it is."""
    extended = dict(kept)
    for name, value in kept.items():
        start = beginning.get(name)
        if isinstance(value, Tensor) and isinstance(start, Tensor) and value.shape != start.shape:
            extended[name] = torch.cat([value, start[len(value) :]])
    return extended
