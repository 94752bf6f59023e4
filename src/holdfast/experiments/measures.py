"""What is read off a finished run: a name, a unit, how far two means may lie apart without it mattering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path

import torch
from torch import Tensor

from holdfast import analysis, results
from holdfast.analysis import SEVERITIES, Robustness
from holdfast.analysis.runs import analyze_run, with_robustness
from holdfast.data import data_root
from holdfast.experiments.stored import Stored
from holdfast.registry import Registry
from holdfast.training import choose_device

__all__ = ["CATEGORIES", "MEASURES", "ROBUSTNESS", "Measure", "condensed", "keep_robustness", "measure_robustness"]

CATEGORIES = ("noise", "blur", "weather", "digital")
ROBUSTNESS = (*(f"robust_{name}" for name in CATEGORIES), "mra")
"""Measures that need the weights and the data; `measure_robustness` computes them, once per run."""

MOST_TASKS = 20


@dataclass(frozen=True)
class Measure:
    """One number of a finished run."""

    name: str
    label: str
    """For headings, with the unit."""
    tolerance: float
    """A difference of means of this size does not matter: what another machine, another version of a library or
    another arithmetic may move a mean by. In the unit of the measure."""
    higher_is_better: bool
    decimals: int
    compute: Callable[[Stored], float]

    def of(self, stored: Stored) -> float:
        """The number; NaN where the run does not define it or what it needs was not kept."""
        return stored.measures[self.name] if self.name in stored.measures else self.compute(stored)


MEASURES: Registry[Measure] = Registry("measure")


def _add(
    name: str,
    label: str,
    tolerance: float,
    compute: Callable[[Stored], float],
    *,
    higher_is_better: bool = True,
    decimals: int = 2,
) -> None:
    MEASURES.register(name, label)(Measure(name, label, tolerance, higher_is_better, decimals, compute))


def _from_logits(compute: Callable[[Tensor, Tensor, list[list[int]]], float], stored: Stored) -> float:
    """`compute` of the logits and labels of the whole test set and the classes of each task; NaN without logits."""
    kept = stored.logits
    if not kept:
        return nan
    tasks = range(sum(name.startswith("logits.") for name in kept))
    labels = [kept[f"labels.{task}"] for task in tasks]
    logits = torch.cat([kept[f"logits.{task}"] for task in tasks])
    return compute(logits, torch.cat(labels), [sorted(set(task.tolist())) for task in labels])


def _task_probability(task: int, logits: Tensor, _: Tensor, classes: list[list[int]]) -> float:
    """Share of belief that goes to the classes of a task; a negative number counts from the end."""
    if len(classes) <= task or not _disjoint(classes):
        return nan
    return analysis.recency(logits, classes).task_probabilities[task]


def _recency_gap(logits: Tensor, _: Tensor, classes: list[list[int]]) -> float:
    return analysis.recency(logits, classes).gap if _disjoint(classes) else nan


def _ece(logits: Tensor, labels: Tensor, _: list[list[int]]) -> float:
    return analysis.calibration(logits, labels).ece


def _disjoint(classes: list[list[int]]) -> bool:
    """Whether tasks have classes of their own; recency means nothing otherwise."""
    return sum(map(len, classes)) == len(set().union(*classes))


def _not_computed(_: Stored) -> float:
    return nan


_add("accuracy", "accuracy (%)", 1.0, lambda stored: stored.result.accuracy)
_add("task_il_accuracy", "Task-IL accuracy (%)", 1.0, lambda stored: stored.result.task_il_accuracy)
_add("forward_transfer", "forward transfer (points)", 1.0, lambda stored: stored.result.forward_transfer)
_add("backward_transfer", "backward transfer (points)", 1.0, lambda stored: stored.result.backward_transfer)
_add("forgetting", "forgetting (points)", 1.0, lambda stored: stored.result.forgetting, higher_is_better=False)
_add("ece", "ECE (%)", 1.0, partial(_from_logits, _ece), higher_is_better=False)
_add("recency_gap", "recency gap", 0.02, partial(_from_logits, _recency_gap), higher_is_better=False, decimals=3)
_add(
    "last_task_probability",
    "probability of the last task",
    0.02,
    partial(_from_logits, partial(_task_probability, -1)),
    higher_is_better=False,
    decimals=3,
)
for _task in range(MOST_TASKS):
    _add(
        f"task_probability_{_task + 1}",
        f"probability of task {_task + 1}",
        0.02,
        partial(_from_logits, partial(_task_probability, _task)),
        decimals=3,
    )
for _category in CATEGORIES:
    _add(f"robust_{_category}", f"accuracy under {_category} (%)", 1.0, _not_computed)
_add("mra", "mean robust accuracy (%)", 1.0, _not_computed)


def measure_robustness(
    stored: Stored,
    *,
    data: Path | str | None = None,
    device: str = "auto",
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, float]:
    """The measures in ROBUSTNESS of one run, in percent; kept beside its result, so that they are computed once.

    The published CIFAR-10-C is used where it lies in the data root, else the corruptions are generated. Empty where
    the run's weights were not kept.
    """
    if all(name in stored.measures for name in ROBUSTNESS):
        return {name: stored.measures[name] for name in ROBUSTNESS}
    if stored.path.name != results.RESULT:
        return {}
    (run,) = with_robustness(
        [analyze_run(stored.path.parent)], data_root(data), device=choose_device(device), progress=progress
    )
    return {} if run.robustness is None else keep_robustness(stored, run.robustness)


def keep_robustness(stored: Stored, found: Robustness) -> dict[str, float]:
    """Keep what an evaluation found beside the result, if it was of all corruptions and severities; returns that."""
    if found.mra is None or tuple(found.severities) != tuple(SEVERITIES):
        return {}
    measures = {f"robust_{category}": found.per_category[category] for category in CATEGORIES} | {"mra": found.mra}
    stored.add_measures(measures)
    return measures


def condensed(stored: Stored) -> dict[str, object]:
    """The result as JSON with its measures inside, for keeping results without their logits and weights.

    `load_results` reads such a file, of any name ending in .json, like a result folder.
    """
    found = {name: measure.of(stored) for name, measure in MEASURES.items()}
    from_matrices = ("accuracy", "task_il_accuracy", "forward_transfer", "backward_transfer", "forgetting")
    kept = {name: round(value, 6) for name, value in found.items() if value == value and name not in from_matrices}
    return {**stored.result.to_json(), **({"measures": kept} if kept else {})}
