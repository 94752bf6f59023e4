"""The two networks of the paper."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod

from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.models.batchnorm import normalized_relu
from holdfast.registry import Registry

__all__ = ["MLP", "MODELS", "ResNet18", "preferred_threads"]

MODELS: Registry[Callable[[tuple[int, ...], int], nn.Module]] = Registry("model")
"""Constructors (shape of one input, number of classes) -> network."""


def preferred_threads(name: str) -> int | None:
    """How many CPU threads the network `name` should train with; None leaves the choice to torch."""
    return getattr(MODELS[name], "threads", None)


@MODELS.register("mlp")
class MLP(nn.Module):
    """Two hidden layers of 100 ReLU units over the flattened input."""

    threads = 1
    """Its matrices are so small that a second CPU thread costs more time than it saves."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 100) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(prod(shape), width)
        self.hidden2 = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)
        for layer in (self.hidden1, self.hidden2, self.classifier):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes)."""
        hidden = F.relu(self.hidden1(x.flatten(1)))
        hidden = F.relu(self.hidden2(hidden))
        out: Tensor = self.classifier(hidden)
        return out


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
    """On a GPU all that counts is in large kernels already, and nothing is left for a compiler to fuse."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.Sequential()
        for stage, (inputs, outputs) in enumerate(pairwise(widths)):
            self.blocks.append(_Block(inputs, outputs, stride=1 if stage == 0 else 2))
            self.blocks.append(_Block(outputs, outputs, stride=1))
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes)."""
        features = self.blocks(normalized_relu(self.bn, self.conv(x))).mean(dim=(2, 3))
        out: Tensor = self.classifier(features)
        return out
