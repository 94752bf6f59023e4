"""Turned images as further classes: a few stored images are then harder to learn by heart.

Lee, Hwang, Shin, "Self-supervised label augmentation via input transformations", ICML 2020.
"""

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.models import last_layer
from holdfast.nested import Nested
from holdfast.rng import generator

__all__ = ["TurnedClasses", "by_right_angles"]


class TurnedClasses(nn.Linear):
    """A layer beside the last one of a model: it gives the outputs of classes that are turned by right angles.

    Class c of C, turned by k right angles, is class c + k * C.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        last = last_layer(model)
        device, dtype = last.weight.device, torch.promote_types(last.weight.dtype, torch.float32)
        super().__init__(last.in_features, 3 * last.out_features, device=device, dtype=dtype)
        self.classes = last.out_features
        self.generator = generator(seed, "angles", device)

    def reset_parameters(self) -> None:
        """All zeros: as nothing is drawn, the model is the one it would be without this layer."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def turn(self, view: Nested, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each image of a view turned by one, two or three right angles, and its class then."""
        angles = torch.randint(1, 4, labels.shape, generator=self.generator, device=labels.device)
        return by_right_angles(view, angles), labels + self.classes * angles

    def complete(self, outputs: Tensor, features: Tensor) -> Tensor:
        """The outputs of all classes at all angles, (B, 4 C), given those of the model and what its last layer saw."""
        return torch.cat([outputs, self(features)], 1)


def by_right_angles(view: Nested, angles: Tensor) -> Tensor:
    """Each square image (B, channels, side, side) turned by so many right angles, 0 to 3, (B,)."""
    if not isinstance(view, Tensor) or view.dim() != 4 or view.shape[2] != view.shape[3]:
        raise UsageError("only square images can be turned: the network must see (B, channels, side, side).")
    every = torch.stack([view.rot90(angle, (2, 3)) for angle in range(4)])
    return every[angles, torch.arange(len(view), device=view.device)]
