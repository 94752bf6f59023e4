from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.analysis import (
    BENCHMARK_CORRUPTIONS,
    CORRUPTIONS,
    CorruptedImages,
    PublishedCorruptions,
    corrupt,
    robustness,
)
from holdfast.errors import DataError, UsageError


def bright_or_dark(images: Tensor) -> Tensor:
    """A classifier of two classes: 1 where an image's mean is above middle grey."""
    mean = images.float().mean((1, 2, 3)) / 255
    return torch.stack((0.45 - mean, mean - 0.45), dim=1)


@pytest.fixture
def labels(photos: Tensor) -> Tensor:
    return bright_or_dark(photos).argmax(1)


def test_all_fifteen(photos: Tensor, labels: Tensor) -> None:
    seen: list[tuple[int, int, str]] = []
    result = robustness(bright_or_dark, photos, labels, progress=lambda *step: seen.append(step), batch_size=7)
    assert result.source == "generated"
    assert result.clean == 100
    assert list(result.accuracy) == list(BENCHMARK_CORRUPTIONS)
    for name, values in result.accuracy.items():
        expected = [
            100 * float((bright_or_dark(corrupt(photos, name, s)).argmax(1) == labels).double().mean())
            for s in (1, 2, 3, 4, 5)
        ]
        assert values == pytest.approx(expected)
        assert result.per_corruption[name] == pytest.approx(fmean(values))
    assert result.mra == pytest.approx(fmean(result.per_corruption.values()))
    assert list(result.per_category) == ["noise", "blur", "weather", "digital"]
    assert result.per_category["noise"] == pytest.approx(
        fmean(result.per_corruption[name] for name in ("gaussian_noise", "shot_noise", "impulse_noise"))
    )
    assert seen[0] == (1, 75, "gaussian_noise")
    assert seen[-1] == (75, 75, "jpeg_compression")


def test_the_extra_four_do_not_count(photos: Tensor, labels: Tensor) -> None:
    base = robustness(bright_or_dark, photos, labels, severities=[5])
    every = robustness(bright_or_dark, photos, labels, CORRUPTIONS, severities=[5])
    assert every.mra == base.mra
    assert "extra" in every.per_category
    assert every.severities == (5,)


def test_no_mra_from_a_part_of_the_benchmark(photos: Tensor, labels: Tensor) -> None:
    result = robustness(bright_or_dark, photos, labels, ["fog", "snow"], severities=[2, 4])
    assert result.mra is None
    assert list(result.per_category) == ["weather"]


def test_seeded(photos: Tensor, labels: Tensor) -> None:
    def run(seed: int) -> list[float]:
        seen = []

        def predict(images: Tensor) -> Tensor:
            seen.append(float(images.float().mean()))
            return bright_or_dark(images)

        robustness(predict, photos, labels, ["fog"], seed=seed)
        return seen

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was generated, in order."""
    made: list[tuple[str, int]] = []
    module = sys.modules["holdfast.analysis.robustness"]  # the package has a function of that name
    monkeypatch.setattr(module, "corrupt", lambda *args: made.append(args[1:3]) or corrupt(*args))
    return made


def test_corrupted_images_are_made_once_for_all_models(photos: Tensor, labels: Tensor, count: list) -> None:
    made = CorruptedImages()
    options = {"corruptions": ["fog", "contrast"], "severities": [1, 5]}
    alone = robustness(bright_or_dark, photos, labels, **options)
    count.clear()
    shared = [robustness(bright_or_dark, photos.clone(), labels, **options, made=made) for _ in range(3)]
    assert shared == [alone] * 3
    assert count == [("fog", 1), ("fog", 5), ("contrast", 1), ("contrast", 5)]
    others = robustness(bright_or_dark, photos.flip(0), labels.flip(0), **options, made=made)
    assert len(count) == 8  # other images, other corruptions of them
    assert others.clean == 100
    robustness(bright_or_dark, photos.flip(0), labels.flip(0), **options, made=made, seed=1)
    assert len(count) == 12


def test_corrupted_images_take_no_more_memory_than_allowed(photos: Tensor, labels: Tensor, count: list) -> None:
    made = CorruptedImages(most_bytes=2 * photos.nbytes)
    for _ in range(2):
        robustness(bright_or_dark, photos, labels, ["fog"], made=made)
    assert [severity for _, severity in count] == [1, 2, 3, 4, 5, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"corruptions": ["fogg"]}, "did you mean 'fog'"),
        ({"corruptions": []}, "at least one"),
        ({"corruptions": ["fog", "fog"]}, "twice"),
        ({"severities": [0, 1]}, "severities"),
        ({"severities": []}, "severities"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "one label per image"),
        ({"predict": lambda images: torch.full((len(images), 2), float("nan"))}, "NaN"),
        ({"predict": lambda images: torch.zeros(len(images))}, "logits"),
        ({"predict": lambda images: torch.zeros(len(images), 1)}, r"labels must lie in 0\.\.0"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_input_is_told(arguments: dict, message: str, photos: Tensor, labels: Tensor) -> None:
    defaults = {"predict": bright_or_dark, "images": photos, "labels": labels, "corruptions": ["fog"]}
    with pytest.raises(UsageError, match=message):
        robustness(**(defaults | arguments))


# --- the published files ---


def sparse(file: Path, shape: tuple[int, ...]) -> np.memmap:
    """A .npy file full of zeros that takes no room on the disk."""
    return np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)


@pytest.fixture
def cifar() -> tuple[Tensor, Tensor]:
    return torch.zeros(10_000, 3, 32, 32, dtype=torch.uint8), torch.arange(10_000) % 2


@pytest.fixture
def published(tmp_path: Path, cifar: tuple[Tensor, Tensor]) -> Path:
    """Fog whose severity s, image i has the level s * 40 in red if i is odd."""
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(cifar[1].numpy().astype(np.uint8), 5))
    fog = sparse(folder / "fog.npy", PublishedCorruptions.SHAPE)
    for severity in (1, 4):
        fog[(severity - 1) * 10_000 + 1 : severity * 10_000 : 2, :, :, 0] = 40 * severity
    fog.flush()
    return folder


def red(images: Tensor) -> Tensor:
    level = images[:, 0, 0, 0].float()
    return torch.stack((torch.full_like(level, 60), level), dim=1)


def test_published_files_are_used_severity_by_severity(published: Path, cifar: tuple[Tensor, Tensor]) -> None:
    result = robustness(red, *cifar, ["fog"], severities=[1, 4], published=published.parent)
    assert result.source == "published"
    assert result.accuracy["fog"] == [50, 100]  # 40 is below the classifier's 60, 160 above
    images = PublishedCorruptions(published).images("fog", 4)
    assert images.shape == (10_000, 3, 32, 32)
    assert images[1, :, 0, 0].tolist() == [160, 0, 0]


def test_the_folder_itself_may_be_given(published: Path) -> None:
    assert PublishedCorruptions.find(published) == PublishedCorruptions.find(published.parent)


def test_without_the_folder_images_are_generated(tmp_path: Path, photos: Tensor, labels: Tensor) -> None:
    result = robustness(bright_or_dark, photos, labels, ["contrast"], severities=[1], published=tmp_path)
    assert result.source == "generated"


def test_a_missing_file_is_told(published: Path, cifar: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(DataError, match=r"snow\.npy is missing"):
        robustness(red, *cifar, ["fog", "snow"], published=published)


def test_other_labels_are_told(published: Path, cifar: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(DataError, match="labels of these test images"):
        robustness(red, cifar[0], 1 - cifar[1], ["fog"], published=published)


def test_a_file_of_another_shape_is_told(published: Path, cifar: tuple[Tensor, Tensor]) -> None:
    sparse(published / "snow.npy", (100, 32, 32, 3))
    with pytest.raises(DataError, match="expected integers"):
        robustness(red, *cifar, ["snow"], published=published)


def test_damaged_files_and_pickles_are_not_read(published: Path, cifar: tuple[Tensor, Tensor]) -> None:
    (published / "snow.npy").write_bytes(b"not an array")
    np.save(published / "frost.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name in ("snow", "frost"):
        with pytest.raises(DataError, match="cannot be read"):
            robustness(red, *cifar, [name], published=published)


def test_a_part_of_the_test_set_cannot_use_the_published_files(published: Path, cifar: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(UsageError, match="10,000 CIFAR-10 test images"):
        robustness(red, cifar[0][:50], cifar[1][:50], ["fog"], published=published)
