"""Turned images as further classes: a few stored images are then harder to learn by heart.

Lee, Hwang, Shin, "Self-supervised label augmentation via input transformations", ICML 2020.
"""

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.learners.losses import widen
from holdfast.models import last_layer, seen_by
from holdfast.nested import Nested

__all__ = ["AtAllAngles", "TurnedClasses", "by_right_angles", "turn_images"]


class TurnedClasses(nn.Linear):
    """A layer beside the last one of a model: it gives the outputs of classes that are turned by right angles.

    Class c of C, turned by k right angles, is class c + k * C.
    """

    def __init__(self, model: nn.Module) -> None:
        last = last_layer(model)
        device, dtype = last.weight.device, torch.promote_types(last.weight.dtype, torch.float32)
        super().__init__(last.in_features, 3 * last.out_features, device=device, dtype=dtype)
        self.classes = last.out_features

    def reset_parameters(self) -> None:
        """All zeros: as nothing is drawn, the model is the one it would be without this layer."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def complete(self, outputs: Tensor, features: Tensor) -> Tensor:
        """The outputs of all classes at all angles, (B, 4 C), given those of the model and what its last layer saw."""
        if outputs.shape[1] != self.classes:
            raise UsageError(
                f"the model has {outputs.shape[1]} outputs, but its last nn.Linear has {self.classes}: register the "
                "layer that makes the outputs last."
            )
        return torch.cat([outputs, self(widen(features).flatten(1))], 1)


class AtAllAngles(nn.Module):
    """Answers with the mean, over four right angles, of a network's outputs for the classes of an image at that angle.

    `turned` has the outputs for turned classes; an image is (B, channels, side, side).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.turned = TurnedClasses(network).requires_grad_(False)

    def forward(self, view: Tensor) -> Tensor:
        """The mean of the outputs, (B, C)."""
        check_square(view)
        outputs = []
        for angle in range(4):
            with seen_by(last_layer(self.network)) as seen:
                straight = self.network(view.rot90(angle, (2, 3)))
            every = self.turned.complete(straight, torch.cat(seen))
            outputs.append(every.chunk(4, 1)[angle])
        return torch.stack(outputs).mean(0)


def turn_images(view: Nested, labels: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each image of a view turned by one, two or three right angles, and its class then."""
    angles = torch.randint(1, 4, labels.shape, generator=generator, device=labels.device)
    return by_right_angles(view, angles), labels + classes * angles


def by_right_angles(view: Nested, angles: Tensor) -> Tensor:
    """Each square image (B, channels, side, side) turned by so many right angles, 0 to 3, (B,)."""
    images = check_square(view)
    every = torch.stack([images.rot90(angle, (2, 3)) for angle in range(4)])
    return every[angles, torch.arange(len(images), device=images.device)]


def check_square(view: Nested) -> Tensor:
    """The view, if it holds square images."""
    if not isinstance(view, Tensor) or view.dim() != 4 or view.shape[2] != view.shape[3]:
        raise UsageError("only square images can be turned: the network must see (B, channels, side, side).")
    return view
