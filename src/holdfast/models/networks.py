"""The two networks of the paper, and those of timm by name."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod

from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.errors import HoldfastError, UsageError
from holdfast.models.batchnorm import normalized_relu
from holdfast.registry import Registry

__all__ = ["MLP", "MODELS", "ResNet18"]


class _Models(Registry[Callable[[tuple[int, ...], int], nn.Module]]):
    def __getitem__(self, name: str) -> Callable[[tuple[int, ...], int], nn.Module]:
        library, _, network = name.partition(":")
        return partial(_timm_network, network) if library == "timm" and network else super().__getitem__(name)


MODELS = _Models("model")
"""Constructors (shape of one input, number of classes) -> network. `timm:NAME` is the network NAME of timm, untrained.

A network has `features(x)`, which returns what its last linear layer sees, (B, D), and its `forward(x)` is that layer
applied to `features(x)`. It may have `stages(x)`, the features of its layers from first to last, and `widths`, the
channels of its input and of each of these layers. `threads` is the number of CPU threads that suits it; without it,
torch decides.
"""


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
