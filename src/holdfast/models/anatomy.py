"""What learners ask of any model, and do with it: its features, its last layer, its modes, and a way back."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.nested import transform

__all__ = [
    "by_keywords",
    "check_features",
    "copied",
    "count_outputs",
    "evaluating",
    "features",
    "is_pretrained",
    "last_layer",
    "seen_by",
    "way_back",
]


def features(model: nn.Module, x: Any) -> Tensor:
    """The features of `x`, (B, D), that the last linear layer of `model` sees, from the model's own `features`."""
    function, name = getattr(model, "features", None), type(model).__name__
    if not callable(function):
        raise UsageError(
            f"{name} has no method features(x). Add one that returns what its last linear layer sees, (B, D), and let "
            "forward(x) return that layer applied to self.features(x)."
        )
    found: Tensor = function(x)
    if found.dim() != 2:
        shape = tuple(found.shape)
        raise UsageError(f"features(x) of {name} has shape {shape}, not (B, D): pool and flatten there.")
    return found


@torch.no_grad()
def check_features(model: nn.Module, x: Any, answer: Callable[[Any], Tensor]) -> None:
    """Refuse a model whose outputs, which `answer` gives, are not its last linear layer applied to its features."""
    with evaluating(model):
        outputs, found = answer(transform(torch.clone, x)), features(model, x)  # both may work in place
        layer = last_layer(model)
        fits = found.shape[1] == layer.in_features and outputs.shape == (len(found), layer.out_features)
        if not fits or not torch.allclose(outputs, layer(found), rtol=1e-2, atol=1e-2):
            raise UsageError(
                f"forward(x) of {type(model).__name__} must return its last nn.Linear applied to features(x), as that "
                "layer is replaced. Register further layers before it, and let nothing come between the two."
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode inside the block; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]  # some may be frozen in evaluation mode
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def last_layer(model: nn.Module) -> nn.Linear:
    """The last linear layer of the model, which makes its outputs."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UsageError(f"{type(model).__name__} has no nn.Linear, so that its number of outputs is not known.")
    return layers[-1]


@contextmanager
def seen_by(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collects what the layer is given as input inside the block."""
    found: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    try:
        yield found
    finally:
        handle.remove()


def copied(model: nn.Module) -> nn.Module:
    """A copy of the model that no optimiser trains."""
    try:
        return deepcopy(model).requires_grad_(False)
    except RuntimeError as error:
        if "deepcopy protocol" not in str(error):
            raise
        raise UsageError(
            "this method copies the model, and a tensor that the model computes and keeps cannot be copied, such as "
            "the weight under torch.nn.utils.weight_norm: use torch.nn.utils.parametrizations.weight_norm."
        ) from error


def count_outputs(model: nn.Module) -> int:
    """How many outputs the model has: those of its last linear layer."""
    return last_layer(model).out_features


def is_pretrained(model: nn.Module) -> bool:
    """Whether this is a model of transformers, or one that peft put its layers into; neither is imported."""
    return any(kind.__name__ in ("PreTrainedModel", "PeftModel", "PeftMixedModel") for kind in type(model).__mro__)


def by_keywords(network: Callable[..., Any], view: Any) -> Any:
    """What the network returns; a dict reaches it as keyword arguments, as models of transformers expect."""
    return network(**view) if isinstance(view, Mapping) else network(view)


def way_back(
    modules: Iterable[nn.Module], generators: Iterable[torch.Generator], largest: float = inf
) -> Callable[[], None]:
    """A function that gives modules their buffers back, and generators their states, as all of them are now.

    Buffers of more than `largest` bytes are left out: copying them would take too long.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.nbytes <= largest
    ]
    states = [(generator, generator.get_state()) for generator in generators]

    def go_back() -> None:
        for module, name, buffer, before in buffers:
            buffer.copy_(before)
            module._buffers[name] = buffer  # a forward pass may have put another tensor in its place
        for generator, state in states:
            generator.set_state(state)

    return go_back
