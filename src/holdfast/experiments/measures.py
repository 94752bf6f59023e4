"""The numbers that a finished run has, each with a name, a unit and the difference that does not matter."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import nan
from operator import attrgetter
from pathlib import Path

from holdfast.analysis import CATEGORIES, SEVERITIES, CorruptedImages, Robustness
from holdfast.analysis.runs import RunAnalysis, with_robustness
from holdfast.config import RunConfig
from holdfast.data import data_root
from holdfast.devices import choose_device
from holdfast.experiments.base import Experiment
from holdfast.experiments.stored import Results, Stored
from holdfast.registry import Registry
from holdfast.results import FROM_MATRICES, WEIGHTS

__all__ = ["BY_CATEGORY", "MEASURES", "ROBUSTNESS", "Measure", "add_robustness", "condensed", "measure_robustness"]
__all__ += ["measure_missing", "unmeasured"]

BY_CATEGORY = {f"robust_{name}": name for name in CATEGORIES if name != "extra"}
ROBUSTNESS = (*BY_CATEGORY, "mra")
"""Measures that need the weights and the data; `measure_robustness` computes them, once per run."""

MOST_TASKS = 20

POINTS, SHARE = 2.0, 0.04
"""Differences that do not matter, in percentage points and as a share of probability; `verdicts` says why."""


@dataclass(frozen=True)
class Measure:
    """One number of a finished run."""

    name: str
    label: str
    """For headings, with the unit."""
    band: float
    """Differences of means up to this one do not matter, see `verdicts`. In the unit of the measure."""
    compute: Callable[[Stored], float]
    decimals: int = 2

    def of(self, stored: Stored) -> float:
        """The number; NaN where it is not defined, or where the files it takes are missing."""
        return stored.measures[self.name] if self.name in stored.measures else self.compute(stored)


def _forward_transfer(stored: Stored) -> float:
    return stored.result.forward_transfer if stored.result.shares_classes else nan


def _analyzed(part: str, number: str, stored: Stored) -> float:
    """A number of the calibration or the recency of a run."""
    return getattr(getattr(stored.analysis, part, None), number, nan)


def _task_probability(task: int, stored: Stored) -> float:
    """Share of belief that goes to the classes of a task; a negative number counts from the end."""
    found = stored.analysis and stored.analysis.recency
    return found.task_probabilities[task] if found and task < len(found.task_probabilities) else nan


MEASURES: Registry[Measure] = Registry("measure")

for _measure in (
    Measure("accuracy", "accuracy (%)", POINTS, attrgetter("result.accuracy")),
    Measure("task_il_accuracy", "Task-IL accuracy (%)", POINTS, attrgetter("result.task_il_accuracy")),
    Measure("forward_transfer", "forward transfer (points)", POINTS, _forward_transfer),
    Measure("backward_transfer", "backward transfer (points)", POINTS, attrgetter("result.backward_transfer")),
    Measure("forgetting", "forgetting (points)", POINTS, attrgetter("result.forgetting")),
    Measure("ece", "ECE (%)", POINTS, partial(_analyzed, "calibration", "ece")),
    Measure("recency_gap", "recency gap", SHARE, partial(_analyzed, "recency", "gap"), 3),
    Measure("last_task_probability", "p(last task)", SHARE, partial(_task_probability, -1), 3),
    *(
        Measure(f"task_probability_{task + 1}", f"p(task {task + 1})", SHARE, partial(_task_probability, task), 3)
        for task in range(MOST_TASKS)
    ),
    # Computed from the weights by `measure_robustness`, and from then on among the stored measures.
    *(Measure(name, f"accuracy under {kind} (%)", POINTS, lambda _: nan) for name, kind in BY_CATEGORY.items()),
    Measure("mra", "mean robust accuracy (%)", POINTS, lambda _: nan),
):
    MEASURES.register(_measure.name, _measure.label)(_measure)


def unmeasured(experiment: Experiment, configs: Iterable[RunConfig], there: Results) -> list[Stored]:
    """The results whose robustness is asked for and not measured yet, without those where it cannot be read."""
    robust = {cell.config.change(seed=0) for cell in experiment.cells if cell.metric in ROBUSTNESS}
    found = [there.get(config) for config in configs if config.change(seed=0) in robust]
    return [run for run in found if run and not all(name in run.measures for name in ROBUSTNESS) and not run.damage]


def measure_missing(
    experiment: Experiment,
    configs: Iterable[RunConfig],
    there: Results,
    *,
    data: Path | None = None,
    device: str = "auto",
    watch: Callable[[Stored], object],
) -> None:
    """Measure the robustness of those that are `unmeasured`, on the same images; `watch` is told of each before."""
    made = CorruptedImages()
    for stored in unmeasured(experiment, configs, there):
        watch(stored)
        measure_robustness(stored, data=data, device=device, made=made)


def measure_robustness(
    stored: Stored, *, data: Path | str | None = None, device: str = "auto", made: CorruptedImages | None = None
) -> dict[str, float]:
    """The measures in ROBUSTNESS of one run, in percent; stored beside its result, so that they are computed once.

    The published CIFAR-10-C is used where it lies in the data root, else the corruptions are generated; calls that are
    given the same `made` share those. Empty where there are no weights, or where they are damaged, which is noted.
    """
    if all(name in stored.measures for name in ROBUSTNESS):
        return {name: stored.measures[name] for name in ROBUSTNESS}
    stored.check()
    if stored.folder is None:
        return {}
    bare = RunAnalysis(stored.folder, stored.result, None, None)  # its logits are not needed, and may be damaged
    (run,) = with_robustness([bare], data_root(data), device=choose_device(device), made=made)
    if run.robustness is not None:
        return add_robustness(stored, run.robustness)
    if (stored.folder / WEIGHTS).exists():
        stored.note(WEIGHTS, run.notes[-1])  # they are damaged
    return {}


def add_robustness(stored: Stored, found: Robustness) -> dict[str, float]:
    """Store the measures of an evaluation beside the result, if it was of all corruptions and severities."""
    if found.mra is None or tuple(found.severities) != tuple(SEVERITIES):
        return {}
    measures = {name: found.per_category[category] for name, category in BY_CATEGORY.items()} | {"mra": found.mra}
    stored.add_measures(measures)
    return measures


def condensed(stored: Stored) -> dict[str, object]:
    """The result as JSON with its measures inside, for storing results without their logits and weights.

    `load_results` reads such a file, of any name ending in .json, like a result folder.
    """
    found = {name: measure.of(stored) for name, measure in MEASURES.items()}
    stored.check()  # else it would lack numbers without a word
    measures = {name: round(value, 6) for name, value in found.items() if value == value and name not in FROM_MATRICES}
    return {**stored.result.to_json(), **({"measures": measures} if measures else {})}
