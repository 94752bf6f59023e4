"""Benchmarks made elsewhere: what no run could use, or no command could read afterwards, is refused in a sentence."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.benchmarks import BENCHMARKS, Benchmark, Task, make_benchmark
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.errors import UsageError

CONFIG = RunConfig(benchmark="own", method="sgd", buffer_size=None)
NOWHERE = Path("nowhere")


def images(count=6, dtype=torch.uint8, labels=torch.int64, side=8) -> ImageSet:
    pixels = torch.randint(0, 256, (count, 1, side, side), generator=torch.Generator().manual_seed(0))
    return ImageSet(pixels.to(dtype), (torch.arange(count) % 2).to(labels))


GOOD = Benchmark(2, (1, 8, 8), (Task((0, 1), images, images()),))


def with_sets(train=images, test=None) -> Benchmark:
    return replace(GOOD, tasks=(GOOD.tasks[0], Task((0, 1), train, images() if test is None else test)))


@pytest.fixture
def made(monkeypatch):
    def make(benchmark):
        monkeypatch.setitem(BENCHMARKS._entries, "own", lambda config, root: benchmark)
        return make_benchmark(CONFIG, NOWHERE)

    return make


@pytest.mark.parametrize(
    ("benchmark", "sentence"),
    [
        (None, "the function of the benchmark own must return a Benchmark, not a NoneType"),
        (GOOD.tasks, "must return a Benchmark, not a tuple"),
        (replace(GOOD, tasks=()), "own has no tasks"),
        (with_sets(test=images(0)), "the test set of task 2 must have images, and a label for each"),
        (with_sets(test=ImageSet(images().images, images().labels[:3])), r"have the shapes \(6, 1, 8, 8\) and \(3,\)"),
        (with_sets(test=images(labels=torch.float32)), "must have whole numbers as labels.*not torch.float32"),
        (with_sets(test=images(labels=torch.bool)), "not torch.bool"),
        (replace(GOOD, classes=1), r"labels of the test set of task 1 lie outside 0\.\.0: 0\.\.1"),
        (
            with_sets(test=images(side=9)),
            r"shape \(1, 9, 9\) for the network, but the benchmark's shape is \(1, 8, 8\)",
        ),
        (with_sets(test=images(dtype=torch.float64)), "the test set of task 2 has torch.float64 for the network"),
    ],
)
def test_what_no_run_could_use_is_refused_before_it(made, benchmark, sentence):
    """A test set of no images ended in a result that no command could read, the others in a traceback."""
    with pytest.raises(UsageError, match=sentence):
        made(benchmark)


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        (lambda: images(0), "the training set of task 2 must have images"),
        (lambda: images(labels=torch.float32), "the training set of task 2 must have whole numbers as labels"),
        (lambda: images(dtype=torch.float16), "the training set of task 2 has torch.float16 for the network"),
        (lambda: ImageSet(images().images, images().labels + 1), r"training set of task 2 lie outside 0\.\.1: 1\.\.2"),
    ],
)
def test_a_training_set_is_checked_when_it_is_made(made, train, sentence):
    """One of no images was said to be a loss that is not finite, with the advice of a smaller learning rate."""
    benchmark = made(with_sets(train=train))
    assert len(benchmark.tasks[0].train().labels) == 6
    with pytest.raises(UsageError, match=sentence):
        benchmark.tasks[1].train()


@pytest.mark.parametrize("labels", [torch.uint8, torch.int32])
@pytest.mark.parametrize("pixels", [torch.uint8, torch.float32])
def test_labels_of_any_whole_type_and_images_of_floats_are_fine(made, labels, pixels):
    made(with_sets(test=images(dtype=pixels, labels=labels)))
    assert hf.run(CONFIG, data=NOWHERE).accuracy >= 0
