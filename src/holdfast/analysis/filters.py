"""Batched image operations the corruptions are made of: on floats (N, C, H, W), on the device of the input.

Whatever is linear and separable (Gaussian blur, zoom, box resize) is a pair of small matrices, one for the rows and one
for the columns: exact at the borders, one fast product for the whole batch, and checked by looking at its row sums.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

__all__ = [
    "Border",
    "border_index",
    "box_matrix",
    "convolve",
    "disk_kernel",
    "displace",
    "gaussian_blur",
    "gaussian_matrix",
    "motion_blur",
    "plasma",
    "separable",
    "take",
    "uniform",
    "warp",
    "zoom_matrix",
]

Border = Literal["nearest", "reflect", "mirror"]
"""What lies outside an image a b c: a a|a b c|c c (nearest), b a|a b c|c b (reflect), c b|a b c|b a (mirror)."""


def uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    """Numbers drawn uniformly from [low, high), on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low


def separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Every image with `rows` (H_out, H) applied to its columns and `columns` (W_out, W) to its rows."""
    return rows.to(images.device) @ images @ columns.to(images.device).mT


def border_index(position: Tensor, size: int, border: Border) -> Tensor:
    """The pixel in 0..size-1 that stands for integer `position`, however far outside the image it lies."""
    if border == "nearest":
        return position.clamp(0, size - 1)
    # Both reflections repeat: with the edge pixel doubled every 2 * size, without every 2 * (size - 1) pixels.
    period, turn = (2 * size, 2 * size - 1) if border == "reflect" else (2 * size - 2, 2 * size - 2)
    position = position.remainder(period)
    return torch.minimum(position, turn - position)


@lru_cache(maxsize=128)
def gaussian_matrix(size: int, sigma: float, border: Border = "nearest", truncate: float = 4.0) -> Tensor:
    """The (size, size) matrix of a Gaussian blur along one axis; `sigma` in pixels, cut off at `truncate` sigmas."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return torch.eye(size)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    positions = border_index(torch.arange(size)[:, None] + offsets, size, border)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, positions, (weights / weights.sum()).expand(size, -1)).float()


def gaussian_blur(images: Tensor, sigma: float, border: Border = "nearest", truncate: float = 4.0) -> Tensor:
    """Images blurred with a Gaussian of `sigma` pixels."""
    height, width = images.shape[-2:]
    return separable(
        images,
        gaussian_matrix(height, sigma, border, truncate),
        gaussian_matrix(width, sigma, border, truncate),
    )


@lru_cache(maxsize=512)
def zoom_matrix(size: int, zoom: float) -> Tensor:
    """The (size, size) matrix that enlarges the middle of an axis `zoom` times (>= 1), linearly interpolated.

    The middle ceil(size / zoom) pixels are stretched, first on first and last on last, to their number times the zoom
    (rounded). The result is the middle `size` of those.
    """
    middle = ceil(size / zoom)
    stretched = round(middle * zoom)
    first, trim = (size - middle) // 2, (stretched - size) // 2
    positions = (torch.arange(size, dtype=torch.float64) + trim) * (middle - 1) / max(stretched - 1, 1)
    left = positions.floor().long().clamp(max=max(middle - 2, 0))
    share = positions - left
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix.scatter_add_(1, (first + left)[:, None], (1 - share)[:, None])
    matrix.scatter_add_(1, (first + left + 1).clamp(max=size - 1)[:, None], share[:, None])
    return matrix.float()


@lru_cache(maxsize=64)
def box_matrix(size: int, new_size: int) -> Tensor:
    """The (new_size, size) matrix of a box resize by Pillow's rule: the mean of the pixels centred inside the box."""
    ratio = size / new_size
    centres = (torch.arange(new_size, dtype=torch.float64)[:, None] + 0.5) * ratio
    distance = (torch.arange(size, dtype=torch.float64) + 0.5 - centres) / max(ratio, 1.0)
    # The box is open on one side, so that a pixel halfway between two boxes belongs to one of them.
    inside = ((distance > -0.5) & (distance <= 0.5)).double()
    return (inside / inside.sum(dim=1, keepdim=True)).float()


@lru_cache(maxsize=64)
def disk_kernel(radius: float, alias_sigma: float) -> Tensor:
    """A square kernel of sum 1: the pixels within `radius` of the centre, softened by a short Gaussian.

    The Gaussian reaches 1.5 sigmas and at least one pixel, which at 32 px is the 3 x 3 of the published recipe.
    """
    soft = max(1, round(1.5 * alias_sigma))
    reach = int(radius) + soft
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).double()
    taps = torch.arange(-soft, soft + 1, dtype=torch.float64)
    gaussian = torch.exp(-0.5 * (taps / alias_sigma) ** 2)
    gaussian = gaussian / gaussian.sum()
    kernel = F.conv2d(disk[None, None], torch.outer(gaussian, gaussian)[None, None], padding=soft)[0, 0]
    return (kernel / kernel.sum()).float()


def convolve(images: Tensor, kernel: Tensor, border: Border = "mirror") -> Tensor:
    """Every channel correlated with one square kernel of odd side."""
    n, channels, height, width = images.shape
    reach = kernel.shape[-1] // 2
    rows = border_index(torch.arange(-reach, height + reach, device=images.device), height, border)
    columns = border_index(torch.arange(-reach, width + reach, device=images.device), width, border)
    padded = images.index_select(2, rows).index_select(3, columns).flatten(0, 1).unsqueeze(1)
    return F.conv2d(padded, kernel.to(images)[None, None]).view(n, channels, height, width)


def take(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels (rows, columns), two integer tensors that broadcast to (N, H, W), of each image."""
    index = (rows * images.shape[-1] + columns).flatten(1).unsqueeze(1).expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, index).view_as(images)


def motion_blur(images: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """Images smeared to one side along a direction of their own, `degrees` (N,): 0 is horizontal.

    The weights fall like a Gaussian of `sigma` pixels from the pixel itself over at most 2 * radius pixels; positions
    along the line are rounded to whole pixels; the border repeats.
    """
    height, width = images.shape[-2:]
    # All taps past four sigmas together move a value by 1/50 of a grey level: not worth passes over the batch.
    taps = min(2 * ceil(radius), int(4 * sigma)) + 1
    weights = torch.exp(-0.5 * (torch.arange(taps, dtype=torch.float64) / sigma) ** 2)
    weights = weights / weights.sum()
    direction = torch.deg2rad(degrees)
    steps = torch.arange(taps, device=images.device)
    down = torch.ceil(steps * direction.sin()[:, None] - 0.5).long()
    right = torch.ceil(steps * direction.cos()[:, None] - 0.5).long()
    rows = (torch.arange(height, device=images.device) + down[:, :, None]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + right[:, :, None]).clamp(0, width - 1)

    blurred = images * weights[0]
    for tap in range(1, taps):
        blurred.add_(take(images, rows[:, tap, :, None], columns[:, tap, None, :]), alpha=float(weights[tap]))
    return blurred


def displace(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Each pixel replaced by the one `down` rows and `right` columns away (integers (N, H, W)); the edge repeats."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)[:, None] + down
    columns = torch.arange(width, device=images.device) + right
    return take(images, rows.clamp(0, height - 1), columns.clamp(0, width - 1))


def warp(images: Tensor, x: Tensor, y: Tensor, border: Literal["reflect", "mirror"]) -> Tensor:
    """Images sampled at pixel positions x (columns) and y (rows), each (N, H, W), linearly interpolated."""
    height, width = images.shape[-2:]
    mirror = border == "mirror"  # grid_sample turns at the pixel centres with align_corners, at their edges without.
    grid = (
        torch.stack((2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1), dim=-1)
        if mirror
        else torch.stack(((2 * x + 1) / width - 1, (2 * y + 1) / height - 1), dim=-1)
    )
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=mirror)


def plasma(n: int, size: int, decay: float, generator: Generator) -> Tensor:
    """Cloud-like noise (n, size, size) stretched to [0, 1] per image, by diamond-square on a torus.

    `size` is a power of two of 2 or more. The random part shrinks by decay**2 from one octave to the next: a larger
    `decay` gives smoother clouds.
    """
    cloud = torch.zeros(n, size, size, device=generator.device)
    step, amplitude = size, 1.0
    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        shape = tuple(corners.shape)

        def jitter(shape: tuple[int, ...] = shape, amplitude: float = amplitude) -> Tensor:
            return uniform(shape, -amplitude, amplitude, generator)

        pairs = corners + corners.roll(-1, 1)
        cloud[:, half::step, half::step] = (pairs + pairs.roll(-1, 2)) / 4 + jitter()
        centres = cloud[:, half::step, half::step]
        sides = corners + corners.roll(-1, 2) + centres + centres.roll(1, 1)
        cloud[:, ::step, half::step] = sides / 4 + jitter()
        sides = corners + corners.roll(-1, 1) + centres + centres.roll(1, 2)
        cloud[:, half::step, ::step] = sides / 4 + jitter()
        step, amplitude = half, amplitude / decay**2
    low, high = cloud.amin((1, 2), keepdim=True), cloud.amax((1, 2), keepdim=True)
    return (cloud - low) / (high - low)
