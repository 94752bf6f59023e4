"""Each filter against scipy or a slow loop."""

from __future__ import annotations

from math import ceil, cos, radians, sin

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from holdfast.analysis import filters

SIZES = [(2, 2), (5, 9), (32, 32)]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("sigma", [0.05, 0.4, 1.0, 6.4])
@pytest.mark.parametrize("border", ["nearest", "reflect", "mirror"])
def test_gaussian_blur_equals_scipy(height: int, width: int, sigma: float, border: filters.Border) -> None:
    images = rand(2, 1, height, width)
    expected = ndimage.gaussian_filter(images.double().numpy(), (0, 0, sigma, sigma), mode=border, truncate=3)
    result = filters.gaussian_blur(images, sigma, border, truncate=3)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 28, 32])
def test_matrices_keep_a_constant(size: int) -> None:
    matrices = [
        filters.gaussian_matrix(size, 0.7),
        filters.gaussian_matrix(size, 0.0),
        filters.zoom_matrix(size, 1.13),
        filters.zoom_matrix(size, 9.0),
        filters.box_matrix(size, max(1, size // 2)),
    ]
    for matrix in matrices:
        assert (matrix >= 0).all()
        torch.testing.assert_close(matrix.sum(1), torch.ones(len(matrix)))


def slow_zoom(image: np.ndarray, zoom: float) -> np.ndarray:
    """The middle of a square image, enlarged by scipy."""
    size = len(image)
    kept = ceil(size / zoom)
    first = (size - kept) // 2
    large = ndimage.zoom(image[first : first + kept, first : first + kept], zoom, order=1)
    trim = (len(large) - size) // 2
    return large[trim : trim + size, trim : trim + size]


@pytest.mark.parametrize("size", [5, 28, 32])
@pytest.mark.parametrize("zoom", [1.0, 1.03, 1.1, 1.25, 1.75, 2.25])
def test_zoom_equals_scipy(size: int, zoom: float) -> None:
    image = rand(size, size)
    matrix = filters.zoom_matrix(size, zoom)
    expected = slow_zoom(image.double().numpy(), zoom)
    np.testing.assert_allclose(filters.separable(image, matrix, matrix).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(("size", "new_size"), [(32, 30), (32, 20), (20, 32), (7, 7), (2, 1)])
def test_box_equals_pillow(size: int, new_size: int) -> None:
    image = rand(size, size)
    expected = Image.fromarray(image.numpy()).resize((new_size, new_size), Image.Resampling.BOX)
    matrix = filters.box_matrix(size, new_size)
    np.testing.assert_allclose(filters.separable(image, matrix, matrix).numpy(), np.asarray(expected), atol=1e-6)


@pytest.mark.parametrize("level", [(0.3, 0.4), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1), (2.1, 2.8), (10.5, 0.7)])
def test_disk_kernel_sums_to_one_and_is_symmetric(level: tuple[float, float]) -> None:
    kernel = filters.disk_kernel(*level)
    assert float(kernel.sum()) == pytest.approx(1)
    torch.testing.assert_close(kernel, kernel.flip(0))
    torch.testing.assert_close(kernel, kernel.T)


@pytest.mark.parametrize("border", ["nearest", "reflect", "mirror"])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_convolve_equals_scipy(height: int, width: int, border: filters.Border) -> None:
    images, kernel = rand(2, 3, height, width), rand(5, 5, seed=1)
    expected = ndimage.correlate(images.numpy(), kernel.numpy()[None, None], mode=border)
    np.testing.assert_allclose(filters.convolve(images, kernel, border).numpy(), expected, rtol=1e-5)


def slow_motion_blur(image: np.ndarray, taps: int, sigma: float, degrees: float) -> np.ndarray:
    height, width = image.shape
    weights = np.exp(-0.5 * (np.arange(taps) / sigma) ** 2)
    result = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            for tap, weight in enumerate(weights / weights.sum()):
                row = y + ceil(tap * sin(radians(degrees)) - 0.5)
                column = x + ceil(tap * cos(radians(degrees)) - 0.5)
                result[y, x] += weight * image[min(max(row, 0), height - 1), min(max(column, 0), width - 1)]
    return result


def test_motion_blur_equals_a_loop_at_an_angle_per_image() -> None:
    images, degrees = rand(4, 1, 9, 12), torch.tensor([0.0, 33.0, -41.0, -100.0])
    result = filters.motion_blur(images, 3, 1.4, degrees)
    for image, blurred, angle in zip(images, result, degrees.tolist(), strict=True):
        expected = slow_motion_blur(image[0].double().numpy(), taps=6, sigma=1.4, degrees=angle)
        np.testing.assert_allclose(blurred[0].numpy(), expected, atol=1e-5)


def test_the_taps_that_motion_blur_leaves_out_do_not_matter() -> None:
    image = (rand(1, 1, 24, 24) > 0.5).float()
    expected = slow_motion_blur(image[0, 0].double().numpy(), taps=19, sigma=1.0, degrees=20)
    result = filters.motion_blur(image, 9, 1.0, torch.tensor([20.0]))
    assert np.abs(result[0, 0].numpy() - expected).max() < 0.1 / 255


def test_take_equals_the_published_raster_scan() -> None:
    """NumPy rows are views: this "swap" reads back what it has just written. For shifts of -1 and 0 it is a gather."""
    image = rand(3, 10, 10)
    down, right = torch.randint(-1, 1, (2, 1, 10, 10), generator=torch.Generator().manual_seed(1))
    down[:, :1] = right[:, :, :1] = 0
    expected = image.permute(1, 2, 0).numpy().copy()
    for y in range(9, -1, -1):
        for x in range(9, -1, -1):
            row, column = y + down[0, y, x], x + right[0, y, x]
            expected[y, x], expected[row, column] = expected[row, column], expected[y, x]
    result = filters.take(image[None], torch.arange(10)[:, None] + down, torch.arange(10) + right)[0]
    np.testing.assert_array_equal(result.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("border", ["reflect", "mirror"])
def test_warp_equals_scipy(border: str) -> None:
    images = rand(2, 1, 8, 11)
    x, y = 20 * rand(2, 8, 11, seed=1) - 5, 16 * rand(2, 8, 11, seed=2) - 4
    result = filters.warp(images, x, y, border)  # type: ignore[arg-type]
    for image, warped, columns, rows in zip(images, result, x, y, strict=True):
        expected = ndimage.map_coordinates(image[0].numpy(), [rows.numpy(), columns.numpy()], order=1, mode=border)
        np.testing.assert_allclose(warped[0].numpy(), expected, atol=1e-4)


def test_plasma_spans_zero_to_one_and_decays() -> None:
    def roughness(decay: float) -> float:
        cloud = filters.plasma(16, 32, decay, torch.Generator().manual_seed(0))
        assert cloud.shape == (16, 32, 32)
        assert (cloud.amin((1, 2)) == 0).all()
        assert (cloud.amax((1, 2)) == 1).all()
        return float(cloud.diff(dim=2).square().mean())

    assert roughness(3.0) < roughness(2.0) < roughness(1.5) < roughness(1.0)


def test_plasma_of_the_smallest_size() -> None:
    assert filters.plasma(3, 2, 2.0, torch.Generator().manual_seed(0)).isfinite().all()
