"""Rotation of whole image sets at once; every pixel is the same as from Pillow's nearest-neighbour `rotate`."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["rotate", "rotate_each"]

Array = NDArray[Any]
_FIXED = 1 << 16  # Pillow computes source coordinates in fixed point with 16 binary places.


def rotate(images: Tensor, angle: float) -> Tensor:
    """All images (N, 1, S, S) uint8 turned counter-clockwise about their centre by `angle` degrees; black outside."""
    source, inside = _sources(images.shape[-1], np.array([angle]))
    gather = _gather_cpu if images.device.type == "cpu" else _gather
    return gather(images.flatten(1), source[0], inside[0]).view_as(images)


def rotate_each(images: Tensor, angles: Tensor, chunk: int = 4096) -> Tensor:
    """Image i of (N, 1, S, S) uint8 turned counter-clockwise by `angles[i]` degrees (N,); black outside."""
    flat = images.flatten(1).cpu().numpy()
    turned = np.empty_like(flat)
    for at in range(0, len(flat), chunk):
        part = slice(at, at + chunk)
        source, inside = _sources(images.shape[-1], angles[part].numpy())
        turned[part] = np.take_along_axis(flat[part], source, axis=1) * inside
    return torch.from_numpy(turned).view(images.shape).to(images.device)


def _gather(flat: Tensor, source: Array, inside: Array) -> Tensor:
    """The columns `source` of `flat` (N, S * S), black if not `inside`; on any device."""
    columns = flat.index_select(1, torch.from_numpy(source).to(flat.device))
    return columns.mul_(torch.from_numpy(inside).to(flat.device))


def _gather_cpu(flat: Tensor, source: Array, inside: Array) -> Tensor:
    """The same on a CPU, where NumPy's take() is four times as fast."""
    return torch.from_numpy(np.take(flat.numpy(), source, axis=1)).mul_(torch.from_numpy(inside))


def _sources(side: int, angles: Array) -> tuple[Array, Array]:
    """For each angle (K,) and target pixel: the source pixel, (K, side * side), and whether it lies inside."""
    matrices = np.array([_matrix(side, angle) for angle in angles])
    a0, a1, a2, a3, a4, a5 = np.moveaxis(matrices, 1, 0)[:, :, None]
    y, x = (axis.reshape(1, -1) for axis in np.mgrid[:side, :side])
    column = (a2 + y * a1 + x * a0) >> 16
    row = (a5 + y * a4 + x * a3) >> 16
    inside = (column >= 0) & (column < side) & (row >= 0) & (row < side)
    return np.where(inside, row * side + column, 0), inside.astype(np.uint8)


def _matrix(side: int, angle: float) -> list[int]:
    """The inverse rotation about the centre in fixed point, rounded exactly where Pillow rounds."""
    turn = -math.radians(angle % 360.0)
    cos, sin = round(math.cos(turn), 15), round(math.sin(turn), 15)
    centre = side / 2.0
    a2 = cos * -centre + sin * -centre + centre
    a5 = -sin * -centre + cos * -centre + centre
    # Pixel centres lie half a pixel in.
    return [
        math.floor(value * _FIXED + 0.5)
        for value in (cos, sin, a2 + cos * 0.5 + sin * 0.5, -sin, cos, a5 - sin * 0.5 + cos * 0.5)
    ]
