"""Tables of the page "Past the field": what was tried for a method of our own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

from holdfast.experiments import EXPERIMENTS
from holdfast.report import markdown_table
from tables.common import RESULTS, committed, read_lines, spread, table

TRIED = RESULTS / "beyond"
GROWTH = {
    "average for evaluation, adjusted once": "-weight_decay0.0-strength1.0-hold_features0.0-teacher0.9995-turn0.0",
    "adjusted thrice, with features held and weight decay": "-turn0.0",
    "with turned images as well": "",
}
"""Sets of settings of `ballast`, as the names of result files have them."""
MANY = {
    (False, 3.0, 0.0, 0.975): "adjusted thrice",
    (False, 3.0, 0.0, 0.9875): "adjusted thrice, the average half as fast",
    (False, 3.0, 0.0, 0.95): "adjusted thrice, the average twice as fast",
    (False, 6.0, 0.0, 0.975): "adjusted six times",
    (False, 1.0, 0.9, 0.975): "adjusted, counted over ten steps",
    (False, 1.0, 0.0, 0.975): "adjusted",
    (False, 3.0, 0.9, 0.975): "adjusted thrice, counted over ten steps",
    (True, 0.0, 0.0, 0.975): "asymmetric",
}
"""What was tried on S-CIFAR-100: whether it is asymmetric, how often it is adjusted, the share recalled, the decay."""


def candidates(network: str, epochs: str) -> str:
    """What benchmarks/beyond.py found with a network and so many epochs a task: a row per candidate, the best first."""
    rows = read_lines(TRIED / "candidates.jsonl")
    return _candidates(row for row in rows if (row["network"], row["epochs"]) == (network, int(epochs)))


def few() -> str:
    """The same for a narrow network and a tenth of the images."""
    return _candidates(read_lines(TRIED / "few.jsonl"))


def many() -> str:
    """What was tried on S-CIFAR-100 with a narrow network and few images, the best first."""
    tried: dict[str, list[dict[str, Any]]] = {}
    for row in read_lines(TRIED / "hundred.jsonl"):
        tried.setdefault(MANY[_idea(row["settings"])], []).append(row)
    rows = []
    for name in sorted(tried, key=lambda name: -fmean(row["accuracy"] for row in tried[name])):
        runs = tried[name]
        old, new = fmean(value for row in runs for value in row["last"][:-1]), fmean(row["last"][-1] for row in runs)
        task_il = spread([row["task_il"] for row in runs])
        rows.append(
            [name, str(len(runs)), spread([row["accuracy"] for row in runs]), f"{old:.1f}", f"{new:.1f}", task_il]
        )
    titles = ["cross-entropy", "runs", "accuracy (%)", "on the first four tasks", "on the last", "Task-IL"]
    return table(titles, rows)


def _idea(settings: dict[str, Any]) -> tuple[bool, float, float, float]:
    """In what the runs differ: whether it is asymmetric, the strength, what is recalled, and the average's decay."""
    strength = settings.get("strength", 1.0) if settings.get("adjusted") else 0.0
    return settings.get("asymmetric", False), strength, settings.get("recall", 0.0), settings["decay"]


def _candidates(tried: Iterable[dict[str, Any]]) -> str:
    rows = []
    for row in tried:
        values, tasks = row["accuracies"], row["last"]
        cells = ["the loss became infinite", "", ""]
        if values:
            old, new = fmean(value for each in tasks for value in each[:-1]), fmean(each[-1] for each in tasks)
            cells = [spread(values), f"{old:.1f}", f"{new:.1f}"]
        rows.append([row["candidate"], str(len(values)), *cells])
    return table(["candidate", "runs", "accuracy (%)", "on the first four tasks", "on the last"], rows)


def full() -> str:
    """The accuracies on S-CIFAR-10 at full length of `ballast` and of the methods that it builds on."""
    chosen = ["benchmark=seq-cifar10", "metric=accuracy", *(f"buffer_size={size}" for size in (200, 500))]
    chosen += [f"method={method}" for method in ("er", "er-ace", "mse", "clser", "ballast")]
    return markdown_table(replace(EXPERIMENTS["field"].select(chosen), caveat=""), committed())


def growth() -> str:
    """The accuracies of `ballast` on S-CIFAR-10 at full length with each of the sets of settings it has had."""
    rows = []
    for title, runs in GROWTH.items():
        means = [[fmean(row) for row in last_rows("ballast", size, runs)] for size in (200, 500)]
        rows.append([title, *(f"{spread(values)} ({len(values)})" for values in means)])
    return table(["", "buffer 200", "buffer 500"], rows)


def tasks() -> str:
    """Accuracy on each task at the end, of mse and `ballast` on S-CIFAR-10 at full length."""
    rows = []
    for size in (200, 500):
        for method in ("mse", "ballast"):
            runs = last_rows(method, size)
            means = (f"{fmean(column):.1f}" for column in zip(*runs, strict=True))
            rows.append([method, str(size), str(len(runs)), *means])
    return table(["", "buffer", "seeds", *(f"task {number}" for number in range(1, 6))], rows)


def last_rows(method: str, size: int, settings: str = "") -> list[list[float]]:
    """The accuracy on each task at the end of every S-CIFAR-10 run of a method; files are named for other settings."""
    files = sorted((RESULTS / "seq-cifar10").glob(f"{method}-{size}-seed?{settings}.json"))
    return [json.loads(path.read_text("utf-8"))["accuracy_matrix"][-1] for path in files]


def turning() -> str:
    """Accuracy of `ballast` on MNIST-360 with different settings, a row each, a column per buffer."""
    tried: dict[str, list[str]] = {}
    for row in read_lines(TRIED / "mnist-360.jsonl"):
        tried.setdefault(row["idea"], []).append(spread(row["accuracies"]))
    return table(["", "buffer 200", "buffer 500"], ([idea, *cells] for idea, cells in tried.items()))


def regularizers() -> str:
    """Accuracy on seq-mnist with the average as target: a row per regularizer, a column per weight, the best first.

    All weights with the first seed; the last column has the best of them with all seeds.
    """
    tried: dict[str, dict[float, list[float]]] = {}
    for row in read_lines(TRIED / "regularizers.jsonl"):
        settings = row["settings"]
        tried.setdefault(settings.get("regularizer", "mse"), {})[settings["beta"]] = row["accuracies"]
    betas = sorted(next(iter(tried.values())))
    best = {name: max(cells.values(), key=len) for name, cells in tried.items()}
    rows = [
        [name, *(f"{tried[name][beta][0]:.1f}" for beta in betas), spread(best[name])]
        for name in sorted(best, key=lambda name: -fmean(best[name]))
    ]
    return table(["", *(f"{beta:g}" for beta in betas), "best, three seeds"], rows)


def lag() -> str:
    """Accuracy on seq-mnist over how much of a task the average remembers, a row per share, a column per idea."""
    tried, rows = read_lines(TRIED / "lag.jsonl"), []
    ideas = {"": "neither", "adjusted=True": "adjusted", "asymmetric=True": "asymmetric"}
    for share in sorted({row["share"] for row in tried}):
        cells = []
        for idea in ideas:
            runs = [row for row in tried if (row["share"], row["idea"]) == (share, idea)]
            last = fmean(row["last"][-1] for row in runs)
            cells += [f"{spread([row['accuracy'] for row in runs])}; {last:.0f}"]
        rows.append([str(share), *cells])
    return table(["share of a task", *ideas.values()], rows)
