from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor


def natural_images(n: int, height: int, width: int, channels: int = 3, seed: int = 0) -> Tensor:
    """uint8 images with the spectrum of photographs (amplitude 1/f), correlated channels and one sharp-edged object."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    spectrum = 1 / np.maximum(frequency, 1 / max(height, width))

    def field(*lead: int) -> np.ndarray:
        noise = np.fft.ifft2(np.fft.fft2(rng.normal(size=(*lead, height, width))) * spectrum).real
        return noise / noise.std(axis=(-2, -1), keepdims=True)

    images = 0.45 + 0.18 * field(n, 1) + 0.08 * field(n, channels)
    top, left = height // 4, width // 3
    images[:, :, top : top + height // 3, left : left + width // 3] += rng.choice(
        [-0.25, 0.3], size=(n, channels, 1, 1)
    )
    return torch.from_numpy(np.round(255 * images.clip(0, 1)).astype(np.uint8))


@pytest.fixture(scope="session")
def photos() -> Tensor:
    return natural_images(48, 32, 32)
