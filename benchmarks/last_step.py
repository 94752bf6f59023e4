"""Why accuracy can fall in the very last step of S-CIFAR-10: its minibatch has 16 samples, and a seed decides of which.

    python benchmarks/last_step.py counts --data data > results/second-opinion/last-minibatches.jsonl
    python benchmarks/last_step.py tried --data data > results/second-opinion/last-step.jsonl

A task has 10,000 samples of two classes, so an epoch ends with a minibatch of 16. `counts` prints, for each seed and
length of run, how many of them belong to the second class at the end of each task. That is decided by a permutation
that a GPU draws; it is computed here as a GPU would, so none is needed.

`tried` trains a ResNet-18 of an eighth of the channels on a CPU until one step is left. It then makes that step from
there many times, with minibatches of 16 and of 32 that have more or fewer samples of the second class.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from long_runs import Onlooker, exam_of
from torch import Tensor

from holdfast.benchmarks import make_benchmark
from holdfast.benchmarks.base import Benchmark
from holdfast.config import RunConfig
from holdfast.data import data_root, load
from holdfast.devices import cpu_threads
from holdfast.evaluation import Exam, evaluate
from holdfast.learners import Learner
from holdfast.rng import derive_seed
from holdfast.training import train

SAMPLES, SHORT = 10_000, 16
"""Of a task, and of the last minibatch of an epoch."""
DRAWS = 4 + SAMPLES
"""So many numbers a permutation takes from the generator: its keys', and as many as there are samples in reserve."""
SHARES = (0, 2, 4, 6, 8, 10, 12, 14, 16)
"""Sixteenths of the tried minibatches that are of the second class."""


# --- which samples come last -----------------------------------------------------------------------------------------


def permutation(samples: int, seed: int, offset: int) -> np.ndarray:
    """What torch.randperm gives on a GPU: the order of random keys, of which the lower 29 bits are compared.

    That is so for 10,000 samples, where equal keys are rare; PyTorch shuffles them once more, this does not. `offset`
    says how many numbers the generator gave before.
    """
    thread, zero = np.arange(samples, dtype=np.uint64), np.zeros(samples, dtype=np.uint64)
    block = offset // 4
    high, low, *_ = philox([zero + np.uint64(block % 2**32), zero + np.uint64(block >> 32), thread, zero], seed)
    keys = ((high << np.uint64(32)) | low) % np.uint64(2**32 - 1)
    return np.argsort(keys & np.uint64(2**29 - 1), kind="stable")


def philox(counter: Sequence[np.ndarray], seed: int) -> Sequence[np.ndarray]:
    """Four random numbers of 32 bits for each counter of four such numbers: Philox 4x32 with ten rounds.

    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    mask, shift, keys = np.uint64(2**32 - 1), np.uint64(32), [seed % 2**32, seed >> 32]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        counter = (
            (second >> shift) ^ counter[1] ^ np.uint64(keys[0]),
            second & mask,
            (first >> shift) ^ counter[3] ^ np.uint64(keys[1]),
            first & mask,
        )
        keys = [(key + more) % 2**32 for key, more in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return counter


def counts(root: Path, seeds: range, epochs: int) -> Iterator[dict[str, Any]]:
    """For each seed, how many of the last samples of each task are of its second class."""
    labels = load("cifar10", root).train.labels.numpy()
    for seed in seeds:
        found = []
        for task in range(5):
            own = labels[labels // 2 == task]
            before = epochs * (task + 1) - 1
            last = permutation(len(own), derive_seed(seed, "order"), before * DRAWS)[-SHORT:]
            found.append(int((own[last] % 2).sum()))
        yield {"seed": seed, "epochs": epochs, "of_second_class": found}


# --- what they do ----------------------------------------------------------------------------------------------------


def tried(root: Path, seed: int, *, epochs: int, images: int, times: int) -> Iterator[dict[str, Any]]:
    """What the last step of a run does to the accuracy, with different minibatches."""
    config = RunConfig.preset("seq-cifar10", "linf", buffer_size=500, seed=seed)
    config = config.change(epochs=epochs, model="narrow", train_limit=images, precision="float32")
    benchmark = make_benchmark(config, root)
    learner, exams = almost_trained(config, benchmark), [exam_of(task, benchmark) for task in benchmark.tasks]
    before, weights = accuracy(learner, exams, benchmark), copies(learner)
    data = benchmark.tasks[-1].train()
    random = torch.Generator().manual_seed(seed)
    for size in (SHORT, 2 * SHORT):
        for share in SHARES:
            for number in range(times):
                second = share * size // 16
                rows = drawn(data.labels % 2 == 1, second, size, random)
                other = deepcopy(learner)
                other.buffer.generator.manual_seed(number)  # the same draws for every share
                other.observe(data.images[rows], data.labels[rows])
                moved = sum((a - b).square().sum().item() for a, b in zip(copies(other), weights, strict=True)) ** 0.5
                change = accuracy(other, exams, benchmark) - before
                about = {"seed": seed, "samples": size, "of_second_class": second, "number": number}
                yield {**about, "change": round(change, 3), "gradient": round(moved / config.lr, 2)}


def almost_trained(config: RunConfig, benchmark: Benchmark) -> Any:
    """The learner of a run with one step left."""
    onlooker, steps = Onlooker(), 5 * config.epochs * -(-(config.train_limit or SAMPLES) // config.batch_size)
    for progress in train(config, benchmark, torch.device("cpu"), onlooker):  # type: ignore[arg-type]
        if progress.step == steps - 1:
            break
    return onlooker.state.engine.learner


def copies(learner: Learner) -> list[Tensor]:
    return [each.detach().clone() for each in learner.model.parameters()]


def accuracy(learner: Learner, exams: list[Exam], benchmark: Benchmark) -> float:
    """Class-IL, in percent, over all tasks."""
    found = evaluate(learner.evaluated(), exams, benchmark.normalize).class_il
    return sum(found) / len(found)


def drawn(second: Tensor, wanted: int, size: int, random: torch.Generator) -> Tensor:
    """Rows of a minibatch that has so many samples of the second class."""
    parts = [(mask.nonzero().flatten(), count) for mask, count in ((second, wanted), (~second, size - wanted))]
    return torch.cat([rows[torch.randperm(len(rows), generator=random)[:count]] for rows, count in parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["counts", "tried"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, help="how many; default: 32 of 5 epochs and 10 of 50, or 2 that are tried")
    parser.add_argument("--images", type=int, default=2000, help="of each task, in runs that are tried")
    parser.add_argument("--times", type=int, default=8, help="how often each kind of minibatch is tried")
    options = parser.parse_args()
    root = data_root(options.data)
    if options.what == "counts":
        lines = [line for epochs, n in ((5, 32), (50, 10)) for line in counts(root, range(options.seeds or n), epochs)]
        print("\n".join(map(json.dumps, lines)))
        return
    for seed in range(options.seeds or 2):
        with cpu_threads(1):
            for line in tried(root, seed, epochs=5, images=options.images, times=options.times):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
