from __future__ import annotations

import colorsys
import io

import numpy as np
import pytest
import torch
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy import ndimage, stats
from torch import Tensor

from holdfast.analysis import corruptions as module
from holdfast.analysis.corruptions import (
    BENCHMARK_CORRUPTIONS,
    CATEGORIES,
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    SEVERITIES,
    contact_sheet,
    corrupt,
    corruption,
)
from holdfast.errors import UsageError

from .conftest import natural_images
from .test_filters import slow_zoom

COLOUR_ONLY = {"saturate"}


def by_severity(*values: float) -> list[tuple[int, float]]:
    return list(zip(SEVERITIES, values, strict=True))


def floats(images: Tensor) -> np.ndarray:
    return images.numpy().astype(np.float64) / 255


def assert_rounds(result: Tensor, expected: np.ndarray) -> None:
    """The result holds the levels nearest to the expected values in [0, 1]; either neighbour where they tie."""
    np.testing.assert_allclose(result.numpy(), 255 * expected.clip(0, 1), rtol=0, atol=0.5 + 1e-3)


def pixels(n: int = 256, seed: int = 0) -> Tensor:
    """Random colours, with black, white and grey among them."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 3, 4, 4), generator=generator, dtype=torch.uint8)
    images[0], images[1], images[2] = 0, 255, 77
    return images


def distance(images: Tensor, name: str, severity: int) -> float:
    return float((corrupt(images, name, severity).float() - images.float()).square().mean())


# --- the set ---


def test_the_fifteen_and_the_four() -> None:
    assert len(BENCHMARK_CORRUPTIONS) == 15
    assert sorted(EXTRA_CORRUPTIONS) == ["gaussian_blur", "saturate", "spatter", "speckle_noise"]
    sizes = {category: sum(entry.category == category for entry in CORRUPTIONS.values()) for category in CATEGORIES}
    assert sizes == {"noise": 3, "blur": 4, "weather": 4, "digital": 4, "extra": 4}
    assert all(CORRUPTIONS.describe(name).endswith(".") for name in CORRUPTIONS)


# --- the contract, for every entry of the registry ---


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_depends_on_nothing_but_itself_its_place_and_the_seed(name: str, photos: Tensor) -> None:
    before = photos.clone()
    whole = corrupt(photos, name, 3, seed=7)
    assert whole.dtype == torch.uint8
    assert whole.shape == photos.shape
    assert torch.equal(photos, before)
    assert torch.equal(corrupt(photos[:5], name, 3, seed=7), whole[:5])
    company = torch.cat((255 - photos[:2], photos[2:3], 255 - photos[3:5]))
    assert torch.equal(corrupt(company, name, 3, seed=7)[2], whole[2])


def test_chunks_are_consistent_and_different(monkeypatch: pytest.MonkeyPatch, photos: Tensor) -> None:
    monkeypatch.setattr(module, "CHUNK_IMAGES", 8)
    same = photos[:1].repeat(20, 1, 1, 1)
    noisy = corrupt(same, "gaussian_noise", 3)
    assert torch.equal(corrupt(same[:11], "gaussian_noise", 3), noisy[:11])
    assert len({image.numpy().tobytes() for image in noisy}) == 20


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_seed_decides_what_is_drawn(name: str, photos: Tensor) -> None:
    drawn = not torch.equal(corrupt(photos, name, 3, seed=0), corrupt(photos, name, 3, seed=1))
    blurs, colours = {"defocus_blur", "zoom_blur", "gaussian_blur"}, {"brightness", "contrast", "saturate"}
    assert drawn == (name not in blurs | colours | {"pixelate", "jpeg_compression"})


@pytest.mark.parametrize(("height", "width"), [(2, 2), (3, 2), (28, 28), (31, 45), (64, 64)])
@pytest.mark.parametrize("channels", [1, 3])
def test_other_sizes_and_grey_images(height: int, width: int, channels: int) -> None:
    images = natural_images(2, height, width, channels)
    for name in CORRUPTIONS:
        if channels == 1 and name in COLOUR_ONLY:
            with pytest.raises(UsageError, match="colour"):
                corrupt(images, name, 5)
        else:
            assert corrupt(images, name, 5).shape == images.shape


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_no_images(name: str) -> None:
    assert corrupt(torch.empty(0, 3, 8, 8, dtype=torch.uint8), name, 1).shape == (0, 3, 8, 8)


NOT_MONOTONE = {"glass_blur", "motion_blur", "frost", "elastic_transform", "spatter", "saturate"}


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - NOT_MONOTONE))
def test_each_severity_is_farther_from_the_clean_image(name: str, photos: Tensor) -> None:
    distances = [distance(photos, name, severity) for severity in SEVERITIES]
    assert distances == sorted(distances), distances
    assert distances[0] > 0


def test_glass_blur_counts_rounds_before_softness(photos: Tensor) -> None:
    """One round in 1 to 3, two in 4 and 5; more blur within these brings displaced pixels closer again."""
    one, two, three, four, five = (distance(photos, "glass_blur", severity) for severity in SEVERITIES)
    assert three < min(one, two) <= max(one, two) < five < four


def test_motion_blur_grows_with_its_sigma(photos: Tensor) -> None:
    """Severities 3 and 4 differ only in where the kernel is cut off, far out."""
    one, two, three, four, five = (distance(photos, "motion_blur", severity) for severity in SEVERITIES)
    assert one < two < min(three, four) <= max(three, four) < five
    assert three == pytest.approx(four, rel=0.05)


def test_frost_hides_more_and_more(photos: Tensor) -> None:
    """From severity 3 on the picture is dimmed as ice is added: levels come closer again, the content is lost."""

    def likeness(severity: int) -> float:
        pairs = zip(photos.double(), corrupt(photos, "frost", severity).double(), strict=True)
        return float(np.mean([np.corrcoef(clean.flatten(), frosted.flatten())[0, 1] for clean, frosted in pairs]))

    likenesses = [likeness(severity) for severity in SEVERITIES]
    assert likenesses == sorted(likenesses, reverse=True)


def test_elastic_transform_trades_jitter_for_displacement(photos: Tensor) -> None:
    """The affine jitter, which moves pixels most, shrinks over the severities while local displacements grow."""
    distances = [distance(photos, "elastic_transform", severity) for severity in SEVERITIES]
    assert distances == sorted(distances, reverse=True)


def test_saturate_takes_colour_away_then_adds_it(photos: Tensor) -> None:
    one, two, three, four, five = (distance(photos, "saturate", severity) for severity in SEVERITIES)
    assert one < two
    assert three < four < five


def test_spatter_grows_for_water_and_for_mud(photos: Tensor) -> None:
    one, two, three, four, five = (distance(photos, "spatter", severity) for severity in SEVERITIES)
    assert one < two < three
    assert four < five


@pytest.mark.parametrize("name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_blurs_and_warps_keep_a_constant_image(name: str, severity: int) -> None:
    images = torch.tensor([[0, 128, 255]], dtype=torch.uint8)[:, :, None, None].expand(1, 3, 32, 32)
    assert torch.equal(corrupt(images, name, severity), images)


@pytest.mark.parametrize("name", ["elastic_transform", "pixelate", "contrast"])
def test_so_do_these(name: str) -> None:
    images = torch.full((2, 3, 32, 32), 93, dtype=torch.uint8)
    assert torch.equal(corrupt(images, name, 5), images)


# --- noise: moments ---


@pytest.mark.parametrize(("severity", "sd"), by_severity(0.04, 0.06, 0.08, 0.09, 0.10))
def test_gaussian_noise_moments(severity: int, sd: float) -> None:
    noise = corrupt(torch.full((64, 3, 32, 32), 128, dtype=torch.uint8), "gaussian_noise", severity).double() - 128
    assert float(noise.mean()) == pytest.approx(0, abs=0.2)
    assert float(noise.std()) == pytest.approx(255 * sd, rel=0.01)
    assert abs(float((noise[..., 1:] * noise[..., :-1]).mean())) < 0.02 * float(noise.var())


@pytest.mark.parametrize("rate", [500, 250, 100, 75, 50])
@pytest.mark.parametrize("level", [0, 1, 20, 100, 180])
def test_shot_noise_counts_are_poisson(rate: int, level: int) -> None:
    images = torch.full((16, 3, 32, 32), level / 255)
    counts = module.shot_noise(images, rate, torch.Generator().manual_seed(0)).mul(rate).round().long().flatten()
    distribution = stats.poisson(level / 255 * rate)
    expected = np.append(
        distribution.pmf(np.arange(rate + 1)), distribution.sf(rate)
    )  # the last is "brighter than white"
    observed = counts.bincount(minlength=rate + 2).numpy() / len(counts)
    # Five standard errors of a share, and one sample for the counts that are hardly ever seen.
    assert (np.abs(observed - expected) <= 5 * np.sqrt(expected / len(counts)) + 1.5 / len(counts)).all()


@pytest.mark.parametrize(("severity", "rate"), by_severity(500, 250, 100, 75, 50))
def test_shot_noise_has_the_variance_of_counts(severity: int, rate: int) -> None:
    noisy = corrupt(torch.full((64, 3, 32, 32), 100, dtype=torch.uint8), "shot_noise", severity).double()
    # Loose, because the steps of one count are rounded to whole levels.
    assert float(noisy.std()) == pytest.approx((255 * 100 / rate) ** 0.5, rel=0.03)


@pytest.mark.parametrize(("severity", "share"), by_severity(0.01, 0.02, 0.03, 0.05, 0.07))
def test_impulse_noise_shares(severity: int, share: float) -> None:
    noisy = corrupt(torch.full((128, 3, 32, 32), 128, dtype=torch.uint8), "impulse_noise", severity)
    assert float((noisy == 0).double().mean()) == pytest.approx(share / 2, rel=0.05)
    assert float((noisy == 255).double().mean()) == pytest.approx(share / 2, rel=0.05)
    assert set(noisy.unique().tolist()) == {0, 128, 255}


@pytest.mark.parametrize(("severity", "sd"), by_severity(0.06, 0.1, 0.12, 0.16, 0.2))
def test_speckle_noise_is_proportional(severity: int, sd: float) -> None:
    for level in (50, 120):
        noisy = corrupt(torch.full((64, 3, 32, 32), level, dtype=torch.uint8), "speckle_noise", severity).double()
        assert float(noisy.std()) == pytest.approx(level * sd, rel=0.02)


# --- blur: slow implementations ---


@pytest.mark.parametrize(
    ("severity", "radius", "sigma"), [(1, 0.3, 0.4), (2, 0.4, 0.5), (3, 0.5, 0.6), (4, 1.0, 0.2), (5, 1.5, 0.1)]
)
def test_defocus_blur_equals_scipy(severity: int, radius: float, sigma: float, photos: Tensor) -> None:
    grid = np.arange(-8, 9)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(float)
    tap = np.exp(-0.5 / sigma**2)
    soft = np.array([tap, 1, tap]) / (1 + 2 * tap)
    kernel = ndimage.correlate(disk / disk.sum(), np.outer(soft, soft), mode="constant")
    expected = ndimage.correlate(floats(photos[:4]), kernel[None, None], mode="mirror")
    assert_rounds(corrupt(photos[:4], "defocus_blur", severity), expected)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_zoom_blur_equals_scipy(severity: int, photos: Tensor) -> None:
    image = floats(photos[0, 0])
    zooms = [1 + step / 100 for step in range(5 * severity + 1)]
    expected = (image + sum(slow_zoom(image, zoom) for zoom in zooms)) / (len(zooms) + 1)
    assert_rounds(corrupt(photos[:1], "zoom_blur", severity)[0, 0], expected)


@pytest.mark.parametrize(("severity", "sigma"), by_severity(0.4, 0.6, 0.7, 0.8, 1.0))
def test_gaussian_blur_equals_scipy(severity: int, sigma: float, photos: Tensor) -> None:
    expected = ndimage.gaussian_filter(floats(photos[:4]), (0, 0, sigma, sigma), mode="nearest")
    assert_rounds(corrupt(photos[:4], "gaussian_blur", severity), expected)


def test_glass_blur_takes_neighbours_with_equal_odds() -> None:
    """At severity 1 the blur is none: every pixel is one of the four up and to the left; the margin stays."""
    position = torch.arange(32 * 32).view(32, 32)
    images = torch.stack((position // 32, position % 32, torch.zeros_like(position))).to(torch.uint8)
    moved = corrupt(images.expand(200, -1, -1, -1), "glass_blur", 1).int() - images.int()
    inside = moved[:, :2, 2:, 2:]
    assert set(inside.unique().tolist()) == {-1, 0}
    assert inside.double().mean((0, 2, 3)).tolist() == pytest.approx([-0.5, -0.5], abs=0.01)
    assert not moved[:, :, :2].any()
    assert not moved[:, :, :, :2].any()


def test_motion_blur_directions_differ_between_images() -> None:
    dot = torch.zeros(64, 3, 32, 32, dtype=torch.uint8)
    dot[:, :, 16, 16] = 255
    smeared = corrupt(dot, "motion_blur", 5).double()
    assert len({image.numpy().tobytes() for image in smeared}) > 10
    weight = smeared[:, 0] / smeared[:, 0].sum((1, 2), keepdim=True)
    grid = torch.arange(32).double() - 16
    down, right = (weight.sum(2) * grid).sum(1), (weight.sum(1) * grid).sum(1)
    degrees = torch.rad2deg(torch.atan2(-down, -right))
    assert float(degrees.abs().max()) < 50
    assert float(degrees.std()) == pytest.approx(90 / 12**0.5, rel=0.25)


# --- weather ---


def test_snow_brightens_and_is_white(photos: Tensor) -> None:
    for severity in SEVERITIES:
        added = corrupt(photos, "snow", severity).int() - photos.int()
        assert int(added.min()) >= -1
    black = torch.zeros(32, 3, 32, 32, dtype=torch.uint8)
    snowy = corrupt(black, "snow", 5)
    assert torch.equal(snowy[:, 0], snowy[:, 1])
    assert torch.equal(snowy, snowy.rot90(2, (2, 3)))  # streaks are added with their half-turn
    assert int(snowy.min()) >= round(255 * 0.2 * 0.5) - 1  # the whitened share of a black picture


@pytest.mark.parametrize(
    ("severity", "picture", "ice"), [(1, 1, 0.2), (2, 1, 0.3), (3, 0.9, 0.4), (4, 0.85, 0.4), (5, 0.75, 0.45)]
)
def test_frost_is_a_weighted_sum(severity: int, picture: float, ice: float) -> None:
    black = torch.zeros(32, 3, 32, 32, dtype=torch.uint8)
    grey = torch.full_like(black, 100)
    texture = corrupt(black, "frost", severity).double()
    assert 255 * ice >= float(texture.max()) - 0.5
    assert float((corrupt(grey, "frost", severity).double() - texture - 100 * picture).abs().max()) <= 1
    assert texture.mean((0, 2, 3)).diff().min() > 0  # ice is bluish


def test_frost_texture_is_bright_and_uneven() -> None:
    texture = module.frost_texture(torch.zeros(64, 3, 32, 32), torch.Generator().manual_seed(0))
    assert texture.shape == (64, 1, 32, 32)
    assert 0.35 < float(texture.mean()) < 0.6
    assert float(texture.std(dim=(1, 2, 3)).min()) > 0.08


@pytest.mark.parametrize("severity", SEVERITIES)
def test_fog_keeps_within_the_brightest_value(severity: int, photos: Tensor) -> None:
    foggy = corrupt(photos, "fog", severity)
    assert (foggy.amax((1, 2, 3)) <= photos.amax((1, 2, 3))).all()
    assert float(foggy.float().std(dim=(1, 2, 3)).mean()) < float(photos.float().std(dim=(1, 2, 3)).mean()) + 10
    assert not corrupt(torch.zeros_like(photos), "fog", severity).any()


@pytest.mark.parametrize(("severity", "offset"), by_severity(0.05, 0.1, 0.15, 0.2, 0.3))
def test_brightness_equals_matplotlibs_hsv(severity: int, offset: float) -> None:
    images = pixels()
    hsv = rgb_to_hsv(floats(images.permute(0, 2, 3, 1)))
    hsv[..., 2] = np.minimum(hsv[..., 2] + offset, 1)
    assert_rounds(corrupt(images, "brightness", severity).permute(0, 2, 3, 1), hsv_to_rgb(hsv))


# --- digital ---


@pytest.mark.parametrize(("severity", "factor"), by_severity(0.75, 0.5, 0.4, 0.3, 0.15))
def test_contrast_in_closed_form(severity: int, factor: float, photos: Tensor) -> None:
    values = floats(photos)
    mean = values.mean((2, 3), keepdims=True)
    assert_rounds(corrupt(photos, "contrast", severity), mean + factor * (values - mean))


def test_elastic_transform_moves_pixels_by_as_much_as_it_should() -> None:
    ramp = torch.linspace(0, 255, 64).expand(32, 3, 64, 64)
    images = torch.cat((ramp, ramp.mT), dim=0).to(torch.uint8)
    for severity, most in ((1, 0.35), (5, 0.35)):
        moved = (corrupt(images, "elastic_transform", severity).double() - images.double()) / 255
        assert 0.005 < float(moved[..., 16:48, 16:48].abs().mean()) < most / 4
        assert float(moved[..., 16:48, 16:48].abs().max()) < most


def test_elastic_affine_map_takes_the_moved_points_to_their_places() -> None:
    without_jitter = module._random_affine(3, 32, 48, 0.0, torch.Generator().manual_seed(0))
    torch.testing.assert_close(without_jitter[:, 0], torch.tensor([[1.0, 0], [0, 1], [0, 0]]).expand(3, 3, 2))
    jittered = module._random_affine(200, 32, 32, 2.56, torch.Generator().manual_seed(0))
    assert float((jittered[:, 0, :2] - torch.eye(2)).abs().mean()) == pytest.approx(2.56 / 20, rel=0.3)


@pytest.mark.parametrize(("severity", "share"), by_severity(0.95, 0.9, 0.85, 0.75, 0.65))
def test_pixelate_equals_pillow(severity: int, share: float, photos: Tensor) -> None:
    for image, result in zip(photos[:8], corrupt(photos[:8], "pixelate", severity), strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        small = picture.resize((int(32 * share), int(32 * share)), Image.Resampling.BOX)
        expected = np.asarray(small.resize((32, 32), Image.Resampling.BOX)).astype(int)
        assert np.abs(result.permute(1, 2, 0).numpy() - expected).max() <= 1


@pytest.mark.parametrize(("severity", "quality"), by_severity(80, 65, 58, 50, 40))
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_equals_pillow(severity: int, quality: int, channels: int) -> None:
    images = natural_images(4, 32, 40, channels)
    for image, result in zip(images, corrupt(images, "jpeg_compression", severity), strict=True):
        stream = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy()).save(stream, "JPEG", quality=quality)
        expected = np.asarray(Image.open(stream)).reshape(32, 40, channels)
        np.testing.assert_array_equal(result.permute(1, 2, 0).numpy(), expected)


# --- extra ---


@pytest.mark.parametrize(
    ("severity", "gain", "offset"), [(1, 0.3, 0), (2, 0.1, 0), (3, 1.5, 0), (4, 2.0, 0.1), (5, 2.5, 0.2)]
)
def test_saturate_equals_colorsys(severity: int, gain: float, offset: float) -> None:
    images = pixels(64)
    expected = []
    for colour in floats(images).transpose(0, 2, 3, 1).reshape(-1, 3):
        hue, saturation, value = colorsys.rgb_to_hsv(*colour)
        expected.append(colorsys.hsv_to_rgb(hue, min(max(gain * saturation + offset, 0), 1), value))
    assert_rounds(corrupt(images, "saturate", severity).permute(0, 2, 3, 1).reshape(-1, 3), np.array(expected))


def test_spatter_is_water_then_mud(photos: Tensor) -> None:
    for severity in (1, 2, 3):
        wet = corrupt(photos, "spatter", severity)
        assert (wet >= photos).all()  # water only adds light
        assert 0.001 < float((wet != photos).float().mean()) < 0.6
    for severity in (4, 5):
        muddy = corrupt(torch.full_like(photos, 255), "spatter", severity)
        covered = (muddy != 255).any(1)
        assert 0.01 < float(covered.float().mean()) < 0.35
        darkest = muddy.flatten(2).amin(2).amin(0)
        assert darkest.tolist() == [63, 42, 20]


# --- bad input ---


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 3, 8, 8), "uint8"),
        (torch.zeros(1, 3, 1, 8, dtype=torch.uint8), "2 x 2"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8), "N, C, H, W"),
        (torch.zeros(1, 4, 8, 8, dtype=torch.uint8), "1 or 3 channels"),
    ],
)
def test_images_that_cannot_be_corrupted(images: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        corrupt(images, "fog", 1)
    with pytest.raises(UsageError, match=message):
        CORRUPTIONS["fog"](images, 1, torch.Generator())


@pytest.mark.parametrize("severity", [0, 6, 2.5])
def test_a_severity_outside_one_to_five(severity: int, photos: Tensor) -> None:
    with pytest.raises(UsageError, match="severity"):
        corrupt(photos[:1], "fog", severity)


def test_an_unknown_name_and_a_negative_seed(photos: Tensor) -> None:
    with pytest.raises(UsageError, match="did you mean 'frost'"):
        corrupt(photos, "frots", 1)
    with pytest.raises(UsageError, match="seed"):
        corrupt(photos, "frost", 1, seed=-1)


def test_registration_is_checked() -> None:
    with pytest.raises(UsageError, match="5 levels"):
        corruption("rain", "weather", (1, 2))
    with pytest.raises(UsageError, match="category"):
        corruption("rain", "wet", (1, 2, 3, 4, 5))  # type: ignore[arg-type]


# --- looking at it ---


def test_contact_sheet_shows_every_corruption_and_severity(photos: Tensor) -> None:
    sheet = contact_sheet(photos[:2], gap=3)
    assert sheet.shape == (3, 19 * 35 - 3, 6 * 67 - 3)
    assert torch.equal(sheet[:, :32, :32], photos[0])
    row = list(CORRUPTIONS).index("contrast") * 35
    assert torch.equal(sheet[:, row : row + 32, 67 + 32 : 67 + 64], corrupt(photos[:2], "contrast", 1)[1])
    assert contact_sheet(photos[:1], gap=0).shape == (3, 19 * 32, 6 * 32)
    with pytest.raises(UsageError, match="colour"):
        contact_sheet(photos[:1, :1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_runs_on_the_device(name: str, photos: Tensor) -> None:
    photos = photos.repeat(16, 1, 1, 1)  # fog and the like are random: the means of many images agree
    for severity in SEVERITIES:
        result = corrupt(photos.cuda(), name, severity)
        assert result.is_cuda
        assert torch.equal(result, corrupt(photos.cuda(), name, severity))
        on_the_cpu = corrupt(photos, name, severity)
        assert float(result.float().mean()) == pytest.approx(float(on_the_cpu.float().mean()), abs=4)
