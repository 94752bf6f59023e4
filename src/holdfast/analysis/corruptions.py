"""Common image corruptions at five severities, batched, seeded, on the device of the images.

The fifteen of the CIFAR-10-C benchmark in four categories (noise, blur, weather, digital) and its extra four. The
strengths are those published for 32 px images. For other sizes, every length in pixels (blur radii and sigmas, shifts,
the zoom of snowflakes) is multiplied by min(height, width) / 32; noise, colours, relative zooms and qualities stay.

All of them differ from the published files in two ways: results are rounded to the nearest level, there they are cut
off, and the random draws are ours. Where a recipe itself differs (frost, spatter), its docstring says so.

A new corruption is one decorated function; see `corruption`.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import Any, Literal, TypeVar
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from holdfast.analysis import filters
from holdfast.errors import UsageError
from holdfast.registry import Registry

__all__ = ["BENCHMARK_CORRUPTIONS", "CATEGORIES", "CORRUPTIONS", "EXTRA_CORRUPTIONS", "SEVERITIES"]
__all__ += ["Category", "Corruption", "contact_sheet", "corrupt", "corruption"]

Category = Literal["noise", "blur", "weather", "digital", "extra"]
CATEGORIES: tuple[Category, ...] = ("noise", "blur", "weather", "digital", "extra")
SEVERITIES = (1, 2, 3, 4, 5)

Level = TypeVar("Level")
Distortion = Callable[[Tensor, Level, Generator], Tensor]
"""(float images in [0, 1], the strength at this severity, generator) -> float images; values outside are clipped."""

LUMA = (0.299, 0.587, 0.114)
REFERENCE_SIDE = 32
# A chunk fits the processor's cache. It also decides which draws an image gets: changing it changes every result.
CHUNK_IMAGES = 128
CHUNK_PIXELS = CHUNK_IMAGES * REFERENCE_SIDE**2


@dataclass(frozen=True)
class Corruption:
    """A named corruption. Call it with uint8 images (N, C, H, W), a severity in 1..5 and a generator on their device.

    It returns new uint8 images of the same shape. An image depends on its own pixels and draws, not on other images.
    """

    name: str
    category: Category
    levels: Sequence[Any]
    """Its strengths at severities 1 to 5."""
    distort: Distortion[Any]
    needs_colour: bool = False
    """Whether it is undefined for grey images."""

    def __call__(self, images: Tensor, severity: int, generator: Generator) -> Tensor:
        """The images, corrupted."""
        self.check(images, severity)
        distorted = self.distort(images.float().div_(255), self.levels[severity - 1], generator)
        return distorted.mul(255).round_().clamp_(0, 255).to(torch.uint8)

    def check(self, images: Tensor, severity: int) -> None:
        """Raise a UsageError unless these images can be corrupted at this severity."""
        if images.dtype != torch.uint8:
            raise UsageError(f"images must be uint8 with levels 0..255, got {images.dtype}: convert them first.")
        if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[-2:]) < 2:
            expected = "(N, C, H, W) with 1 or 3 channels and at least 2 x 2 pixels"
            raise UsageError(f"images must be {expected}, got {tuple(images.shape)}.")
        if self.needs_colour and images.shape[1] != 3:
            raise UsageError(f"corruption '{self.name}' needs colour images (3 channels), got {images.shape[1]}.")
        if severity not in SEVERITIES:
            raise UsageError(f"severity must be one of 1, 2, 3, 4, 5, got {severity!r}.")


CORRUPTIONS: Registry[Corruption] = Registry("corruption")


def corruption(
    name: str, category: Category, levels: Sequence[Level], *, needs_colour: bool = False
) -> Callable[[Distortion[Level]], Distortion[Level]]:
    """A decorator that registers a function of (float images in [0, 1], strength, generator) as a corruption.

    `levels` are its strengths at severities 1 to 5. Checks, conversion from and to uint8 and clipping are done for it.
    """
    if category not in CATEGORIES:
        raise UsageError(f"category of corruption '{name}' must be one of {', '.join(CATEGORIES)}, got '{category}'.")
    if len(levels) != len(SEVERITIES):
        raise UsageError(f"corruption '{name}' needs {len(SEVERITIES)} levels, one per severity, got {len(levels)}.")

    def register(function: Distortion[Level]) -> Distortion[Level]:
        description = (function.__doc__ or "").strip().partition("\n")[0]
        CORRUPTIONS.register(name, description)(Corruption(name, category, levels, function, needs_colour))
        return function

    return register


def corrupt(images: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """uint8 images (N, C, H, W) with the corruption `name` at `severity` 1..5, on their device, as new uint8 images.

    C is 1 or 3, H and W at least 2. Image i of the result depends on its own pixels, its position i, the name, the
    severity, the seed and the kind of device. It does not depend on the other images or on their number. Works in
    chunks: memory beyond the result stays at some tens of MB.

    >>> grey = torch.full((2, 3, 8, 8), 128, dtype=torch.uint8)
    >>> corrupt(grey, "brightness", severity=4)[0, :, 0, 0]
    tensor([179, 179, 179], dtype=torch.uint8)
    """
    apply = CORRUPTIONS[name]
    apply.check(images, severity)
    if seed < 0:
        raise UsageError(f"seed must be 0 or more, got {seed}.")
    chunk = min(CHUNK_IMAGES, max(1, CHUNK_PIXELS // (images.shape[-2] * images.shape[-1])))
    corrupted = torch.empty_like(images)
    for index, start in enumerate(range(0, len(images), chunk)):
        part = images[start : start + chunk]
        # A short last chunk is filled up: its images then get the draws they would get in a longer batch.
        full = torch.cat((part, part.new_zeros(chunk - len(part), *part.shape[1:])))
        entropy = np.random.SeedSequence([seed, crc32(name.encode()), severity, index]).generate_state(1, np.uint64)
        generator = torch.Generator(images.device).manual_seed(int(entropy[0] >> np.uint64(1)))
        corrupted[start : start + chunk] = apply(full, severity, generator)[: len(part)]
    return corrupted


def _scale(x: Tensor) -> float:
    return min(x.shape[-2:]) / REFERENCE_SIDE


def _normal(shape: Sequence[int], generator: Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=generator.device)


def _colour(rgb: tuple[float, float, float], x: Tensor) -> Tensor:
    """A colour as (C, 1, 1), its brightness where the images are grey."""
    channels = rgb if x.shape[1] == 3 else (sum(w * c for w, c in zip(LUMA, rgb, strict=True)),)
    return x.new_tensor(channels)[:, None, None]


def _brightness(x: Tensor) -> Tensor:
    """Perceived brightness (N, 1, H, W)."""
    return x if x.shape[1] == 1 else (x * x.new_tensor(LUMA)[:, None, None]).sum(1, keepdim=True)


# --- noise ---


@corruption("gaussian_noise", "noise", (0.04, 0.06, 0.08, 0.09, 0.10))
def gaussian_noise(x: Tensor, sd: float, generator: Generator) -> Tensor:
    """Independent Gaussian noise on every value, as from a hot sensor."""
    return x + sd * _normal(x.shape, generator)


@corruption("shot_noise", "noise", (500, 250, 100, 75, 50))
def shot_noise(x: Tensor, rate: int, generator: Generator) -> Tensor:
    """Poisson noise of counted light: a value v becomes Poisson(v * rate) / rate.

    Counts come from one uniform draw each. torch.poisson takes a varying number of draws: an image would depend on the
    images before it.
    """
    level = x.mul(255).round().long()
    draw = torch.rand(x.shape, generator=generator, device=x.device).double()
    table = _poisson_table(rate).to(x.device)
    count = torch.searchsorted(table, draw.add_(level), right=True).sub_(level.mul_(rate + 1))
    return count.to(x.dtype).div_(rate)


@lru_cache(maxsize=8)
def _poisson_table(rate: int) -> Tensor:
    """For each level v of 256, v + P(count <= k) for k = 0..rate, as one ascending float64 vector.

    The table ends at `rate`: all higher counts are brighter than white.
    """
    level = torch.arange(256, dtype=torch.float64)[:, None]
    count = torch.arange(rate + 1, dtype=torch.float64)
    mean = level / 255 * rate
    log_probability = torch.xlogy(count, mean) - mean - torch.lgamma(count + 1)
    return (level + log_probability.exp().cumsum(1).clamp(max=1)).flatten()


@corruption("impulse_noise", "noise", (0.01, 0.02, 0.03, 0.05, 0.07))
def impulse_noise(x: Tensor, share: float, generator: Generator) -> Tensor:
    """Salt and pepper: a share of all values becomes 0 or 1, with equal odds."""
    draw = torch.rand(x.shape, generator=generator, device=x.device)
    return x.masked_fill(draw < share, 1.0).masked_fill(draw < share / 2, 0.0)


# --- blur ---


@corruption("defocus_blur", "blur", ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)))
def defocus_blur(x: Tensor, level: tuple[float, float], generator: Generator) -> Tensor:
    """A lens out of focus: the mean over a disk with softened edges."""
    radius, alias_sigma = level
    return filters.convolve(x, filters.disk_kernel(radius * _scale(x), alias_sigma * _scale(x)), border="mirror")


@corruption("glass_blur", "blur", ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)))
def glass_blur(x: Tensor, level: tuple[float, int, int], generator: Generator) -> Tensor:
    """Frosted glass: pixels displaced at random between two slight blurs.

    A displaced pixel takes its neighbour's value. The published code means to swap the two, but reads a value that it
    has just overwritten: for shifts of one pixel, the result is the same as here. A margin stays in place, as there.
    """
    sigma, reach, rounds = level[0] * _scale(x), max(1, round(level[1] * _scale(x))), level[2]
    n, _, height, width = x.shape
    x = filters.gaussian_blur(x, sigma)
    inside = torch.zeros(height, width, dtype=torch.bool, device=x.device)
    inside[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    rows, columns = torch.arange(height, device=x.device)[:, None], torch.arange(width, device=x.device)
    for _ in range(rounds):
        shifts = torch.randint(-reach, reach, (2, n, height, width), generator=generator, device=x.device)
        down, right = shifts * inside
        x = filters.take(x, rows + down, columns + right)
    return filters.gaussian_blur(x, sigma)


@corruption("motion_blur", "blur", ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)))
def motion_blur(x: Tensor, level: tuple[int, float], generator: Generator) -> Tensor:
    """A moving camera: a smear to one side, at an angle drawn for each image from +-45 degrees."""
    degrees = filters.uniform((len(x),), -45, 45, generator)
    return filters.motion_blur(x, level[0] * _scale(x), level[1] * _scale(x), degrees)


@corruption("zoom_blur", "blur", (5, 10, 15, 20, 25))
def zoom_blur(x: Tensor, last: int, generator: Generator) -> Tensor:
    """A camera driving forward: the mean over zooms 1, 1.01, ... to 1 + last / 100, and the picture once more."""
    height, width = x.shape[-2:]
    total = x.clone()
    for percent in range(last + 1):
        zoom = 1 + percent / 100
        total += filters.separable(x, filters.zoom_matrix(height, zoom), filters.zoom_matrix(width, zoom))
    return total / (last + 2)


# --- weather ---


@corruption(
    "snow",
    "weather",
    (
        (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
    ),
)
def snow(x: Tensor, level: tuple[float, float, float, float, int, float, float], generator: Generator) -> Tensor:
    """Falling snow: streaks of thresholded noise over a whitened picture.

    The level is (mean, sd, zoom, threshold, blur radius, blur sigma, share of the picture that is not whitened).
    """
    mean, sd, zoom, threshold, radius, sigma, plain = level
    n, _, height, width = x.shape
    flakes = mean + sd * _normal((n, 1, height, width), generator)
    zoom = max(1.0, zoom * _scale(x))
    flakes = filters.separable(flakes, filters.zoom_matrix(height, zoom), filters.zoom_matrix(width, zoom))
    flakes = flakes.where(flakes >= threshold, 0.0).clamp(max=1)
    degrees = filters.uniform((n,), -135, -45, generator)
    flakes = filters.motion_blur(flakes, radius * _scale(x), sigma * _scale(x), degrees)
    whitened = torch.maximum(x, 1.5 * _brightness(x) + 0.5)
    return plain * x + (1 - plain) * whitened + flakes + flakes.rot90(2, (-2, -1))


@corruption("frost", "weather", ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)))
def frost(x: Tensor, level: tuple[float, float], generator: Generator) -> Tensor:
    """Ice on the lens: the picture, dimmed, plus a weighted frost texture.

    The published recipe cuts its textures from five photographs, which are not ours to ship; `frost_texture` draws one.
    """
    return level[0] * x + level[1] * frost_texture(x, generator) * _colour((0.86, 0.95, 1.0), x)


def frost_texture(x: Tensor, generator: Generator) -> Tensor:
    """Procedural frost (N, 1, H, W) in [0, 1] for images of that size: veins of ice and grain, thicker in places."""
    thickness, fine, coarse, grain = (_clouds(x, decay, generator) for decay in (1.8, 1.3, 1.5, 1.1))
    # The ridge where a cloud crosses its middle is a thin branching line, which is how ice spreads on glass.
    veins = torch.maximum(*((1 - (2 * cloud - 1).abs()) ** 4 for cloud in (fine, coarse)))
    return ((0.3 + 0.7 * thickness) * (0.2 + 0.65 * veins + 0.4 * grain)).clamp(0, 1)


def _clouds(x: Tensor, decay: float, generator: Generator) -> Tensor:
    """Plasma noise (N, 1, H, W) in [0, 1] for images of that size."""
    n, _, height, width = x.shape
    return filters.plasma(n, 2 ** ceil(log2(max(height, width))), decay, generator)[:, None, :height, :width]


@corruption("fog", "weather", ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)))
def fog(x: Tensor, level: tuple[float, float], generator: Generator) -> Tensor:
    """Clouds of plasma-fractal noise added, then rescaled so that the brightest value stays as it is."""
    strength, decay = level
    clouds = _clouds(x, decay, generator)
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + strength * clouds) * brightest / (brightest + strength)


@corruption("brightness", "weather", (0.05, 0.1, 0.15, 0.2, 0.3))
def brightness(x: Tensor, offset: float, generator: Generator) -> Tensor:
    """More light: the value of HSV raised, hue and saturation unchanged."""
    value = x.amax(1, keepdim=True)
    raised = (value + offset).clamp(max=1)
    # With hue and saturation fixed, all channels are proportional to the value. Black has no hue and turns grey.
    return torch.where(value > 0, x * (raised / value), raised)


# --- digital ---


@corruption("contrast", "digital", (0.75, 0.5, 0.4, 0.3, 0.15))
def contrast(x: Tensor, factor: float, generator: Generator) -> Tensor:
    """Less contrast: distances from the mean of each channel of each image shrink."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + (x - mean) * factor


@corruption(
    "elastic_transform",
    "digital",
    ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
)
def elastic_transform(x: Tensor, level: tuple[float, float, float], generator: Generator) -> Tensor:
    """A stretched sheet: a random affine map, then smooth random displacements.

    The level is (displacement, its smoothing sigma, jitter of the affine map's three points), in sides of the image.
    """
    n, _, height, width = x.shape
    strength, sigma, jitter = (value * min(height, width) for value in level)
    axes = (torch.arange(size, device=x.device, dtype=x.dtype) for size in (height, width))
    y, x_axis = torch.meshgrid(*axes, indexing="ij")
    pixels = torch.stack((x_axis, y, torch.ones_like(y)), dim=-1)
    source_x, source_y = (pixels @ _random_affine(n, height, width, jitter, generator)).unbind(-1)
    x = filters.warp(x, source_x, source_y, border="mirror")
    if strength == 0:
        return x
    shift = strength * filters.gaussian_blur(
        filters.uniform((n, 2, height, width), -1, 1, generator), sigma, border="reflect", truncate=3
    )
    return filters.warp(x, x_axis + shift[:, 0], y + shift[:, 1], border="reflect")


def _random_affine(n: int, height: int, width: int, jitter: float, generator: Generator) -> Tensor:
    """Maps (n, 1, 3, 2) from (x, y, 1) of an output pixel to its source, fixed by three points moved at random."""
    reach = max(1, min(height, width) // 3)
    corners = torch.tensor([(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0)], device=generator.device)
    points = corners * reach + torch.tensor([float(width // 2), float(height // 2)], device=generator.device)
    moved = points + filters.uniform((n, 3, 2), -jitter, jitter, generator)
    homogeneous = torch.cat((moved, torch.ones_like(moved[..., :1])), dim=-1)
    maps: Tensor = torch.linalg.solve(homogeneous, points.expand(n, -1, -1))
    return maps.unsqueeze(1)


@corruption("pixelate", "digital", (0.95, 0.9, 0.85, 0.75, 0.65))
def pixelate(x: Tensor, share: float, generator: Generator) -> Tensor:
    """Too few pixels: resized to a share of the side by box averages and back."""
    height, width = x.shape[-2:]
    small_height, small_width = max(1, int(height * share)), max(1, int(width * share))
    small = filters.separable(x, filters.box_matrix(height, small_height), filters.box_matrix(width, small_width))
    return filters.separable(small, filters.box_matrix(small_height, height), filters.box_matrix(small_width, width))


@corruption("jpeg_compression", "digital", (80, 65, 58, 50, 40))
def jpeg_compression(x: Tensor, quality: int, generator: Generator) -> Tensor:
    """Written as JPEG at a low quality and read again, by Pillow, on the CPU."""
    pixels = x.mul(255).round().to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    # One image at a time by nature, and in one thread: a pool takes twice as long on 32 px, as long on 128 px.
    decoded = np.stack([_through_jpeg(image, quality) for image in pixels])
    return torch.from_numpy(decoded).permute(0, 3, 1, 2).to(x.device, x.dtype).div(255)


def _through_jpeg(pixels: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    from PIL import Image  # Pillow is needed here only

    grey = pixels.shape[-1] == 1
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if grey else pixels).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream)).reshape(pixels.shape)


# --- extra ---


@corruption("speckle_noise", "extra", (0.06, 0.1, 0.12, 0.16, 0.2))
def speckle_noise(x: Tensor, sd: float, generator: Generator) -> Tensor:
    """Gaussian noise in proportion to the value it falls on."""
    return x + x * (sd * _normal(x.shape, generator))


@corruption("gaussian_blur", "extra", (0.4, 0.6, 0.7, 0.8, 1.0))
def gaussian_blur(x: Tensor, sigma: float, generator: Generator) -> Tensor:
    """A Gaussian blur."""
    return filters.gaussian_blur(x, sigma * _scale(x))


@corruption(
    "spatter",
    "extra",
    (
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1.0, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
)
def spatter(x: Tensor, level: tuple[float, float, float, float, float, bool], generator: Generator) -> Tensor:
    """Drops on the lens: water up to severity 3, mud from 4.

    The level is (mean, sd and smoothing sigma of the noise that places the drops, threshold above which it is wet,
    strength of the water or smoothing of the mud, whether it is mud). The published recipe shades water by the distance
    to the drops' edges; here the drop's own relief is lit from one side, which needs no edge detection.
    """
    mean, sd, sigma, threshold, strength, mud = level
    n, _, height, width = x.shape
    liquid = mean + sd * _normal((n, 1, height, width), generator)
    liquid = filters.gaussian_blur(liquid, sigma * _scale(x))
    if mud:
        cover = filters.gaussian_blur((liquid > threshold).float(), strength * _scale(x))
        cover = cover.where(cover >= 0.8, 0.0)
        return x * (1 - cover) + cover * _colour((63 / 255, 42 / 255, 20 / 255), x)
    relief = filters.convolve((liquid - threshold).clamp(min=0), x.new_tensor(LIT_FROM_ONE_SIDE), border="nearest")
    light = liquid.where(liquid >= threshold, 0.0) * filters.gaussian_blur(relief.clamp(min=0), 0.8 * _scale(x))
    light = light / light.amax((1, 2, 3), keepdim=True).clamp(min=1e-6)  # an image may have stayed dry
    return x + strength * light * _colour((175 / 255, 238 / 255, 238 / 255), x)


LIT_FROM_ONE_SIDE = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))


@corruption("saturate", "extra", ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)), needs_colour=True)
def saturate(x: Tensor, level: tuple[float, float], generator: Generator) -> Tensor:
    """Colours washed out (severities 1 and 2) or overdone (3 to 5): saturation of HSV times a gain plus an offset."""
    gain, offset = level
    value, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    spread = value - low
    saturation = (gain * spread / value.clamp(min=1e-6) + offset).clamp(0, 1)
    # How far down from the value each channel lies, in spreads: 0 for the largest, 1 for the smallest, fixed by the
    # hue alone. A grey pixel has no hue; HSV calls it red.
    depth = torch.where(spread > 0, (value - x) / spread, x.new_tensor((0.0, 1.0, 1.0))[:, None, None])
    return value * (1 - saturation * depth)


BENCHMARK_CORRUPTIONS = tuple(name for name, entry in CORRUPTIONS.items() if entry.category != "extra")
"""The fifteen over which mean robust accuracy is taken."""
EXTRA_CORRUPTIONS = tuple(name for name in CORRUPTIONS if name not in BENCHMARK_CORRUPTIONS)
"""The four of the published set that are reported apart."""


def contact_sheet(images: Tensor, seed: int = 0, gap: int = 2) -> Tensor:
    """All corruptions at all severities as one uint8 picture (3, height, width), to be looked at.

    One row per corruption in the registry's order; in a row, the clean images (N, 3, H, W) side by side, then the same
    at severities 1 to 5. White lines of `gap` pixels separate the cells.
    """
    if images.ndim != 4 or images.shape[1] != 3 or len(images) == 0:
        raise UsageError(f"a contact sheet needs at least one colour image (N, 3, H, W), got {tuple(images.shape)}.")

    def cell(shown: Tensor) -> Tensor:
        return torch.nn.functional.pad(torch.cat(tuple(shown), dim=-1), (0, gap, 0, gap), value=255)

    rows = [
        torch.cat((cell(images), *(cell(corrupt(images, name, severity, seed)) for severity in SEVERITIES)), dim=-1)
        for name in CORRUPTIONS
    ]
    return torch.cat(rows, dim=-2)[:, : -gap or None, : -gap or None]
