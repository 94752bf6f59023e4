"""A slow network whose features are multiplied, layer by layer, by those of fast layers."""

from itertools import pairwise
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.errors import UsageError
from holdfast.models.anatomy import count_outputs, features
from holdfast.models.batchnorm import group_batchnorm

__all__ = ["Adapted"]


class Adapted(nn.Module):
    """The network `slow` with fast layers: m_l = fast_l(m_(l-1)) * slow_l from m_0 = x; its last layer classifies m.

    A network with `stages(x)` and `widths`, see `MODELS`, has one fast layer for each stage. For any other there is one
    that takes the features of the slow network: m = fast(features) * features.
    """

    def __init__(self, slow: nn.Module) -> None:
        super().__init__()
        self.slow = slow
        count_outputs(slow)  # raises if there is no last layer
        self.name = [name for name, each in slow.named_modules() if isinstance(each, nn.Linear)][-1]
        self.staged = hasattr(slow, "stages") and hasattr(slow, "widths")
        widths: Any = slow.widths if self.staged else [self.classifier.in_features] * 2
        maps = self.staged and any(isinstance(each, nn.Conv2d) for each in slow.modules())
        self.fast = nn.ModuleList(_fast_layer(inputs, outputs, maps) for inputs, outputs in pairwise(widths))
        self.fast.to(self.classifier.weight.device, self.classifier.weight.dtype)

    @property
    def classifier(self) -> nn.Linear:
        """The last linear layer of the slow network, where it is registered."""
        return cast(nn.Linear, self.slow.get_submodule(self.name))

    def features(self, x: Tensor) -> Tensor:
        """The adapted features of the last layer, (B, D)."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise UsageError("fast layers need one tensor of floating-point numbers: let augment return one.")
        if not self.staged:
            found = features(self.slow, x)
            return cast(Tensor, self.fast[0](found) * found)
        network: Any = self.slow
        for fast, slow in zip(self.fast, network.stages(x), strict=True):
            found = fast(x.flatten(1)) if slow.dim() == 2 else F.adaptive_max_pool2d(fast(x), slow.shape[2:])
            x = found * slow
        return x if x.dim() == 2 else x.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes)."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


def _fast_layer(inputs: int, outputs: int, maps: bool) -> nn.Module:
    """For images, a convolution with BatchNorm; else a linear layer."""
    if not maps:
        return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
    return group_batchnorm(nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU()))
