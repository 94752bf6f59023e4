"""Two versions of Holdfast, timed in turn: short runs, usually of rot-mnist, on one thread, each in its own process.

    python benchmarks/both_versions.py OLD NEW --rounds 20 --out both.json
    python benchmarks/both_versions.py OLD NEW --resnet 8 --tasks 1 --limit 960    # a small ResNet on made-up images

OLD and NEW are source trees: folders that hold src/holdfast. A round is OLD, NEW, NEW, OLD for each method. Measured is
what a process spends on steps and evaluations, without imports and without making the data: CPU seconds (user and
system), which other programs disturb little, and wall seconds. The ratio NEW / OLD is the median over rounds; its
interval (95 %) comes from 10,000 resamplings of the rounds. `same` says whether both versions came to the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

CLOCKS = ("cpu", "wall")
Reading = dict[str, Any]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def one_run(method: str, tasks: int, limit: int, width: int | None) -> Reading:
    """Time one run; executed in a process that imports one of the versions."""
    import torch

    import holdfast as hf

    torch.set_num_threads(1)
    size = {"buffer_size": 200, "tasks": tasks, "train_limit": limit}
    if width is None:
        from holdfast import benchmarks, data

        config = hf.RunConfig.preset("rot-mnist", method, **size)
        make = getattr(benchmarks, "make_benchmark", None) or benchmarks.build  # the older name
        benchmark = make(config, data.data_root())
    else:
        from holdfast.bench import made_up
        from holdfast.models import ResNet18

        hf.MODELS.register("small", "a ResNet-18 with few channels")(partial(ResNet18, width=width))
        config = hf.RunConfig.preset("seq-cifar10", method, epochs=1, model="small", precision="float32", **size)
        benchmark = made_up(config, samples=limit)
    cpu, wall = cpu_seconds(), time.perf_counter()
    result = hf.run(config, benchmark, threads=1, device="cpu")
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    weights = hashlib.sha256(b"".join(each.numpy().tobytes() for _, each in sorted(result.weights.items())))
    return {"cpu": cpu, "wall": wall, "weights": weights.hexdigest()}


def measure(tree: Path, method: str, options: argparse.Namespace) -> Reading:
    """`one_run` in a process that imports Holdfast from `tree`."""
    size = ["--tasks", str(options.tasks), "--limit", str(options.limit)]
    size += [] if options.resnet is None else ["--resnet", str(options.resnet)]
    command = [sys.executable, __file__, str(tree), str(tree), "--child", method, *size]
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    reading: Reading = json.loads(done.stdout)
    return reading


def compare(old: list[float], new: list[float]) -> dict[str, Any]:
    """The median of NEW / OLD over rounds, its interval, and the median seconds of each."""
    ratios = np.array(new) / np.array(old)
    drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return {
        "ratio": float(np.median(ratios)),
        "interval95": [float(low), float(high)],
        "old_seconds": statistics.median(old),
        "new_seconds": statistics.median(new),
    }


def summarise(rounds: list[dict[str, list[Reading]]]) -> dict[str, Any]:
    """What the rounds of one method tell; each has two readings of either version."""
    mean = {
        clock: [[statistics.mean(each[clock] for each in turn[name]) for turn in rounds] for name in ("old", "new")]
        for clock in CLOCKS
    }
    seen = {name: {each["weights"] for turn in rounds for each in turn[name]} for name in ("old", "new")}
    return {clock: compare(*mean[clock]) for clock in CLOCKS} | {"same": seen["old"] == seen["new"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--methods", nargs="+", default=["mse", "er"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--limit", type=int, default=20_000, help="training images of a task")
    parser.add_argument("--resnet", type=int, metavar="WIDTH", help="a ResNet-18 with so many channels at first")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(one_run(options.child, options.tasks, options.limit, options.resnet)))
        return
    trees = {"old": options.old.resolve(), "new": options.new.resolve()}
    rounds: dict[str, list[dict[str, list[Reading]]]] = {method: [] for method in options.methods}
    load = []
    for number in range(options.rounds):
        load.append(os.getloadavg()[0])
        for method in options.methods:
            turn: dict[str, list[Reading]] = {"old": [], "new": []}
            for name in ("old", "new", "new", "old"):
                turn[name].append(measure(trees[name], method, options))
            rounds[method].append(turn)
            found = summarise(rounds[method])["cpu"]
            low, high = found["interval95"]
            print(f"round {number + 1}: {method} {found['ratio']:.3f} ({low:.3f} to {high:.3f})", file=sys.stderr)
    report = {
        "methods": {method: summarise(each) for method, each in rounds.items()},
        "rounds": options.rounds,
        "tasks": options.tasks,
        "limit": options.limit,
        "resnet": options.resnet,
        "load": {"mean": statistics.mean(load), "max": max(load), "cores": os.cpu_count()},
        "python": platform.python_version(),
        "readings": rounds,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for method, found in report["methods"].items():
        for clock in CLOCKS:
            each = found[clock]
            low, high = each["interval95"]
            times = f"{each['old_seconds']:.2f} -> {each['new_seconds']:.2f} s"
            print(f"{method:6} {clock:5} new / old {each['ratio']:.3f} ({low:.3f} to {high:.3f})  {times}")
        print(f"{method:6} weights {'the same' if found['same'] else 'differ'}")


if __name__ == "__main__":
    main()
