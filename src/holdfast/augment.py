"""Batched views, on the device: uint8 images -> float images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import UsageError
from holdfast.pure import pure

__all__ = ["CropFlip", "Normalize", "View"]

View = Callable[[Any], Any]
"""Stored minibatch -> what the network is shown; for images, (B, C, H, W) uint8 -> float."""


class Normalize:
    """Scales pixels to [0, 1], then (x - mean) / std per channel; without mean and std, scales only."""

    def __init__(self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> None:
        if (mean is None) != (std is None):
            raise UsageError("give both mean and std, or neither.")
        self.mean, self.std = mean, std
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """(B, C, H, W) float32."""
        if self.mean is None or self.std is None:
            # Converting bytes first and dividing in place takes half the time of dividing them directly.
            return images.float().div_(255) if images.dtype == torch.uint8 else images / 255
        scale, shift = self._on(images.device)
        return torch.addcmul(shift, images.float(), scale)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # Cached, because making a tensor from Python numbers waits for the GPU, which a step must not do.
        if device not in self._constants:
            mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (self.mean, self.std))
            self._constants[device] = (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)
        return self._constants[device]


class CropFlip:
    """Pads with zeros, crops and flips each image at random, then applies `normalize`.

    Padding comes before normalisation: padded pixels are black, not the mean.
    """

    def __init__(self, normalize: View, generator: torch.Generator, padding: int = 4) -> None:
        self.normalize, self.generator, self.padding = normalize, generator, padding

    def __call__(self, images: Tensor) -> Tensor:
        """(B, C, H, W) float32."""
        uniforms = torch.rand(3, len(images), 1, generator=self.generator, device=images.device)
        return self.render(images, uniforms)

    @pure
    def render(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """The view for random numbers `uniforms` (3, B, 1) in [0, 1): shift down, shift right, flip."""
        view: Tensor = self.normalize(self.crop_flip(images, uniforms))
        return view

    def crop_flip(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """The uint8 images, cropped and flipped; one gather instead of padding, cropping and flipping."""
        count, channels, height, width = images.shape
        shift = (uniforms[:2] * (2 * self.padding + 1)).long() - self.padding
        rows = torch.arange(height, device=images.device) + shift[0]
        columns = torch.arange(width, device=images.device)
        columns = torch.where(uniforms[2] < 0.5, width - 1 - columns, columns) + shift[1]
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
        source = source.view(count, 1, -1).expand(-1, channels, -1)
        return images.flatten(2).gather(2, source).view_as(images) * inside[:, None]
