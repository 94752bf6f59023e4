"""A process whose children are killed at random moments while they carry out one run; test_resume.py starts it.

Usage: killed.py CHECKPOINT OUT KILLS SEED CONFIG, the config as JSON. Children are forked, since starting Python and
PyTorch anew for each would take longer than the run.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import holdfast as hf
from holdfast import results
from holdfast.benchmarks import domain_incremental
from holdfast.data import Dataset, ImageSet, load


def few_digits() -> Dataset:
    """The first digits of MNIST."""
    full = load("mnist")
    train, test = (
        ImageSet(part.images[:count], part.labels[:count]) for part, count in zip(full[:2], (1500, 200), strict=True)
    )
    return Dataset(train, test, 10)


def stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def kill_after(child: int, path: Path, checkpoints: int, delay: float) -> None:
    """End `child` once it has written so many checkpoints, and `delay` seconds later."""
    last = stamp(path)
    while checkpoints:
        now = stamp(path)
        checkpoints -= now != last
        last = now
        time.sleep(0.0005)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before it could be killed"
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)


def main() -> None:
    checkpoint, out, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    config = hf.RunConfig.from_dict(json.loads(sys.argv[5]))
    chance = random.Random(seed)
    torch.set_num_threads(1)
    digits = few_digits()
    domain_incremental.shared_dataset = lambda name, root: digits
    for kill in range(kills + 1):
        child = os.fork()
        if child == 0:
            results.save(hf.run(config, device="cpu", checkpoint=checkpoint, every=0), out)
            os._exit(0)
        if kill < kills:
            kill_after(child, checkpoint, chance.randint(1, 4), chance.uniform(0, 0.02))
        _, status = os.waitpid(child, 0)
        assert status == (signal.SIGKILL if kill < kills else 0), status


if __name__ == "__main__":
    main()
