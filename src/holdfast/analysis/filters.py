"""Batched image operations the corruptions are made of: on floats (N, C, H, W), on the device of the input.

Gaussian blur, zoom and box resize act on rows and columns separately. Each is a pair of small matrices, one for each
axis: exact at the borders, and one fast product for the whole batch.
"""

from functools import lru_cache
from math import ceil
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

__all__ = ["Border", "box_matrix", "convolve", "disk_kernel", "gaussian_blur", "gaussian_matrix"]
__all__ += ["motion_blur", "plasma", "separable", "take", "uniform", "warp", "zoom_matrix"]

Border = Literal["nearest", "reflect", "mirror"]
"""What lies outside an image a b c: a a|a b c|c c (nearest), b a|a b c|c b (reflect), c b|a b c|b a (mirror)."""

_PADDING: dict[Border, Literal["edge", "symmetric", "reflect"]]
_PADDING = {"nearest": "edge", "reflect": "symmetric", "mirror": "reflect"}  # NumPy's names


def uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    """Numbers drawn uniformly from [low, high), on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low


def separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Every image with `rows` (H_out, H) applied to its columns and `columns` (W_out, W) to its rows."""
    return rows.to(images.device) @ images @ columns.to(images.device).mT


def _padded_index(size: int, reach: int, border: Border) -> Tensor:
    """The pixels 0..size-1 that stand for the positions -reach..size+reach-1."""
    return torch.from_numpy(np.pad(np.arange(size), reach, mode=_PADDING[border]))


@lru_cache(maxsize=128)
def gaussian_matrix(size: int, sigma: float, border: Border = "nearest", truncate: float = 4.0) -> Tensor:
    """The (size, size) matrix of a Gaussian blur along one axis; `sigma` in pixels, cut off at `truncate` sigmas."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return torch.eye(size)
    weights = torch.exp(-0.5 * (torch.arange(-radius, radius + 1).double() / sigma) ** 2)
    positions = _padded_index(size, radius, border).unfold(0, 2 * radius + 1, 1)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, positions, (weights / weights.sum()).expand(size, -1)).float()


def gaussian_blur(images: Tensor, sigma: float, border: Border = "nearest", truncate: float = 4.0) -> Tensor:
    """Images blurred with a Gaussian of `sigma` pixels."""
    rows, columns = (gaussian_matrix(size, sigma, border, truncate) for size in images.shape[-2:])
    return separable(images, rows, columns)


@lru_cache(maxsize=512)
def zoom_matrix(size: int, zoom: float) -> Tensor:
    """The (size, size) matrix that enlarges the middle of an axis `zoom` times (>= 1), linearly interpolated.

    The middle ceil(size / zoom) pixels are stretched, first on first and last on last, to their number times the zoom
    (rounded). The result is the middle `size` of those.
    """
    middle = ceil(size / zoom)
    stretched = round(middle * zoom)
    first, trim = (size - middle) // 2, (stretched - size) // 2
    pixels = torch.eye(middle, dtype=torch.float64)[None]
    weights = F.interpolate(pixels, stretched, mode="linear", align_corners=True)[0, :, trim : trim + size]
    return F.pad(weights.T, (first, size - middle - first)).float()


@lru_cache(maxsize=64)
def box_matrix(size: int, new_size: int) -> Tensor:
    """The (new_size, size) matrix of a box resize by Pillow's rule: the mean of the pixels centred inside the box."""
    ratio = size / new_size
    centres = (torch.arange(new_size, dtype=torch.float64)[:, None] + 0.5) * ratio
    distance = (torch.arange(size, dtype=torch.float64) + 0.5 - centres) / max(ratio, 1.0)
    # The box is open on one side: a pixel halfway between two boxes belongs to one of them.
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
    reach = kernel.shape[-1] // 2
    rows, columns = (_padded_index(size, reach, border).to(images.device) for size in images.shape[-2:])
    padded = images.index_select(2, rows).index_select(3, columns).flatten(0, 1).unsqueeze(1)
    return F.conv2d(padded, kernel.to(images)[None, None]).view_as(images)


def take(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels (rows, columns), two integer tensors that broadcast to (N, H, W), of each image; the edge repeats."""
    height, width = images.shape[-2:]
    index = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    index = index.flatten(1).unsqueeze(1).expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, index).view_as(images)


def motion_blur(images: Tensor, radius: float, sigma: float, degrees: Tensor) -> Tensor:
    """Images smeared to one side along a direction of their own, `degrees` (N,): 0 is horizontal.

    The weights fall like a Gaussian of `sigma` pixels from the pixel itself over at most 2 * radius pixels; positions
    along the line are rounded to whole pixels; the edge repeats.
    """
    height, width = images.shape[-2:]
    # The taps past four sigmas are left out: all of them together move a value by 1/50 of a grey level.
    taps = min(2 * ceil(radius), int(4 * sigma)) + 1
    weights = torch.exp(-0.5 * (torch.arange(taps, dtype=torch.float64) / sigma) ** 2)
    weights = weights / weights.sum()
    direction = torch.deg2rad(degrees)
    steps = torch.arange(taps, device=images.device)
    down = torch.ceil(steps * direction.sin()[:, None] - 0.5).long()
    right = torch.ceil(steps * direction.cos()[:, None] - 0.5).long()
    rows = torch.arange(height, device=images.device) + down[:, :, None]
    columns = torch.arange(width, device=images.device) + right[:, :, None]
    blurred = images * weights[0]
    for tap in range(1, taps):
        blurred.add_(take(images, rows[:, tap, :, None], columns[:, tap, None, :]), alpha=float(weights[tap]))
    return blurred


def warp(images: Tensor, x: Tensor, y: Tensor, border: Literal["reflect", "mirror"]) -> Tensor:
    """Images sampled at pixel positions x (columns) and y (rows), each (N, H, W), linearly interpolated."""
    height, width = images.shape[-2:]
    mirror = border == "mirror"  # grid_sample turns at the pixel centres with align_corners, at their edges without.
    if mirror:
        grid = torch.stack((2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1), dim=-1)
    else:
        grid = torch.stack(((2 * x + 1) / width - 1, (2 * y + 1) / height - 1), dim=-1)
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
        corners, centres = cloud[:, ::step, ::step], cloud[:, half::step, half::step]
        jitter = [uniform(tuple(corners.shape), -amplitude, amplitude, generator) for _ in range(3)]
        pairs = corners + corners.roll(-1, 1)
        centres.copy_((pairs + pairs.roll(-1, 2)) / 4 + jitter[0])
        sides = corners + corners.roll(-1, 2) + centres + centres.roll(1, 1)
        cloud[:, ::step, half::step] = sides / 4 + jitter[1]
        sides = corners + corners.roll(-1, 1) + centres + centres.roll(1, 2)
        cloud[:, half::step, ::step] = sides / 4 + jitter[2]
        step, amplitude = half, amplitude / decay**2
    low, high = cloud.amin((1, 2), keepdim=True), cloud.amax((1, 2), keepdim=True)
    return (cloud - low) / (high - low)
