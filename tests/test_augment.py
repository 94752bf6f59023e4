import random
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import holdfast as hf
from holdfast.augment import CropFlip, Normalize, per_sample
from holdfast.errors import UsageError
from holdfast.rng import generator

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615)


def pictures(count, channels=3, height=32, width=32, seed=0):
    shape = (count, channels, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(seed, "pictures"))


def cropped(images, seed=0, **options):
    uniforms = torch.rand(3, len(images), 1, generator=generator(seed, "augment"))
    return CropFlip(Normalize(), generator(seed, "augment"), **options).crop_flip(images, uniforms)


# --- Normalize -------------------------------------------------------------------------------------------------------


def test_normalize_is_the_formula():
    images = pictures(5)
    expected = images.numpy().astype(np.float64) / 255
    expected = (expected - np.array(MEAN).reshape(3, 1, 1)) / np.array(STD).reshape(3, 1, 1)
    shown = Normalize(MEAN, STD)(images)
    assert shown.dtype == torch.float32
    assert shown.shape == images.shape
    np.testing.assert_allclose(shown.numpy(), expected, rtol=0, atol=1e-6)


def test_without_mean_and_std_pixels_are_scaled_only():
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    shown = Normalize()(every)
    assert shown.dtype == torch.float32
    assert torch.equal(shown.flatten(), torch.from_numpy((np.arange(256) / 255).astype(np.float32)))


def test_greyscale_normalisation():
    images = pictures(2, channels=1)
    expected = (images.double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(Normalize((0.1307,), (0.3081,))(images).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("normalize", [Normalize(), Normalize(MEAN, STD)])
def test_normalize_leaves_its_input_alone(normalize):
    for images in (pictures(2), pictures(2).float()):
        before = images.clone()
        normalize(images)
        assert torch.equal(images, before)


def test_the_same_normalize_serves_again():
    normalize = Normalize(MEAN, STD)
    assert torch.equal(normalize(pictures(2)), normalize(pictures(2)))
    assert normalize(pictures(0)).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(("mean", "std"), [(MEAN, None), (None, STD)])
def test_mean_and_std_belong_together(mean, std):
    with pytest.raises(UsageError, match="give both mean and std"):
        Normalize(mean, std)


# --- CropFlip --------------------------------------------------------------------------------------------------------


def pad_crop_flip(image, top, left, flip, padding):
    """One image, as three separate operations: (C, H, W) uint8 -> the same."""
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    window = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    return window[:, :, ::-1] if flip else window


def find_transformation(image, shown, padding):
    """Which crop and flip gave `shown`; each of the (2 * padding + 1)^2 * 2 gives another picture of random pixels."""
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            for flip in (False, True):
                if np.array_equal(pad_crop_flip(image, top, left, flip, padding), shown):
                    return top, left, flip
    return None


@pytest.mark.parametrize(
    ("shape", "padding"),
    [((3, 32, 32), 4), ((1, 12, 12), 4), ((3, 8, 11), 4), ((2, 11, 8), 2), ((3, 9, 9), 1), ((1, 5, 5), 0)],
)
def test_every_view_is_one_pad_crop_flip_of_its_image(shape, padding):
    images = pictures(12, *shape)
    shown = cropped(images, padding=padding)
    assert shown.dtype == torch.uint8
    assert shown.shape == images.shape
    for image, view in zip(images.numpy(), shown.numpy(), strict=True):
        assert find_transformation(image, view, padding) is not None


def transformations(count, size=6, padding=2, seed=1):
    """Which transformation each of `count` views of one picture is."""
    image = pictures(1, 1, size, size)
    table = {
        pad_crop_flip(image[0].numpy(), top, left, flip, padding).tobytes(): (top, left, flip)
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
        for flip in (False, True)
    }
    assert len(table) == (2 * padding + 1) ** 2 * 2, "the transformations can be told apart"
    shown = cropped(image.expand(count, -1, -1, -1), seed, padding=padding)
    return [table[view.tobytes()] for view in shown.numpy()]


def test_all_crops_and_flips_are_equally_likely():
    """The default padding of 4: 81 crops, each flipped or not."""
    found = Counter(transformations(162 * 60, size=10, padding=4))
    assert len(found) == 162
    assert stats.chisquare(list(found.values())).pvalue > 1e-4


def test_each_image_is_transformed_on_its_own():
    """What happens to one image says nothing about its neighbour in the batch."""
    found = transformations(50 * 100)
    pairs = Counter((a[2], b[2]) for a, b in zip(found[::2], found[1::2], strict=True))
    assert stats.chisquare([pairs[a, b] for a in (0, 1) for b in (0, 1)]).pvalue > 1e-4
    for axis in (0, 1):
        pairs = Counter((a[axis], b[axis]) for a, b in zip(found[::2], found[1::2], strict=True))
        assert len(pairs) == 25
        assert stats.chisquare(list(pairs.values())).pvalue > 1e-4


def test_all_channels_move_together():
    grey = pictures(20, 1).expand(-1, 3, -1, -1)
    shown = cropped(grey)
    assert torch.equal(shown[:, 0], shown[:, 1])
    assert torch.equal(shown[:, 0], shown[:, 2])


def test_padding_is_black_before_normalisation():
    white = torch.full((200, 3, 16, 16), 255, dtype=torch.uint8)
    shown = CropFlip(Normalize(MEAN, STD), generator(0, "augment"))(white)
    assert shown.dtype == torch.float32
    values = {channel: set(shown[:, channel].unique().tolist()) for channel in range(3)}
    for channel, (mean, std) in enumerate(zip(MEAN, STD, strict=True)):
        assert sorted(values[channel]) == pytest.approx([-mean / std, (1 - mean) / std], abs=1e-6)


def test_it_is_the_crop_then_normalize():
    images = pictures(6)
    shown = CropFlip(Normalize(MEAN, STD), generator(3, "augment"))(images)
    assert torch.equal(shown, Normalize(MEAN, STD)(cropped(images, 3)))


def test_without_padding_it_only_flips():
    images = pictures(40)
    shown = cropped(images, padding=0)
    flipped = [torch.equal(view, image.flip(-1)) for image, view in zip(images, shown, strict=True)]
    kept = [torch.equal(view, image) for image, view in zip(images, shown, strict=True)]
    assert all(a != b for a, b in zip(flipped, kept, strict=True))
    assert any(flipped)
    assert any(kept)


def test_same_generator_same_views():
    images = pictures(8)
    assert torch.equal(cropped(images, 5), cropped(images, 5))
    assert not torch.equal(cropped(images, 5), cropped(images, 6))


def test_views_are_drawn_anew():
    view, images = CropFlip(Normalize(), generator(0, "augment")), pictures(8)
    assert not torch.equal(view(images), view(images))


def test_the_global_generator_and_the_images_are_left_alone():
    before, images = torch.get_rng_state(), pictures(4)
    copy = images.clone()
    cropped(images)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(images, copy)


def test_memory_layout_does_not_matter():
    images = pictures(6)
    assert torch.equal(cropped(images.contiguous(memory_format=torch.channels_last)), cropped(images))
    wide = torch.cat([images, images], dim=3)
    assert torch.equal(cropped(wide[..., :32]), cropped(images))


# --- views that draw for each sample ---------------------------------------------------------------------------------


class LikeTorchvision(nn.Module):
    """Draws once per call, in Python, whatever it is given: (..., C, H, W)."""

    def forward(self, *inputs):
        (image,) = inputs
        shift = int(torch.randint(0, 24, (1,)).item())
        return image.roll(shift, -1)


class OwnGenerator:
    def __init__(self):
        self.generator = generator(0, "view")

    def __call__(self, image):
        return image + torch.rand(1, generator=self.generator).item()


ONCE = {
    "torchvision": LikeTorchvision(),
    "python": lambda x: x + random.random(),
    "numpy": lambda x: x + np.random.rand(),
    "own": OwnGenerator(),
    "noise": lambda x: x + torch.rand(()),  # which vmap can compute at once
}


@pytest.mark.parametrize("name", ONCE)
def test_every_sample_has_a_draw_of_its_own(name):
    copies = torch.rand(1, 3, 8, 24).repeat(24, 1, 1, 1)
    view = per_sample(ONCE[name])
    for _ in range(2):
        made = view(copies)
        assert made.shape == copies.shape
        assert len(made.unique(dim=0)) > 8, "24 copies must not give one view"
    assert view._at_once == (name == "noise")


def test_one_by_one_is_the_transform_of_each_sample():
    images = pictures(9).float()
    torch.manual_seed(3)
    expected = torch.stack([ONCE["torchvision"](image) for image in images])
    torch.manual_seed(3)
    assert torch.equal(per_sample(ONCE["torchvision"])(images), expected)


def test_samples_of_several_tensors():
    x = {"image": torch.rand(5, 3, 4, 4), "size": torch.arange(5)}
    made = per_sample(lambda one: {"image": one["image"] * int(one["size"]), "size": one["size"] + 1})(x)
    assert torch.equal(made["image"], x["image"] * x["size"].view(-1, 1, 1, 1))
    assert torch.equal(made["size"], x["size"] + 1)


def test_a_transform_that_works_in_place_is_applied_once():
    """Also if it turns out, when all samples were shifted at once, that they must be computed one by one."""
    x = torch.rand(4, 3)
    made = per_sample(lambda one: one.sub_(0.5) * int(one.sum() < 9))(x.clone())
    assert torch.equal(made, x - 0.5)


def test_an_error_of_the_transform_is_its_own():
    with pytest.raises(ZeroDivisionError):
        per_sample(lambda x: x / (1 // 0))(torch.rand(2, 3))


def test_targets_are_not_changed_one_by_one():
    with pytest.raises(UsageError, match="wants its targets as well: give it to augment as it is"):
        per_sample(lambda x, y: (x, y))


def learner_with(augment, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return hf.ExperienceReplay(model, optimizer, buffer_size=8, augment=augment, **options)


def minibatches(count=2):
    draw = generator(0, "minibatches")
    for _ in range(count):
        yield torch.rand(6, 3, 4, 24, generator=draw), torch.randint(4, (6,), generator=draw)


@pytest.mark.parametrize("name", ONCE)
def test_a_view_that_draws_once_for_all_rows_is_told_of_once(name):
    learner = learner_with(ONCE[name])
    with pytest.warns(UserWarning, match=r"draws once.*hf.per_sample") as caught:
        assert len([learner.observe(x, y) for x, y in minibatches()]) == 2
    assert [warning.filename for warning in caught] == [__file__]
    x, y = next(minibatches())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner_with(per_sample(ONCE[name])).observe(x, y)
        learner_with(ONCE[name], validate=False).observe(x, y)


@pytest.mark.parametrize(
    "view",
    [
        None,
        lambda x: x / 2,
        lambda x: x + torch.rand(len(x), 1, 1, 1),
        lambda x: torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x),
        lambda x, y: (x, y),
    ],
)
def test_other_views_are_not_complained_of(view):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in minibatches():
            learner_with(view).observe(x, y)


def with_generators():
    noise, draw = generator(0, "noise"), np.random.default_rng(0)
    return lambda x: x + torch.rand((), generator=noise) + draw.random()


@pytest.mark.parametrize("name", [*ONCE, "rows", "closure"])
def test_looking_at_a_view_moves_no_generator(name):
    """The same steps with and without validation."""
    found = []
    for validate in (True, False):
        made = {"own": OwnGenerator, "closure": with_generators}
        view = made[name]() if name in made else ONCE.get(name, lambda x: x + torch.rand(len(x), 1, 1, 1))
        learner = learner_with(view, validate=validate)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append([learner.observe(x, y).total.item() for x, y in minibatches(4)])
    assert found[0] == found[1]
