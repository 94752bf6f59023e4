"""Which samples come last in S-CIFAR-10: a seed decides that, and the accuracy that is read next depends on it.

    python benchmarks/last_minibatches.py --data data > results/second-opinion/last-minibatches.jsonl

A task has 10,000 samples of two classes, so an epoch ends with a minibatch of 16. Prints, for each seed and length of
run, how many of them belong to the second class at the end of each task. That is decided by permutations that a GPU
draws; they are computed here as a GPU would, so none is needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.data import data_root, load
from holdfast.rng import derive_seed

SAMPLES, SHORT = 10_000, 16
"""Of a task, and of the last minibatch of an epoch."""
DRAWS = 4 + SAMPLES
"""So many numbers a permutation takes from the generator: its keys', and as many as there are samples in reserve."""


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    root = data_root(parser.parse_args().data)
    for epochs, seeds in ((5, 32), (50, 10)):
        for line in counts(root, range(seeds), epochs):
            print(json.dumps(line))


if __name__ == "__main__":
    main()
