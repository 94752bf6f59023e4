"""MNIST-360 against a slow simulation of the stream: one image at a time, turned by Pillow."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.conftest import image_set
from holdfast.benchmarks import Benchmark, make_benchmark
from holdfast.benchmarks.mnist360 import plan_batches
from holdfast.config import RunConfig
from holdfast.data import Dataset

NOWHERE = Path("nowhere")
COUNTS = [61, 80, 47, 53, 72, 36, 49, 58, 66, 40]  # images of each digit, not all divisible by 12, and some 9s


def config(batch_size: int, **changes) -> RunConfig:
    return RunConfig.preset("mnist-360", "sgd", batch_size=batch_size, **changes)


def turned(image: torch.Tensor, angle: float) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.fromarray(image[0].numpy()).rotate(angle, Image.Resampling.NEAREST)))[None]


def chunks_of(labels: torch.Tensor) -> list[list[list[int]]]:
    """The image numbers of each digit 0 to 8 in 12 consecutive chunks of n // 12 + 1, the last one shorter."""
    by_digit = [[i for i, label in enumerate(labels.tolist()) if label == digit] for digit in range(9)]
    sizes = [len(indices) // 12 + 1 for indices in by_digit]
    return [
        [indices[k * size : (k + 1) * size] for k in range(12)] for indices, size in zip(by_digit, sizes, strict=True)
    ]


def simulate(chunks: list[list[list[int]]], batch_size: int):
    """The stream as batches of (digit, angle, chunk the image must come from), image by image."""
    totals = [sum(len(part) for part in row) for row in chunks]
    shown, opened = Counter(), Counter()
    batches = []
    for _ in range(6):
        for pair in [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 0)]:
            chunk, left = {}, {}
            for digit in pair:
                chunk[digit] = chunks[digit][opened[digit]]
                left[digit] = len(chunk[digit])
                opened[digit] += 1
            while all(left.values()):
                first, second = pair
                share = min(round(Fraction(left[first] * batch_size, left[first] + left[second])), left[first])
                wanted = {first: share, second: min(batch_size - share, left[second])}
                batch = []
                for digit in pair:
                    for _ in range(wanted[digit]):
                        batch.append((digit, (digit - 1) * 60 + shown[digit] * 360 / totals[digit], chunk[digit]))
                        shown[digit] += 1
                        left[digit] -= 1
                batches.append(batch)
    assert all(opened[digit] == 12 for digit in range(9))
    return batches


def stream_of(benchmark: Benchmark, batch_size: int):
    """The images and labels of each batch, as training sees them."""
    (task,) = benchmark.tasks
    train = task.train()
    batches = list(benchmark.batches(len(train.labels), batch_size, torch.Generator()))
    # The stream is run through once, in order.
    assert torch.cat(batches).tolist() == list(range(len(train.labels)))
    return [(train.images[batch], train.labels[batch]) for batch in batches]


@pytest.fixture
def digits(replace_data) -> Dataset:
    labels = torch.arange(10).repeat_interleave(torch.tensor(COUNTS))
    data = Dataset(image_set(labels, (1, 28, 28), seed=1), image_set(labels[::2], (1, 28, 28), seed=2), 10)
    replace_data(data)
    return data


@pytest.mark.parametrize("batch_size", [4, 16, 32, 1])
def test_every_image_of_the_stream(digits, batch_size):
    expected = simulate(chunks_of(digits.train.labels), batch_size)
    found = stream_of(make_benchmark(config(batch_size, seed=3), NOWHERE), batch_size)
    assert len(found) == len(expected)
    used = set()
    for (images, labels), wanted in zip(found, expected, strict=True):
        assert labels.tolist() == [digit for digit, _, _ in wanted]
        for image, (_, angle, chunk) in zip(images, wanted, strict=True):
            # Which of the images of the chunk it is, is up to the shuffle; but it is one of them, at this angle.
            (source,) = [i for i in chunk if torch.equal(turned(digits.train.images[i], angle), image)]
            assert source not in used
            used.add(source)


def test_batches_are_full_except_the_last_of_a_visit(digits):
    found = stream_of(make_benchmark(config(4), NOWHERE), 4)
    pairs = []
    for _, labels in found:
        assert len(labels) <= 4
        pairs.append(tuple(sorted(set(labels.tolist()))))
    short = [i for i, (_, labels) in enumerate(found) if len(labels) < 4]
    assert len(short) <= 54
    # After a short batch the pair is another.
    assert all(pairs[i + 1] != pairs[i] for i in short if i + 1 < len(pairs))


def test_what_is_left_of_a_chunk_when_the_pair_changes_is_dropped():
    # Even digits come two at a time, odd ones three: the third is never shown.
    chunks = [[2 + digit % 2] * 12 for digit in range(9)]
    plan = plan_batches(chunks, 2)
    assert [batch.digits for batch in plan[:6]] == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]
    assert {batch.counts for batch in plan} == {(1, 1)}
    assert len(plan) == 6 * 9 * 2


def test_chunks_are_shuffled_by_the_seed(digits):
    first, other, again = (make_benchmark(config(16, seed=seed), NOWHERE).tasks[0].train() for seed in (0, 1, 0))
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, other.labels)  # the same digits at the same time
    assert not torch.equal(first.images, other.images)
    # Shuffled at all: the first chunk of digit 0 does not come in the order of the data set.
    chunk = chunks_of(digits.train.labels)[0][0]
    shown = first.images[first.labels == 0][: len(chunk)]
    in_order = torch.stack([turned(digits.train.images[i], -60 + k * 360 / COUNTS[0]) for k, i in enumerate(chunk)])
    assert not torch.equal(shown[: len(in_order)], in_order[: len(shown)])


def test_test_set_turns_each_digit_through_the_full_circle(digits):
    (task,) = make_benchmark(config(16), NOWHERE).tasks
    assert 9 not in task.test.labels
    assert len(task.test.labels) == (digits.test.labels < 9).sum()
    for digit in range(9):
        originals = digits.test.images[digits.test.labels == digit]
        expected = [turned(image, k * 360 / len(originals)) for k, image in enumerate(originals)]
        assert torch.equal(task.test.images[task.test.labels == digit], torch.stack(expected))


def test_ten_outputs_one_task_and_no_nines(digits):
    benchmark = make_benchmark(config(16), NOWHERE)
    assert benchmark.classes == 10
    assert benchmark.shape == (1, 28, 28)
    assert len(benchmark.tasks) == 1
    assert benchmark.tasks[0].classes == tuple(range(10))
    assert benchmark.random_view is None
    assert set(benchmark.tasks[0].train().labels.tolist()) == set(range(9))


def test_the_bundled_digits(replace_data, mnist):
    replace_data(mnist)
    batch_size = 16
    expected = simulate(chunks_of(mnist.train.labels), batch_size)
    found = stream_of(make_benchmark(config(batch_size), NOWHERE), batch_size)
    assert [labels.tolist() for _, labels in found] == [[digit for digit, _, _ in batch] for batch in expected]
    assert sum(len(labels) for _, labels in found) > 50_000
    # Too many to look at each: a few from all over the stream.
    for number in range(7, len(found), len(found) // 5):
        (images, _), wanted = found[number], expected[number]
        _, angle, chunk = wanted[-1]
        assert any(torch.equal(turned(mnist.train.images[i], angle), images[-1]) for i in chunk)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 16, 32, 1000])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 30), (5, 5), (7, 40), (12, 13)])
def test_plan_never_takes_more_than_there_is(sizes, batch_size):
    chunks = [[sizes[(digit + visit) % 2] for visit in range(12)] for digit in range(9)]
    plan = plan_batches(chunks, batch_size)
    taken = Counter()
    for (a, b), (of_a, of_b), _ in plan:
        assert b == (a + 1) % 9
        assert of_a >= 0
        assert of_b >= 0
        assert 1 <= of_a + of_b <= batch_size
        taken[a] += of_a
        taken[b] += of_b
    assert all(taken[digit] <= sum(chunks[digit]) for digit in range(9))
    visits = [batch.digits for n, batch in enumerate(plan) if n == 0 or batch.digits != plan[n - 1].digits]
    assert visits == [(a, (a + 1) % 9) for a in range(9)] * 6


@pytest.mark.parametrize("limit", [20, 130, 400])
def test_train_limit_shortens_the_stream_to_whole_batches(digits, limit):
    benchmark = make_benchmark(config(4, train_limit=limit), NOWHERE)
    train = benchmark.tasks[0].train()
    assert len(train.labels) <= limit
    batches = list(benchmark.batches(len(train.labels), 4, torch.Generator()))
    assert batches
    covered = torch.cat(batches)
    assert covered.tolist() == list(range(len(covered)))
    assert len(train.labels) - len(covered) < 4
