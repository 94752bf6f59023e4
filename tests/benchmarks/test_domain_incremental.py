"""Rotated and permuted MNIST: one transformation a task, the same for training and test images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.conftest import small_dataset
from holdfast.benchmarks import domain_incremental, make_benchmark
from holdfast.config import RunConfig
from holdfast.data import Dataset, ImageSet
from holdfast.errors import UsageError

NOWHERE = Path("nowhere")


def config(benchmark: str = "rot-mnist", **changes) -> RunConfig:
    return RunConfig.preset(benchmark, "sgd", **changes)


@pytest.fixture
def same(replace_data) -> Dataset:
    """Digits whose training images are their test images, so that equal transformations give equal images."""
    data = small_dataset(10, (1, 28, 28), train=2, test=2)
    data = Dataset(data.train, data.train, 10)
    replace_data(data)
    return data


@pytest.fixture
def rotations(monkeypatch) -> list[tuple[int, float]]:
    """(how many images, angle) of every rotation made."""
    made = []
    original = domain_incremental.rotate

    def recorded(images, angle):
        made.append((len(images), angle))
        return original(images, angle)

    monkeypatch.setattr(domain_incremental, "rotate", recorded)
    return made


def test_more_tasks_than_memory_has_room_for_are_refused_at_once(replace_data):
    data = small_dataset(10, (1, 28, 28), train=2, test=2)
    replace_data(data._replace(test=ImageSet(data.test.images[:1].expand(10**12, -1, -1, -1), data.test.labels)))
    with pytest.raises(UsageError, match=r"test sets of 3 tasks need 2,352,\d+,\d+,\d+,\d+ bytes .* fewer tasks"):
        make_benchmark(config(tasks=3), NOWHERE)


def test_angles_are_uniform_in_a_half_circle_and_come_from_the_seed(same, rotations):
    by_seed = []
    for seed in (*range(30), 0):
        rotations.clear()
        make_benchmark(config(seed=seed), NOWHERE)
        by_seed.append([angle for _, angle in rotations])
    angles = np.array(by_seed[:30])
    assert angles.shape == (30, 20)
    assert angles.min() >= 0
    assert angles.max() < 180
    assert len(np.unique(angles)) == 600  # different per task and per seed
    assert by_seed[30] == by_seed[0]
    counts = np.histogram(angles, bins=6, range=(0, 180))[0]
    assert ((counts > 65) & (counts < 135)).all()  # 100 expected, more than three standard deviations either way


def test_a_shorter_sequence_is_the_beginning_of_a_longer_one(same, rotations):
    make_benchmark(config(tasks=3), NOWHERE)
    short = list(rotations)
    rotations.clear()
    make_benchmark(config(tasks=20), NOWHERE)
    assert rotations[:3] == short


def test_images_are_pillows_rotation_by_that_angle_in_training_and_test(same, rotations):
    benchmark = make_benchmark(config(tasks=3, seed=5), NOWHERE)
    angles = [angle for _, angle in rotations]
    assert benchmark.shape == (1, 28, 28)
    assert benchmark.classes == 10
    assert benchmark.random_view is None
    for task, angle in zip(benchmark.tasks, angles, strict=True):
        expected = [
            np.asarray(Image.fromarray(image[0].numpy()).rotate(angle, Image.Resampling.NEAREST))
            for image in same.test.images
        ]
        assert torch.equal(task.test.images[:, 0], torch.from_numpy(np.stack(expected)))
        train = task.train()
        assert torch.equal(train.images, task.test.images)
        assert torch.equal(train.labels, same.train.labels)
        assert torch.equal(task.test.labels, same.test.labels)
        assert task.classes == tuple(range(10))


def test_training_images_are_made_only_when_asked_for(replace_data, rotations):
    replace_data(small_dataset(10, (1, 28, 28), train=6, test=3))
    benchmark = make_benchmark(config(tasks=4), NOWHERE)
    assert [count for count, _ in rotations] == [30] * 4  # the test sets
    benchmark.tasks[2].train()
    assert rotations[4:] == [(60, rotations[2][1])]


def test_joint_is_every_task(same):
    benchmark = make_benchmark(config(tasks=3), NOWHERE)
    joint = benchmark.joint()
    assert torch.equal(joint.images, torch.cat([task.test.images for task in benchmark.tasks]))
    assert torch.equal(joint.labels, same.train.labels.repeat(3))


@pytest.mark.parametrize("name", ["rot-mnist", "perm-mnist"])
def test_train_limit(same, name):
    benchmark = make_benchmark(config(name, tasks=2, train_limit=7), NOWHERE)
    for task in benchmark.tasks:
        assert torch.equal(task.train().images, task.test.images[:7])
        assert torch.equal(task.train().labels, task.test.labels[:7])
        assert len(task.test.labels) == 20


def test_permutations_permute_and_are_the_same_in_training_and_test(replace_data):
    # Pixel k holds k // 256 in the first image and k % 256 in the second, so the two together name the pixel.
    data = small_dataset(10, (1, 28, 28))
    pixel = torch.arange(784)
    coded = torch.stack([pixel // 256, pixel % 256]).to(torch.uint8).view(2, 1, 28, 28)
    both = data.train._replace(images=coded, labels=torch.tensor([3, 4]))
    replace_data(Dataset(both, both, 10))

    def orders(seed):
        benchmark = make_benchmark(config("perm-mnist", tasks=4, seed=seed), NOWHERE)
        assert all(torch.equal(task.train().images, task.test.images) for task in benchmark.tasks)
        assert all(task.test.labels.tolist() == [3, 4] for task in benchmark.tasks)
        flat = [task.test.images.flatten(1).long() for task in benchmark.tasks]
        return [(high * 256 + low).tolist() for high, low in flat]

    first, other, again = orders(0), orders(1), orders(0)
    for order in first + other:
        assert sorted(order) == pixel.tolist()
    assert first == again
    assert len({tuple(order) for order in [*first, *other, pixel.tolist()]}) == 9  # all different, none the identity


def test_the_bundled_digits(replace_data, mnist):
    replace_data(mnist)
    benchmark = make_benchmark(config(tasks=1), NOWHERE)
    train = benchmark.tasks[0].train()
    assert train.images.shape == (60_000, 1, 28, 28)
    assert torch.equal(train.labels, mnist.train.labels)
    assert benchmark.tasks[0].test.images.shape == (10_000, 1, 28, 28)
