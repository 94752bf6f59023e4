"""Class-incremental benchmarks: every sample in exactly one task, classes in label order."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.conftest import small_dataset
from holdfast.augment import CropFlip
from holdfast.benchmarks import BENCHMARKS, make_benchmark, required_data
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.workload import SHAPES

NOWHERE = Path("nowhere")
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615)
TINY_MEAN, TINY_STD = (0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821)


def config(benchmark: str, **changes) -> RunConfig:
    return RunConfig.preset(benchmark, "sgd", **changes)


@pytest.mark.parametrize(
    ("name", "data", "classes", "side", "tasks"),
    [
        ("seq-cifar10", "cifar10", 10, 32, 5),
        ("seq-cifar100", "cifar100", 100, 32, 5),
        ("seq-cifar100", "cifar100", 100, 32, 10),
        ("seq-cifar100", "cifar100", 100, 32, 20),
        ("seq-tinyimagenet", "tinyimagenet", 200, 64, 10),
        ("seq-tinyimagenet", "tinyimagenet", 200, 64, None),
    ],
)
def test_every_sample_in_exactly_one_task(replace_data, name, data, classes, side, tasks):
    source = small_dataset(classes, (3, side, side), train=3, test=2)
    asked = replace_data(source)
    benchmark = make_benchmark(config(name, tasks=tasks), NOWHERE)
    assert asked == [data]
    assert benchmark.classes == classes
    assert benchmark.shape == (3, side, side)
    assert len(benchmark.tasks) == (tasks or 10)
    width = classes // len(benchmark.tasks)
    for number, task in enumerate(benchmark.tasks):
        expected = range(number * width, (number + 1) * width)
        assert task.classes == tuple(expected)
        for found, everything in ((task.train(), source.train), (task.test, source.test)):
            # In the order of the data set, nothing missing, nothing twice.
            mine = [i for i, label in enumerate(everything.labels.tolist()) if label in expected]
            assert found.labels.tolist() == [int(everything.labels[i]) for i in mine]
            assert torch.equal(found.images, everything.images[mine])
            assert found.images.dtype == torch.uint8


def test_classes_are_in_label_order_whatever_the_seed(replace_data):
    replace_data(small_dataset(10, (3, 32, 32)))
    for seed in range(3):
        benchmark = make_benchmark(config("seq-cifar10", seed=seed), NOWHERE)
        assert [task.classes for task in benchmark.tasks] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


@pytest.mark.parametrize("tasks", [3, 4, 20, 11])
def test_uneven_split_is_refused(replace_data, tasks):
    replace_data(small_dataset(10, (3, 32, 32)))
    with pytest.raises(UsageError, match=f"10 classes cannot be split into {tasks} equal tasks"):
        make_benchmark(config("seq-cifar10", tasks=tasks), NOWHERE)


def test_one_task_and_one_class_a_task(replace_data):
    replace_data(small_dataset(10, (3, 32, 32)))
    assert make_benchmark(config("seq-cifar10", tasks=1), NOWHERE).tasks[0].classes == tuple(range(10))
    tasks = make_benchmark(config("seq-cifar10", tasks=10), NOWHERE).tasks
    assert [task.classes for task in tasks] == [(k,) for k in range(10)]


@pytest.mark.parametrize(
    ("name", "classes", "mean", "std"),
    [
        ("seq-cifar10", 10, CIFAR_MEAN, CIFAR_STD),
        ("seq-cifar100", 100, CIFAR_MEAN, CIFAR_STD),
        ("seq-tinyimagenet", 200, TINY_MEAN, TINY_STD),
    ],
)
def test_views(replace_data, name, classes, mean, std):
    data = small_dataset(classes, (3, 8, 8), train=1, test=1)
    replace_data(data)
    benchmark = make_benchmark(config(name), NOWHERE)
    images = data.test.images[:4]
    expected = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(benchmark.normalize(images), expected.float())
    assert isinstance(benchmark.train_view(torch.Generator()), CropFlip)


def test_joint_is_all_the_training_data(replace_data):
    data = small_dataset(10, (3, 32, 32))
    replace_data(data)
    joint = make_benchmark(config("seq-cifar10"), NOWHERE).joint()
    order = data.train.labels.div(2, rounding_mode="floor").sort(stable=True).indices
    assert torch.equal(joint.images, data.train.images[order])
    assert torch.equal(joint.labels, data.train.labels[order])


def test_train_limit_takes_the_first_samples_of_each_task_and_leaves_the_test_set(replace_data):
    data = small_dataset(10, (3, 32, 32))
    replace_data(data)
    full, limited = (make_benchmark(config("seq-cifar10", train_limit=limit), NOWHERE) for limit in (None, 5))
    for task, short in zip(full.tasks, limited.tasks, strict=True):
        assert torch.equal(short.train().images, task.train().images[:5])
        assert torch.equal(short.train().labels, task.train().labels[:5])
        assert torch.equal(short.test.images, task.test.images)
    assert len(limited.joint().labels) == 25


def test_test_labels_out_of_range_are_refused(replace_data, monkeypatch):
    replace_data(small_dataset(10, (3, 32, 32)))

    def broken(config, root):
        return replace(BENCHMARKS["seq-cifar10"](config, root), classes=9)

    monkeypatch.setitem(BENCHMARKS._entries, "broken", broken)
    with pytest.raises(UsageError, match=r"labels of the test set of task 5 lie outside 0\.\.8: 8\.\.9"):
        make_benchmark(config("broken"), NOWHERE)


def test_unknown_benchmark_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'seq-cifar10'"):
        make_benchmark(config("seq-cifar11"), NOWHERE)


def test_seq_mnist_on_the_bundled_files(replace_data, mnist):
    replace_data(mnist)
    benchmark = make_benchmark(config("seq-mnist"), NOWHERE)
    assert [task.classes for task in benchmark.tasks] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    # The numbers of digits in MNIST, as published.
    assert [len(task.train().labels) for task in benchmark.tasks] == [12665, 12089, 11263, 12183, 11800]
    assert [len(task.test.labels) for task in benchmark.tasks] == [2115, 2042, 1874, 1986, 1983]
    assert benchmark.shape == (1, 28, 28)
    view = benchmark.train_view(torch.Generator())(mnist.test.images[:2])
    torch.testing.assert_close(view, mnist.test.images[:2].float() / 255)  # no augmentation, pixels in [0, 1]


def test_batches_visit_every_sample_once_in_random_order(replace_data):
    replace_data(small_dataset(10, (3, 32, 32)))
    benchmark = make_benchmark(config("seq-cifar10"), NOWHERE)
    draw = torch.Generator().manual_seed(0)
    first, second = (list(benchmark.batches(50, 16, draw)) for _ in range(2))
    assert [len(batch) for batch in first] == [16, 16, 16, 2]
    for epoch in (first, second):
        assert sorted(torch.cat(epoch).tolist()) == list(range(50))
    assert not torch.equal(torch.cat(first), torch.cat(second))
    again = list(benchmark.batches(50, 16, torch.Generator().manual_seed(0)))
    assert torch.equal(torch.cat(first), torch.cat(again))


def rows(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_validation_tests_on_training_samples_that_are_not_trained_on(replace_data):
    replace_data(small_dataset(10, (3, 32, 32), train=10))
    plain = make_benchmark(config("seq-cifar10"), NOWHERE)
    for seed in (0, 1):  # the same samples for every seed, so that settings are compared on one ground
        tuned = make_benchmark(config("seq-cifar10", validation=0.3, seed=seed), NOWHERE)
        for full, task in zip(plain.tasks, tuned.tasks, strict=True):
            kept, held = rows(task.train().images), rows(task.test.images)
            assert len(held) == 6
            assert not kept & held
            assert kept | held == rows(full.train().images)
            assert set(task.test.labels.tolist()) <= set(task.classes)
            assert torch.equal(task.train().labels, task.train().labels)
        assert rows(tuned.tasks[0].test.images) == rows(
            make_benchmark(config("seq-cifar10", validation=0.3), NOWHERE).tasks[0].test.images
        )


def test_validation_needs_samples_and_a_stream_without_an_order_of_its_own(replace_data):
    replace_data(small_dataset(10, (3, 32, 32), train=10))
    with pytest.raises(UsageError, match="takes no sample"):
        make_benchmark(config("seq-cifar10", validation=0.01), NOWHERE)
    with pytest.raises(UsageError, match="leaves no sample of a task to train on"):
        make_benchmark(config("seq-cifar10", validation=0.99), NOWHERE)
    replace_data(small_dataset(10, (1, 28, 28), train=24))
    with pytest.raises(UsageError, match="one ordered stream"):
        make_benchmark(config("mnist-360", validation=0.1), NOWHERE)


@pytest.mark.parametrize(
    ("name", "datasets"),
    [
        ("seq-cifar10", ("cifar10",)),
        ("seq-cifar100", ("cifar100",)),
        ("seq-tinyimagenet", ("tinyimagenet",)),
        *((name, ("mnist",)) for name in ("seq-mnist", "rot-mnist", "perm-mnist", "mnist-360")),
    ],
)
def test_the_data_a_benchmark_needs_is_known_before_it_is_made(name, datasets, replace_data):
    asked = replace_data(small_dataset(10, SHAPES[name][0], train=30))
    assert required_data(name) == datasets
    make_benchmark(config(name), NOWHERE)
    assert tuple(asked) == datasets


def test_a_benchmark_that_does_not_say_what_it_needs(monkeypatch):
    monkeypatch.setattr(BENCHMARKS, "_entries", {"quiet": lambda config, root: None})
    assert required_data("quiet") == ()
    with pytest.raises(UsageError, match="unknown benchmark 'loud': known: quiet"):
        required_data("loud")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_only_a_stream_without_boundaries_hides_them(name, replace_data):
    replace_data(small_dataset(10, SHAPES[name][0], train=30))
    assert make_benchmark(config(name), NOWHERE).boundaries is (name != "mnist-360")
