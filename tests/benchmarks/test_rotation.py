"""Rotation against Pillow, pixel for pixel."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from holdfast.benchmarks.rotation import rotate, rotate_each

SPECIAL = [0, 90, 180, 270, 360, -90, -180, 450, 720, 45, 135, 59.999999, 60, 179.99999, 1e-3, 1e-9, 1e-14, 1e-20]
SPECIAL += [-angle for angle in SPECIAL[-4:]] + [90 - 1e-9, 90 + 1e-9, 180 + 1e-12, 360 - 1e-12]


def noise(count: int, side: int, seed: int = 0) -> torch.Tensor:
    """Images without black pixels, so that every pixel from outside is told from one from inside."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (count, 1, side, side), generator=draw, dtype=torch.uint8)


def by_pillow(images: torch.Tensor, angles: list[float]) -> torch.Tensor:
    turned = [
        np.asarray(Image.fromarray(image[0].numpy()).rotate(angle, Image.Resampling.NEAREST))
        for image, angle in zip(images, angles, strict=True)
    ]
    return torch.from_numpy(np.stack(turned))[:, None]


@pytest.mark.parametrize("side", [28, 27, 1, 2, 5])
@pytest.mark.parametrize("angle", SPECIAL)
def test_special_angles(angle, side):
    images = noise(2, side)
    expected = by_pillow(images, [angle] * 2)
    assert torch.equal(rotate(images, angle), expected)
    assert torch.equal(rotate_each(images, torch.full((2,), angle, dtype=torch.float64)), expected)


@given(
    angle=st.floats(-1000, 1000, allow_nan=False) | st.floats(-1e-3, 1e-3) | st.integers(-720, 720).map(float),
    side=st.sampled_from([28, 28, 28, 27, 9, 64]),
)
@settings(max_examples=300, deadline=None)
def test_any_angle(angle, side):
    images = noise(1, side)
    assert torch.equal(rotate(images, angle), by_pillow(images, [angle]))


@given(angles=st.lists(st.floats(-720, 720, allow_nan=False), min_size=1, max_size=12), chunk=st.integers(1, 13))
@settings(max_examples=50, deadline=None)
def test_each_image_by_its_own_angle_in_chunks_of_any_size(angles, chunk):
    images = noise(len(angles), 28)
    turned = rotate_each(images, torch.tensor(angles, dtype=torch.float64), chunk=chunk)
    assert torch.equal(turned, by_pillow(images, angles))


def test_counter_clockwise():
    images = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
    images[0, 0, 1, 2] = 255  # right of the centre
    turned = rotate(images, 90)
    assert turned[0, 0, 0, 1] == 255  # above it
    assert turned.count_nonzero() == 1


def test_originals_stay_as_they_were():
    images = noise(3, 28)
    before = images.clone()
    assert rotate(images, 33.0).dtype == torch.uint8
    assert rotate_each(images, torch.tensor([0.0, 33.0, 180.0])).dtype == torch.uint8
    assert torch.equal(images, before)
    rotate(images, 0.0).zero_()
    assert torch.equal(images, before)


def test_parts_of_larger_tensors():
    images = noise(40, 28)[::2]
    assert torch.equal(rotate(images, 77.7), by_pillow(images, [77.7] * 20))


def test_the_way_for_gpus_gives_the_same(monkeypatch):
    from holdfast.benchmarks import rotation

    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = [rotate(images, angle) for angle in (0.0, 33.3, 179.9)]
    monkeypatch.setattr(rotation, "_gather_cpu", rotation._gather)
    assert all(torch.equal(rotate(images, a), e) for a, e in zip((0.0, 33.3, 179.9), expected, strict=True))
