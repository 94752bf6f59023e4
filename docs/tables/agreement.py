"""Tables of the page "How sure are we of our numbers?"."""

from __future__ import annotations

import re
from typing import Any

from tables.common import RESULTS, measured, read_lines, spread, table, typeset

MEASURES = {
    "tail": "accuracy, mean of the last 10 steps",
    "last": "accuracy at the last step",
    "before": "accuracy one step before",
    "task_tail": "Task-IL, mean of the last 10 steps",
    "task_last": "Task-IL at the last step",
}
"""Names of measures in how-sure.json, and what the page calls them."""

TEACHERS = {
    "ours": "ours",
    "image": "answers for the image as it is",
    "pixels": "answers for its pixels, not normalised",
    "warmed": "a warm-up",
    "together": "not normalised, and a warm-up: the framework since November 2020",
    "untaught": "a weight of 0 for the teacher",
    "uncalled": "sgd with LwF's settings: the framework's first release",
}
"""Variants of LwF in benchmarks/lwf_teachers.py, and what the page calls them."""


def agreement() -> str:
    """How closely two programs for S-CIFAR-10 agree, a row per measure, as benchmarks/second_opinion.py found."""
    rows = []
    for name, title in MEASURES.items():
        each = measured("how-sure")["measures"][name]
        ours, theirs = (f"{each[code]['mean']:.2f} ± {each[code]['sd']:.2f}" for code in ("holdfast", "second"))
        low, high = each["interval90"]
        apart = typeset(f"{each['difference']:+.2f} ({low:+.2f} to {high:+.2f})")
        chance = f"{each['welch_p']:.3f}; {each['mann_whitney_p']:.3f}"
        sure = ("yes" if inside else "open" for inside in each["equivalent"].values())
        rows.append([title, ours, theirs, apart, chance, *sure])
    heads = ["", "Holdfast", "second opinion", "difference, 90 % interval", "p (Welch; ranks)", "within 1", "within 2"]
    return table(heads, rows, words=2)


def beside() -> str:
    """What benchmarks/authors_code.py found, a row per method."""
    names = ("images", "epochs", "steps", "equal_steps", "median_error", "largest_error")
    found = measured("how-sure")["beside"]["methods"]
    heads = ["images a task", "epochs", "steps", "equal steps", "usual error (millionths)", "largest"]
    rows = ([method, *(f"{each[name]:,.0f}" for name in names)] for method, each in found.items())
    return table(["", *heads], rows)


def seeds() -> str:
    """How far S-CIFAR-10 lies from the paper by buffer size and seed: the mean over the regularizers that were run."""
    found = measured("how-sure")["by_seed"]
    names = sorted({seed for sizes in found.values() for seed in sizes}, key=int)
    rows = [
        [f"buffer {size}", *(_less_published(sizes[seed]) if seed in sizes else "" for seed in names)]
        for size, sizes in found.items()
    ]
    return table(["", *(f"seed {seed}" for seed in names)], rows)


def _less_published(found: dict[str, float]) -> str:
    return typeset(f"{found['mean']:+.1f} ({found['n']})")


def parallel() -> str:
    """What benchmarks/data_parallel.py found: accuracy by network and method, as on one GPU and on several."""
    rows = []
    for (network, epochs, method), cells in parallel_runs().items():
        size = "whole" if network == "resnet18" else "narrow"
        title = f"{size} network, {epochs} epoch{'s' * (epochs > 1)}, {method}"
        rows.append([title, *(spread(cells[gpus]) if gpus in cells else "" for gpus in (1, 2, 4))])
    return table(["", "1 GPU", "2 GPUs", "4 GPUs"], rows)


def parallel_runs() -> dict[tuple[str, int, str], dict[int, list[float]]]:
    """The accuracies by network, epochs and method, then by number of GPUs."""
    found: dict[tuple[str, int, str], dict[int, list[float]]] = {}
    for row in read_lines(RESULTS / "second-opinion" / "data-parallel.jsonl"):
        network, gpus = re.fullmatch(r"(.*?)(?:-(\d)-gpus)?", row["model"]).groups()  # type: ignore[union-attr]
        found.setdefault((network, row["epochs"], row["method"]), {})[int(gpus or 1)] = row["accuracies"]
    return found


def teachers() -> str:
    """What benchmarks/lwf_teachers.py found: Task-IL accuracy by variant of LwF, and how far it lies from ours."""
    tried = [measured("how-sure")["lwf"][name] for name in ("seq-cifar10-3", "seq-mnist-1")]
    rows = []
    for variant, title in TEACHERS.items():
        cells: list[str] = []
        for found in tried:
            each = found.get(variant)
            cells += ["", "", ""] if each is None else _reached(each)
        if any(cells):
            rows.append([title, *cells])
    heads = [head for name in ("S-CIFAR-10, small", "S-MNIST") for head in ("seeds", name, "less ours")]
    return table(["", *heads], rows)


def _reached(found: dict[str, Any]) -> list[str]:
    each = found["task_il_accuracy"]
    apart = typeset(f"{found['beside']['difference']:+.1f}") if "beside" in found else ""
    return [str(each["n"]), f"{each['mean']:.1f} ± {each['sd']:.1f}", apart]
