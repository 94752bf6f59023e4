"""How fast it is: a paragraph of the README, and tables of the page "How fast, and why"."""

from __future__ import annotations

import re
from textwrap import fill
from typing import Any

from tables.common import DOCS, SPACE, measured, read_lines, table

SPEED = """On one core of a server, a complete R-MNIST run (mse, 20 tasks, {cpu_steps:,} steps, all evaluations) takes
{cpu_seconds:.0f} s: {cpu_ratio:.2f} times the bare matrix products of its steps. Two runs at once on two cores lose
{cpu_lost:.0f} % each. Peak memory is {cpu_memory:.0f} MB. On an H200 the same run takes {gpu_mnist_seconds:.1f} s, and
all eleven methods with three seeds take {gpu_column_seconds:.0f} s; an S-CIFAR-10 run makes {gpu_alone:.0f} steps per
second, {gpu_runs:.0f} runs together {gpu_together:.0f}, where the authors' code makes {gpu_authors:.0f}.
"""
VERSIONS = ("cbcf1e6", "f9a4136", "27b4ce9")
"""Those that took turns on one GPU, the oldest first."""
STAGES = {
    "import torch": "PyTorch is imported",
    "import holdfast": "Holdfast is imported",
    "step 1": "the untrained network was tested; first step",
    "step 2": "first step with stored samples",
    "step 8": "first step with a full buffer, which is compiled",
}
"""What happens before steps have their full speed, by the names in bench-h200-start.json."""


def speed() -> str:
    """The speeds that the README tells, in one paragraph."""
    return fill(SPEED.format(**measured("speed")), 118)


def overhead() -> str:
    """What benchmarks/observe_overhead.py printed, as a table."""
    _, *lines = (DOCS / "bench-observe.txt").read_text("utf-8").splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines]
    return table(["network", "method", "`observe`", "by hand", "ratio"], rows, names=2)


def peers() -> str:
    """The same experiment in other programs: CPU and wall seconds, what they are of Holdfast's, and the accuracy."""
    measurement = measured("bench-peers")
    rows = []
    for name, each in measurement["programs"].items():
        found = measurement["ratios"].get(name)
        over = [_between(found[clock]) if found else "" for clock in ("cpu", "after_imports", "wall")]
        seconds = [f"{each[clock]:.0f}{SPACE}s" for clock in ("cpu", "wall")]
        rows.append([name.capitalize(), seconds[0], *over[:2], seconds[1], over[2], f"{each['accuracy']:.1f} %"])
    return table(
        ["", "CPU time", "over Holdfast's", "without imports", "wall time", "over Holdfast's", "accuracy"], rows
    )


def _between(ratio: dict[str, float]) -> str:
    """A ratio and its extremes."""
    return f"{ratio['median']:.1f} ({ratio['low']:.1f} to {ratio['high']:.1f})"


def rates() -> str:
    """A complete `holdfast bench --device cuda`, a row per benchmark and method: all runs together, alone to eight."""
    rows = []
    for name, found in _rates("bench-h200").items():
        best = max(found, key=lambda each: each["tflops"])
        together = (f"{each['steps_per_second']:,.0f}" for each in found)
        rows.append([name, *together, f"{best['tflops']:.0f}", f"{100 * best['peak_share']:.1f} %"])
    return table(["", "alone", "2 runs", "4 runs", "8 runs", "TFLOP/s", "of the peak"], rows)


def gains() -> str:
    """Two complete measurements of one machine, the first version and this one: rates, their ratios, and the starts."""
    before, after = _rates("bench-h200-before"), _rates("bench-h200")
    rows = []
    for name, found in after.items():
        pairs = [
            (old["steps_per_second"], new["steps_per_second"]) for old, new in zip(before[name], found, strict=True)
        ]
        cells = [f"{old:,.0f} to {new:,.0f}, {new / old:.2f}" for old, new in pairs]
        ready = [each[name][0]["ready_seconds"] for each in (before, after)]
        rows.append([name, *cells, f"{ready[0]:.1f} to {ready[1]:.1f}{SPACE}s"])
    return table(["", "alone", "2 runs", "4 runs", "8 runs", "first start"], rows)


def _rates(name: str) -> dict[str, list[dict[str, Any]]]:
    """What `holdfast bench --json` printed, by benchmark and method, from one run to eight."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in measured(name)["device_rates"]:
        found.setdefault(f"{each['benchmark']} {each['method']}", []).append(each)
    return found


def starts() -> str:
    """The stages of seq-cifar10 runs until their steps have their full speed, with and without compiled code."""
    kinds = [measured("bench-h200-start")[kind] for kind in ("cold", "warm", "other")]
    # What is "of it" is a part of another stage.
    whole = [{name: time for name, time in each["stages"].items() if not name.startswith("of it")} for each in kinds]
    rest = [sum(time for name, time in stages.items() if name not in STAGES) for stages in whole]
    times = {title: [each["stages"][name] for each in kinds] for name, title in STAGES.items()}
    times |= {"all else": rest, "**together**": [each["seconds"] for each in kinds]}
    times |= {"without imports": [each["without_imports"] for each in kinds]}
    rows = ([title, *(f"{time:.1f} s" for time in each)] for title, each in times.items())
    return table(["", "`mse`, nothing compiled", "`mse`, next process", "`er`, then"], rows)


def turns() -> str:
    """Three versions that took turns on one GPU: a row per version, both readings of each rate, and until the start."""
    readings = [each for each in read_lines(DOCS / "bench-h200-turns.jsonl") if each["benchmark"] == "seq-cifar10"]
    rows = []
    for version in VERSIONS:
        own = [each for each in readings if each["version"] == version]
        taken = [each for each in own if each["what"] == "turns"]
        cells = []
        for case in (("mse", 1), ("mse", 4), ("er", 1), ("er", 4)):
            found = [each["steps_per_second"] for each in taken if (each["method"], each["runs"]) == case]
            cells += [", ".join(f"{rate:.0f}" for rate in found)]
        cells += [f"{each['ready_seconds']['1']:.0f}{SPACE}s" for each in own if each["what"].startswith("cold")]
        rows.append([version, *cells])
    return table(["version", "mse alone", "mse, 4 runs", "er alone", "er, 4 runs", "start: mse", "then er"], rows)
