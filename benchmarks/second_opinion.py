"""Two independent programs for one benchmark: do their results agree, and how closely can we tell?

    python benchmarks/second_opinion.py

Reads results/second-opinion/ and, for comparisons with papers, results/seq-cifar10/, and prints every number of the
page "How sure are we" as JSON. Differences are Holdfast minus the other program or the paper, in points of accuracy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, stats

from holdfast.experiments import EXPERIMENTS, Verdict, assess
from holdfast.methods import REGULARIZERS
from holdfast.report import gather

RESULTS = Path(__file__).resolve().parents[1] / "results"
FOLDER = RESULTS / "second-opinion"
BANDS = (1.0, 2.0)
"""Differences in points that might be called too small to matter. The report's tables use 2."""
POWER = 0.8
STEEP = 2.0
"""A last step that costs more points than this is counted."""
FAMILY = ("last", "tail", "task_last", "task_tail")
"""The four questions asked of the two programs; their p-values are corrected together (Holm)."""
TASK = 10_000
"""Images of a task, where a run is not told to take fewer."""
TAIL_MEAN = "mean_of_last_10_steps"
ENDS = ("accuracy", "task_il_accuracy")
"""What runs on a CPU reach after the very last step."""
FIRST = "0333b9f"
"""The version of the first 24 runs."""
UNEVEN = 4
"""A last minibatch of 16 is called uneven if 12 or more of its samples are of one class."""
WITNESSES = ("der", "mse", "er-ace", "clser")
"""Methods of other papers that end knowing more than the newest task."""

Run = dict[str, Any]
MEASURES: dict[str, Callable[[Run], float]] = {
    "last": lambda run: run["accuracy"],
    "tail": lambda run: float(np.mean(run["tail"])),
    "before": lambda run: run["tail"][-2],
    "task_last": lambda run: run["task_il_accuracy"],
    "task_tail": lambda run: run["tail_task_il"],
}


def read(name: str, folder: Path = FOLDER) -> list[Run]:
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


def describe(values: np.ndarray) -> dict[str, float]:
    spread = values.std(ddof=1)
    return {"n": len(values), "mean": values.mean(), "sd": spread, "median": np.median(values), "low": values.min()}


def compare(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Difference of means with intervals, tests of equality, and how small a band it certainly lies in."""
    welch = stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = welch.confidence_interval(0.90)
    error = sqrt(ours.var(ddof=1) / len(ours) + theirs.var(ddof=1) / len(theirs))
    return {
        "difference": ours.mean() - theirs.mean(),
        "size": abs(ours.mean() - theirs.mean()),
        "error": error,
        "interval90": [low, high],
        "interval95": list(welch.confidence_interval(0.95)),
        "welch_p": welch.pvalue,
        "mann_whitney_p": stats.mannwhitneyu(ours, theirs).pvalue,
        "levene_p": stats.levene(ours, theirs).pvalue,
        "smallest_band": max(abs(low), abs(high)),
        "equivalent": {f"{band:g}": bool(-band < low and high < band) for band in BANDS},
        "chance_if_equal": {f"{band:g}": equivalence_power(band, error, welch.df) for band in BANDS},
        "detectable": detectable(error, welch.df),
    }


def equivalence_power(band: float, error: float, freedom: float) -> float:
    """The chance that 90 % intervals like this one lie inside the band if there is no difference at all."""
    room = band / error - stats.t.ppf(0.95, freedom)
    return max(0.0, 2 * stats.t.cdf(room, freedom) - 1)


def detectable(error: float, freedom: float) -> float:
    """The true difference that a two-sided test at 5 % finds with a chance of `POWER`."""
    critical = stats.t.ppf(0.975, freedom)
    shift = optimize.brentq(lambda shift: stats.nct.sf(critical, freedom, shift) - POWER, 0.1, 6.0)
    return error * shift


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """The p-values, corrected for their number."""
    corrected, so_far = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = so_far
    return corrected


def last_step(runs: list[Run]) -> dict[str, float]:
    """What the last step of all, of 16 samples, did to the accuracy, beside the ordinary steps before it."""
    drops = np.array([run["tail"][-2] - run["tail"][-1] for run in runs])
    ordinary = np.abs(np.concatenate([np.diff(run["tail"][:-1]) for run in runs]))
    norms = np.array([run["short_norms"] for run in runs])
    return {
        "mean_drop": drops.mean(),
        "largest_drop": drops.max(),
        "steep": int((drops > STEEP).sum()),
        "ordinary_change": np.median(ordinary),
        "ordinary_steep": int((ordinary > STEEP).sum()),
        "ordinary_steps": len(ordinary),
        "median_norm": np.median(norms),
        "largest_norm": norms.max(),
        "norm_and_drop": stats.spearmanr(norms[:, -1], drops).statistic,
    }


def distribution_checks(lines: list[Run]) -> dict[str, float]:
    """All p-values together: the smallest, and the chance of one as small among so many."""
    found = [value for line in lines for name, value in line.items() if name == "p" or name.startswith("p_")]
    return {"tests": len(found), "smallest_p": min(found), "corrected_p": min(1.0, len(found) * min(found))}


def side_by_side(runs: list[Run], methods: Sequence[str], measures: Sequence[str]) -> dict[str, Any]:
    """For each method and each measure, the runs of both programs."""
    made: dict[str, Any] = {}
    for method in methods:
        for measure in measures:
            ours, theirs = (
                np.array([run[measure] for run in runs if (run["code"], run["method"]) == (code, method)])
                for code in ("holdfast", "second-opinion")
            )
            compared = {"holdfast": describe(ours), "second": describe(theirs), **compare(ours, theirs)}
            made.setdefault(method, {})[measure] = compared
    return made


def pooled(compared: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The difference over several comparisons, each weighed by the inverse of its squared error; normal p-value."""
    weights = np.array([each["error"] ** -2 for each in compared])
    mean = float(weights @ [each["difference"] for each in compared] / weights.sum())
    error = weights.sum() ** -0.5
    return {"difference": mean, "size": abs(mean), "error": error, "p": 2 * stats.norm.sf(abs(mean) / error)}


def first_task(runs: list[Run]) -> dict[str, Any]:
    """Accuracy right after the first task by both programs, and how many runs lie `STEEP` points under the median."""
    ours, theirs = (
        np.array([run["accuracy"] for run in runs if run["code"] == code]) for code in ("holdfast", "second-opinion")
    )
    usual = np.median(np.concatenate([ours, theirs]))
    low = {name: int((each < usual - STEEP).sum()) for name, each in (("holdfast", ours), ("second", theirs))}
    return {"holdfast": describe(ours), "second": describe(theirs), **compare(ours, theirs), "low_runs": low}


def all_runs(holdfast: list[Run], later: list[Run], authors: np.ndarray, folder: Path = FOLDER) -> dict[str, Any]:
    """Accuracy at the last step of every run of Holdfast beside the authors' code: all, and those that end evenly."""
    accuracies, ends_unevenly = last_accuracies([*holdfast, *later], folder)
    even = accuracies[~ends_unevenly]
    first, first_unevenly = last_accuracies([run for run in holdfast if run["commit"].startswith(FIRST)], folder)
    return {
        "all": {**describe(accuracies), **compare(accuracies, authors)},
        "even": {**describe(even), **compare(even, authors)},
        "first": describe(first),
        "later": describe(last_accuracies(later, folder)[0]),
        "uneven_of_first": int(first_unevenly.sum()),
        "uneven_of_lowest": int(first_unevenly[np.argsort(first)[:6]].sum()),
    }


def last_accuracies(runs: list[Run], folder: Path = FOLDER) -> tuple[np.ndarray, np.ndarray]:
    """What runs of Holdfast reach at the last step, and whether its minibatch is uneven."""
    uneven = last_uneven(folder)
    return np.array([run["accuracy"] for run in runs]), np.array([uneven[5, run["seed"]][-1] for run in runs])


def last_uneven(folder: Path = FOLDER) -> dict[tuple[int, int], list[bool]]:
    """By epochs and seed: whether the last minibatch of each task is uneven."""
    lines = read("last-minibatches.jsonl", folder)
    return {
        (line["epochs"], line["seed"]): [abs(count - 8) >= UNEVEN for count in line["of_second_class"]]
        for line in lines
    }


def minibatches(holdfast: list[Run], folder: Path = FOLDER) -> dict[str, Any]:
    """What the last minibatch before an accuracy is read has to do with it, by how evenly it has both classes."""
    uneven = last_uneven(folder)
    drops = [(uneven[5, run["seed"]][-1], run["tail"][-2] - run["tail"][-1]) for run in holdfast]
    ends = []
    for task in range(5):
        seen = np.array([np.mean(run["accuracy_matrix"][task][: task + 1]) for run in holdfast])
        ends += [(uneven[5, run["seed"]][task], at) for run, at in zip(holdfast, seen - seen.mean(), strict=True)]
    return {
        "chance": 2 * stats.binom.cdf(8 - UNEVEN, 16, 0.5),
        "drops": _apart(drops),
        "ends": _apart(ends),
        "fifty": at_full_length(folder),
    }


def at_full_length(folder: Path = FOLDER) -> dict[str, Any]:
    """Runs of fifty epochs with seeds 0 to 2: how far those that end a task unevenly lie from the other seeds'.

    A number for each such end: the mean over all methods with a regularizer and sizes of buffer that have three seeds.
    """
    uneven, cells = last_uneven(folder), []
    for first in sorted((RESULTS / "seq-cifar10").glob("*-seed0.json")):
        paths = [first.with_name(first.name.replace("seed0", f"seed{seed}")) for seed in range(3)]
        if first.name.split("-")[0] in REGULARIZERS and all(path.exists() for path in paths):
            matrices = [json.loads(path.read_text("utf-8"))["accuracy_matrix"] for path in paths]
            cells.append([[np.mean(row[: task + 1]) for task, row in enumerate(rows)] for rows in matrices])
    reached, apart = np.array(cells), []  # of each cell, seed and task
    for task in range(5):
        even = [seed for seed in range(3) if not uneven[50, seed][task]]
        for seed in set(range(3)).difference(even):
            apart.append(np.mean(reached[:, seed, task] - reached[:, even, task].mean(axis=1)))
    ends = np.array(apart)
    return {"cells": len(cells), **describe(ends), "error": ends.std(ddof=1) / sqrt(len(ends)), "high": ends.max()}


def _apart(values: list[tuple[bool, float]]) -> dict[str, Any]:
    """Numbers that belong to uneven minibatches and to others, and whether they differ."""
    uneven, even = (np.array([value for is_uneven, value in values if is_uneven == which]) for which in (True, False))
    return {"uneven": describe(uneven), "even": describe(even), "p": stats.mannwhitneyu(uneven, even).pvalue}


def beside(lines: list[Run]) -> dict[str, Any]:
    """Whole runs of the authors' code and of Holdfast with the same random numbers, by method."""
    found: dict[str, Any] = {}
    for line in lines:
        of = found.setdefault(line["method"], {})
        if line["own"]:
            errors = {name: line[f"{name}_error_of_updates"] for name in ("median", "largest")}
            of |= {f"{name}_error": 1e6 * error for name, error in errors.items()}  # in millionths
        else:
            names = ("epochs", "steps", "equal_steps", "largest_difference_of_accuracies")
            of |= {"images": line["images"] or TASK, **{name: line[name] for name in names}}
    same = [of for of in found.values() if of["equal_steps"] == of["steps"]]
    return {"methods": found, "apart": max(of["largest_difference_of_accuracies"] for of in same)}


def chosen_seeds(cells: list[Verdict], counts: tuple[int, ...] = (4, 5, 10), draws: int = 20_000) -> dict[str, Any]:
    """Could the published three runs of a cell be the best of more? Their mean would be higher, their spread smaller.

    For each number of runs: by how many points the best three lie over all, their expected spread, and how often chance
    would give a spread as large as the published one. Runs are taken as normal with our spread, cells as independent.
    """
    ours = [np.array(cell.values) for cell in cells if cell.n > 1]
    freedom = sum(len(values) - 1 for values in ours)
    spread = sqrt(sum((len(values) - 1) * values.var(ddof=1) for values in ours) / freedom)
    published = sqrt(np.mean([cell.published.std**2 for cell in cells]))
    random = np.random.default_rng(0)
    best = {}
    for count in counts:
        drawn = np.sort(random.standard_normal((draws, len(cells), count)), axis=2)[:, :, -3:]
        variances = drawn.var(axis=2, ddof=1)
        ratios = variances.mean(axis=1) / (random.chisquare(freedom, draws) / freedom)
        best[str(count)] = {
            "gain": spread * drawn.mean(),
            "spread": spread * sqrt(variances.mean()),
            "p": np.mean(ratios >= (published / spread) ** 2),
        }
    return {"ours": spread, "freedom": freedom, "published": published, "cells": len(cells), "best": best}


def by_seed(cells: list[Verdict]) -> dict[str, dict[str, dict[str, float]]]:
    """How far runs with a regularizer lie from the published means, by buffer size and seed: number and mean."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        if cell.cell.config.method in REGULARIZERS:
            sizes = found.setdefault(str(cell.cell.config.buffer_size), {})
            for run, value in zip(cell.stored, cell.values, strict=True):
                sizes.setdefault(str(run.config.seed), []).append(value - cell.published.mean)
    return {
        size: {seed: {"n": len(each), "mean": np.mean(each)} for seed, each in sorted(seeds.items())}
        for size, seeds in found.items()
    }


def other_settings(cells: list[Verdict]) -> dict[str, Any]:
    """l1 with the weight that the paper gives, and with a tenth of it, beside what the paper reports."""
    given = json.loads((RESULTS / "seq-cifar10" / "l1-200-seed0-beta0.1.json").read_text("utf-8"))
    tenth = {cell.cell.config.buffer_size: cell for cell in cells if cell.cell.config.method == "l1"}
    return {
        "given": {"200": given["accuracy"]},
        "tenth": {str(size): cell.mean for size, cell in tenth.items()},
        "paper": {str(size): cell.published.mean for size, cell in tenth.items()},
    }


def with_common_seeds(lines: list[Run], setting: str, one: Any, other: Any, measure: str = TAIL_MEAN) -> dict[str, Any]:
    """Runs with one value of a setting beside runs of the same seeds with another: one minus other."""
    found: dict[int, dict[Any, float]] = {}
    for line in lines:
        found.setdefault(line["seed"], {})[line[setting]] = line[measure]
    ones, others = (np.array([each[value] for each in found.values()]) for value in (one, other))
    return {"one": describe(ones), "other": describe(others), **paired(ones, others)}


def paired(ones: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    """The mean difference, ones minus others, of runs that have their seeds in common."""
    test = stats.ttest_rel(ones, others)
    return {
        "difference": (ones - others).mean(),
        "size": abs((ones - others).mean()),
        "interval90": list(test.confidence_interval(0.90)),
        "p": test.pvalue,
    }


def teachers(lines: list[Run]) -> dict[str, Any]:
    """What LwF's variants reach, by benchmark and epochs; `beside`: less ours with the same seeds. And other numbers.

    `published` are those of the DER paper, `full` our own single runs of full length.
    """
    published: dict[str, Any] = {}
    tried: dict[str, dict[str, dict[int, Run]]] = {}
    for line in lines:
        if line["code"] == "published":
            published.setdefault(line["benchmark"], {})[line["method"]] = {name: line[name] for name in ENDS}
        else:
            variants = tried.setdefault(f"{line['benchmark']}-{line['epochs']}", {})
            variants.setdefault(line["variant"], {})[line["seed"]] = line
    found: dict[str, Any] = {"published": published, "full": {}}
    full = {"lwf": "lwf-seed0", "sgd": "sgd-seed0", "uncalled": "sgd-seed0-lr0.01-weight_decay0.001"}
    for method, file in full.items():
        run = json.loads((RESULTS / "seq-cifar10" / f"{file}.json").read_text("utf-8"))
        found["full"][method] = {name: run[name] for name in ENDS}
    for name, variants in tried.items():
        found[name] = {}
        for variant, runs in variants.items():
            made = {end: np.array([runs[seed][end] for seed in sorted(runs)]) for end in ENDS}
            ours = np.array([variants["ours"][seed]["task_il_accuracy"] for seed in sorted(runs)])
            found[name][variant] = {end: describe(values) for end, values in made.items()}
            if variant != "ours":
                found[name][variant]["beside"] = paired(made["task_il_accuracy"], ours)
    return found


def numbers(folder: Path = FOLDER) -> dict[str, Any]:
    """Every number of the page."""
    runs, earlier = read("runs.jsonl", folder), read("earlier.jsonl", folder)
    holdfast, second = ([run for run in runs if run["code"] == code] for code in ("holdfast", "second-opinion"))
    values = {
        name: [np.array([of(run) for run in each]) for each in (holdfast, second)] for name, of in MEASURES.items()
    }
    authors = np.array([run["accuracy"] for run in earlier if run["code"] == "authors" and "seed" in run])
    (summary,) = (run for run in earlier if "task_il_mean" in run)
    measures = {
        name: {"holdfast": describe(ours), "second": describe(theirs), **compare(ours, theirs)}
        for name, (ours, theirs) in values.items()
    }
    for name, p in holm({name: measures[name]["welch_p"] for name in FAMILY}).items():
        measures[name]["holm_p"] = p
    cells = _paper_cells()
    cpu = side_by_side(read("cpu.jsonl", folder), ("er", "linf"), ENDS)
    long = side_by_side(read("long.jsonl", folder), ("linf", "mse"), (*ENDS, TAIL_MEAN))
    later = read("later.jsonl", folder)
    every, ends_unevenly = last_accuracies([*holdfast, *later], folder)
    found = {
        "measures": measures,
        "points": {
            "last": {
                **{"authors": authors, "second": values["last"][1]},
                **{"holdfast": every[~ends_unevenly], "uneven": every[ends_unevenly]},
            },
            "tail": {"second": values["tail"][1], "holdfast": values["tail"][0]},
        },
        "authors": {
            "last": describe(authors),
            "task_mean": summary["task_il_mean"],
            "task_sd": summary["task_il_sd"],
            "holdfast_last": compare(values["last"][0], authors),
            "second_last": compare(values["last"][1], authors),
        },
        "all_runs": all_runs(holdfast, later, authors, folder),
        "minibatches": minibatches(holdfast, folder),
        "last_step": {"holdfast": last_step(holdfast), "second": last_step(second)},
        "float32": {"mean_change": np.mean([run["accuracy_float32"] - run["accuracy"] for run in holdfast])},
        "cpu": cpu,
        "long": long,
        "task_il": pooled(
            [measures["task_tail"], *(each["task_il_accuracy"] for each in (cpu["er"], cpu["linf"], long["linf"]))]
        ),
        "first": first_task(read("first-task.jsonl", folder)),
        "beside": beside(read("authors.jsonl", folder)),
        "by_seed": by_seed(cells),
        "chosen": chosen_seeds(cells),
        "l1": other_settings(cells),
        "er_draws": with_common_seeds(read("er-draws.jsonl", folder), "replay_size", 128, 32),
        "precision": {
            name: with_common_seeds(read("precision.jsonl", folder), "precision", "bfloat16", "float32", measure)
            for name, measure in (("tail", TAIL_MEAN), ("task_il", "task_il_accuracy"))
        },
        "witnesses": other_papers(),
        "lwf": teachers(read("lwf.jsonl", folder)),
        "checks": distribution_checks(read("checks.jsonl", folder)),
    }
    return _plain(found)


def other_papers() -> dict[str, float]:
    """How far our runs of other papers' methods lie from what those papers published for S-CIFAR-10."""
    chosen = ["benchmark=seq-cifar10", "metric=accuracy", *(f"method={method}" for method in WITNESSES)]
    verdicts = assess(EXPERIMENTS["field"].select(chosen), gather([RESULTS])).verdicts
    differences = [verdict.difference for verdict in verdicts if verdict.n]
    return {"cells": len(differences), "mean": np.mean(differences), "largest": np.abs(differences).max()}


def _paper_cells() -> list[Verdict]:
    """The cells of S-CIFAR-10 in the paper's main table, of methods with a buffer."""
    chosen = EXPERIMENTS["table1"].select(["benchmark=seq-cifar10", "buffer_size=200", "buffer_size=500"])
    return [verdict for verdict in assess(chosen, gather([RESULTS])).verdicts if verdict.cell.metric == "accuracy"]


def _plain(value: Any) -> Any:
    """JSON values, rounded to what matters, so that versions of scipy do not show."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(each) for each in value]
    if isinstance(value, (bool, int)):
        return value
    return round(float(value), 4)


if __name__ == "__main__":
    print(json.dumps(numbers(), indent=1))
