"""Processes that are killed at random moments while they carry out one run; test_resume.py starts them."""

import os
import random
import signal
import time
from pathlib import Path

import holdfast as hf
from forked import forked
from holdfast import results
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


def killed(config: hf.RunConfig, checkpoint: Path, out: Path, kills: int) -> None:
    """Kill the run so often, and let it finish the next time."""
    chance = random.Random(config.seed)

    def carry_out():
        results.save(hf.run(config, device="cpu", checkpoint=checkpoint, every=0), out)

    for kill in range(kills + 1):
        child = forked(carry_out)
        if kill < kills:
            kill_after(child, checkpoint, chance.randint(1, 4), chance.uniform(0, 0.02))
        _, status = os.waitpid(child, 0)
        assert status == (signal.SIGKILL if kill < kills else 0), status
