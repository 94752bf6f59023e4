"""Small data sets in place of the published ones."""

import pytest
import torch

from holdfast.data import Dataset, ImageSet, load

BENCHMARK_FILES = ("class_incremental", "domain_incremental", "mnist360")


def image_set(labels: torch.Tensor, shape: tuple[int, ...], seed: int) -> ImageSet:
    """Noise for these labels, in random order, each image unlike any other."""
    draw = torch.Generator().manual_seed(seed)
    labels = labels[torch.randperm(len(labels), generator=draw)]
    return ImageSet(torch.randint(1, 256, (len(labels), *shape), generator=draw, dtype=torch.uint8), labels)


def small_dataset(classes: int, shape: tuple[int, ...], train: int = 6, test: int = 3) -> Dataset:
    """`train` and `test` images of every class."""
    labels = torch.arange(classes)
    return Dataset(
        image_set(labels.repeat(train), shape, seed=1), image_set(labels.repeat(test), shape, seed=2), classes
    )


@pytest.fixture
def replace_data(monkeypatch):
    """Call with a data set: benchmarks get it whatever they load. Returns the names they asked for."""

    def use(data: Dataset) -> list[str]:
        asked = []

        def instead(name, root):
            asked.append(name)
            return data

        for file in BENCHMARK_FILES:
            monkeypatch.setattr(f"holdfast.benchmarks.{file}.shared_dataset", instead)
        return asked

    return use


@pytest.fixture(scope="session")
def mnist() -> Dataset:
    return load("mnist")
