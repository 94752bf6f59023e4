"""The two networks of the paper, and those of timm by name."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.errors import HoldfastError, UsageError
from holdfast.models.batchnorm import normalized_relu
from holdfast.nested import transform
from holdfast.registry import Registry

__all__ = [
    "MLP",
    "MODELS",
    "ResNet18",
    "by_keywords",
    "check_features",
    "copied",
    "count_outputs",
    "evaluating",
    "features",
    "is_pretrained",
    "last_layer",
    "preferred_threads",
    "seen_by",
]


class _Models(Registry[Callable[[tuple[int, ...], int], nn.Module]]):
    def __getitem__(self, name: str) -> Callable[[tuple[int, ...], int], nn.Module]:
        library, _, network = name.partition(":")
        return partial(_timm_network, network) if library == "timm" and network else super().__getitem__(name)


MODELS = _Models("model")
"""Constructors (shape of one input, number of classes) -> network. `timm:NAME` is the network NAME of timm, untrained.

A network has `features(x)`, which returns what its last linear layer sees, (B, D), and its `forward(x)` is that layer
applied to `features(x)`. It may have `stages(x)`, the features of its layers from first to last, and `widths`, the
channels of its input and of each of these layers.
"""


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
    """Collects what a layer is given inside the block."""
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
    """What such a model returns for inputs by name."""
    return network(**view) if isinstance(view, Mapping) else network(view)


def preferred_threads(name: str) -> int | None:
    """How many CPU threads the network `name` should train with; None leaves the choice to torch."""
    return getattr(MODELS[name], "threads", None)


def _timm_network(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # a torchvision made for another torch raises a RuntimeError
        remedy = "install the extra 'timm' (pip install 'holdfast[timm]')"
        raise HoldfastError(f"timm:{name} needs timm, which cannot be imported ({error}): {remedy}.") from error
    if len(shape) != 3:
        raise UsageError(f"timm:{name} takes images (channels, height, width), not samples of shape {shape}.")
    try:
        made: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=shape[0])
    except (RuntimeError, TypeError) as error:  # timm has no errors of its own
        raise UsageError(f"timm cannot make a network '{name}': {error}. timm.list_models() names all.") from error
    return made


@MODELS.register("mlp")
class MLP(nn.Module):
    """Two hidden layers of 100 ReLU units over the flattened input."""

    threads = 1
    """Its matrices are so small that a second CPU thread costs more time than it saves."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 100) -> None:
        super().__init__()
        self.widths = (prod(shape), width, width)
        self.hidden1 = nn.Linear(prod(shape), width)
        self.hidden2 = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)
        for layer in (self.hidden1, self.hidden2, self.classifier):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def stages(self, x: Tensor) -> list[Tensor]:
        """Both hidden layers, (B, width) each."""
        first = F.relu(self.hidden1(x.flatten(1)))
        return [first, F.relu(self.hidden2(first))]

    def features(self, x: Tensor) -> Tensor:
        """The second hidden layer, (B, width)."""
        return self.stages(x)[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes)."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = normalized_relu(self.bn1, self.conv1(x))
        return normalized_relu(self.bn2, self.conv2(out), self.shortcut(x))


@MODELS.register("resnet18")
class ResNet18(nn.Module):
    """ResNet-18 for small images: 3x3 stem, no max-pooling, global average pooling, one linear layer."""

    compiles = False
    """On a GPU nearly all its time is spent in large kernels: a compiler finds nothing to fuse."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.widths = (shape[0], *widths[1:])
        self.blocks = nn.Sequential()
        for stage, (inputs, outputs) in enumerate(pairwise(widths)):
            self.blocks.append(_Block(inputs, outputs, stride=1 if stage == 0 else 2))
            self.blocks.append(_Block(outputs, outputs, stride=1))
        self.classifier = nn.Linear(widths[-1], classes)

    def stages(self, x: Tensor) -> list[Tensor]:
        """The output of every second block, (B, channels, height, width) each."""
        maps, found = normalized_relu(self.bn, self.conv(x)), []
        for number, block in enumerate(self.blocks):
            maps = block(maps)
            if number % 2:
                found.append(maps)
        return found

    def features(self, x: Tensor) -> Tensor:
        """The last block's output, averaged over the image, (B, 8 * width)."""
        maps: Tensor = self.blocks(normalized_relu(self.bn, self.conv(x)))
        return maps.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes)."""
        logits: Tensor = self.classifier(self.features(x))
        return logits
