"""Finished runs -> what the analyses say about them: per run, over the seeds of a config, and method against method.

Runs keep the logits of their test sets and their final weights, so that nothing is trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import results
from holdfast.analysis.calibration import Calibration, calibration
from holdfast.analysis.corruptions import BENCHMARK_CORRUPTIONS, SEVERITIES
from holdfast.analysis.overview import Gains, Scores, gains
from holdfast.analysis.recency import Recency, recency
from holdfast.analysis.robustness import Robustness, robustness_of
from holdfast.analysis.transfer import Bootstrap, Estimate, Transfer, transfer
from holdfast.benchmarks import Benchmark, make_benchmark, shared_dataset
from holdfast.config import WITHOUT_BUFFER, RunConfig
from holdfast.data import ImageSet
from holdfast.errors import DataError, HoldfastError, UsageError
from holdfast.evaluation import predict
from holdfast.results import RunResult
from holdfast.training import build_model

__all__ = [
    "Claim",
    "Findings",
    "RunAnalysis",
    "Summary",
    "analyze_run",
    "claims",
    "exam_images",
    "final_model",
    "find_runs",
    "findings",
    "rerun_command",
    "summarize",
    "with_robustness",
]

REFERENCE = "er"
"""The method all others are measured against."""

GREY_HAS_NO = "saturate"
"""The one corruption that needs colour."""


@dataclass(frozen=True)
class RunAnalysis:
    """What one run's files say. None where it is not defined or the run does not hold what it takes; `notes` say why.

    `recency` is for tasks with classes of their own (Class-IL), `robustness` for runs whose weights were evaluated.
    """

    folder: Path
    result: RunResult
    calibration: Calibration | None
    recency: Recency | None
    robustness: Robustness | None = None
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.result.config


@dataclass(frozen=True)
class Summary:
    """One config over its seeds. Estimates are means with bootstrap intervals; None where no seed has the number.

    `calibration` pools the bins of all seeds, and its errors are theirs; `ece` and `mce` are means of each seed's own.
    `recency` and `robustness` hold means over the seeds.
    """

    label: str
    config: RunConfig
    seeds: tuple[int, ...]
    accuracy: Estimate
    ece: Estimate | None
    mce: Estimate | None
    recency_gap: Estimate | None
    mra: Estimate | None
    transfer: Transfer
    calibration: Calibration | None
    recency: Recency | None
    robustness: Robustness | None

    @property
    def method(self) -> str:
        """The method's name."""
        return self.config.method

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        shown = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "config"}
        plain = {
            name: value if value is None or name in ("label", "seeds") else asdict(value)
            for name, value in shown.items()
        }
        return {**plain, "method": self.method, "config": {**self.config.to_dict(), "seed": None}}


@dataclass(frozen=True)
class Claim:
    """A claim of the paper on the runs at hand: whether it `holds`, and the numbers that decide it."""

    text: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Findings:
    """Methods compared on one benchmark. `gains` are over `er`, by label, for the methods that can be compared.

    A gain in recency is None where tasks share their classes.
    """

    title: str
    summaries: tuple[Summary, ...]
    gains: dict[str, dict[str, float | None]]
    claims: tuple[Claim, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "title": self.title,
            "benchmark": self.summaries[0].config.benchmark,
            "methods": [summary.to_json() for summary in self.summaries],
            "relative_gains_over_er": self.gains,
            "claims": [asdict(claim) for claim in self.claims],
        }


# --- one run ---


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The result folders at the `places`, each a result folder itself or a folder of them, in a fixed order."""
    found: dict[Path, Path] = {}
    for place in places:
        if not place.is_dir():
            raise UsageError(f"{place} is not a folder; give a result folder, or a folder of result folders.")
        inside = [place] if _is_run(place) else sorted(folder for folder in place.iterdir() if _is_run(folder))
        if not inside:
            raise HoldfastError(
                f"{place} holds no result: neither {results.RESULT} nor folders with one. "
                "'holdfast run BENCHMARK METHOD --out DIR' makes some."
            )
        found |= {folder.resolve(): folder for folder in inside}
    return list(found.values())


def _is_run(folder: Path) -> bool:
    # Hidden folders are results being written.
    return not folder.name.startswith(".") and (folder / results.RESULT).is_file()


def analyze_run(folder: Path, *, bins: int = 15) -> RunAnalysis:
    """What the files in `folder` say about calibration and recency; its weights are left for `with_robustness`."""
    result = results.read(folder, tensors=True)
    bare = replace(result, logits={}, weights={})
    if not result.logits:
        note = (
            f"{folder} keeps no logits: no calibration, no recency. To get them: {rerun_command(result.config, folder)}"
        )
        return RunAnalysis(folder, bare, None, None, notes=(note,))
    try:
        tests = _tests(result.logits)
        logits, labels = (torch.cat(parts) for parts in zip(*tests, strict=True))
        calibrated = calibration(logits, labels, bins)
        return RunAnalysis(folder, bare, calibrated, _recency(logits, [labels for _, labels in tests]))
    except (UsageError, RuntimeError) as error:
        raise DataError(f"{folder / results.LOGITS} ({result.config.title}): {error}") from error


def _tests(stored: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Logits and labels of each test set, in the order of tasks."""
    names = [f"{kind}.{task}" for task in range(max(1, len(stored) // 2)) for kind in ("logits", "labels")]
    if set(names) != set(stored):
        raise UsageError(f"expected tensors {', '.join(names)}, found {', '.join(sorted(stored))}.")
    return [(stored[logits], stored[labels]) for logits, labels in zip(names[::2], names[1::2], strict=True)]


def _recency(logits: Tensor, labels: Sequence[Tensor]) -> Recency | None:
    """The recency bias, if there are several tasks and each has classes of its own."""
    classes: list[list[int]] = [torch.unique(part).tolist() for part in labels]
    every = [label for task in classes for label in task]
    return recency(logits, classes) if len(classes) > 1 and len(set(every)) == len(every) else None


def rerun_command(config: RunConfig, folder: Path) -> str:
    """What to type to make the result in `folder` again, with logits and weights."""
    preset = RunConfig.preset(config.benchmark, config.method, buffer_size=config.buffer_size, seed=config.seed)
    parts = ["holdfast", "run", config.benchmark, config.method]
    parts += [] if config.buffer_size is None else ["--buffer-size", str(config.buffer_size)]
    parts += ["--seed", str(config.seed)]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name != "options" and value != getattr(preset, field.name):
            parts += ["--set", f"{field.name}={value}"]
    for name, number in config.options:
        parts += ["--set", f"regularizer.{name}={number}"]
    return " ".join(map(quote, [*parts, "--out", str(folder.parent), "--force"]))


# --- robustness of one run ---


def exam_images(config: RunConfig, root: Path) -> ImageSet:
    """All test images of a run's benchmark; those of CIFAR-10 in their published order, which CIFAR-10-C follows."""
    if config.benchmark == "seq-cifar10":
        return shared_dataset("cifar10", root).test  # read once for all runs
    tests = [task.test for task in make_benchmark(config, root).tasks]
    return ImageSet(torch.cat([test.images for test in tests]), torch.cat([test.labels for test in tests]))


def with_robustness(
    runs: Sequence[RunAnalysis],
    root: Path,
    *,
    corruptions: Sequence[str] = BENCHMARK_CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int, str], None] | None = None,
) -> list[RunAnalysis]:
    """The runs with their final models evaluated on corrupted test images; data comes from the data root `root`.

    Runs on seq-cifar10 use the published CIFAR-10-C where it is in `root`; everything else is generated. The images
    corrupted are those the network is tested on, colour or grey; grey ones leave out 'saturate'. Runs tested on the
    same images share the corrupted ones. A run that keeps no weights comes back with a note that says how to get them.
    `progress` is called after each evaluation, with counts over the runs tested on the same images.
    """
    done = [run if (run.folder / results.WEIGHTS).exists() else _without_weights(run) for run in runs]
    for numbers, images, labels in _same_exams(runs, root):
        config = runs[numbers[0]].config
        grey = images.ndim == 4 and images.shape[1] == 1
        found = robustness_of(
            [_classifier(runs[number], root, torch.device(device)) for number in numbers],
            images.to(device),
            labels.to(device),
            [name for name in corruptions if not (grey and name == GREY_HAS_NO)],
            severities,
            progress=progress,
            published=root if config.benchmark == "seq-cifar10" else None,
        )
        for number, one in zip(numbers, found, strict=True):
            done[number] = replace(runs[number], robustness=one)
    return done


def _same_exams(runs: Sequence[RunAnalysis], root: Path) -> list[tuple[list[int], Tensor, Tensor]]:
    """Numbers of the runs with weights that are tested on the same images, with those and their labels."""
    found: list[tuple[list[int], Tensor, Tensor]] = []
    for number, run in enumerate(runs):
        if not (run.folder / results.WEIGHTS).exists():
            continue
        images, labels = exam_images(run.config, root)
        for numbers, theirs, their_labels in found:
            same = run.config.benchmark == runs[numbers[0]].config.benchmark
            if same and torch.equal(images, theirs) and torch.equal(labels, their_labels):
                numbers.append(number)
                break
        else:
            found.append(([number], images, labels))
    return found


def _without_weights(run: RunAnalysis) -> RunAnalysis:
    note = f"{run.folder} keeps no weights: no robustness. To get them: {rerun_command(run.config, run.folder)}"
    return replace(run, notes=(*run.notes, note))


def _classifier(run: RunAnalysis, root: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The run's final model as a function of uint8 images."""
    weights = results.read(run.folder, tensors=True).weights
    model, benchmark = final_model(run.folder, run.config, weights, root)
    model.to(device)
    return lambda images: predict(model, images, benchmark.normalize, run.config.precision)


def final_model(
    folder: Path, config: RunConfig, weights: Mapping[str, Tensor], root: Path
) -> tuple[nn.Module, Benchmark]:
    """The network that a run ended with, and its benchmark, whose data comes from the data root `root`."""
    benchmark = make_benchmark(config, root)
    model = build_model(config, benchmark)
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{folder / results.WEIGHTS} does not fit the model of its run ({reason}). "
            f"To make it again: {rerun_command(config, folder)}"
        ) from error
    return model, benchmark


# --- the seeds of one config ---


def summarize(label: str, runs: Sequence[RunAnalysis]) -> Summary:
    """One config over its seeds: runs that differ in nothing but the seed."""
    config = runs[0].config
    if any(run.config.change(seed=0) != config.change(seed=0) for run in runs):
        raise UsageError(f"'{label}': runs summed up together must differ in nothing but their seed.")
    calibrations = [run.calibration for run in runs if run.calibration]
    recencies = [run.recency for run in runs if run.recency]
    robust = [run.robustness for run in runs if run.robustness]
    transferred = _transfer(runs)
    if transferred.accuracy is None:
        raise DataError(f"{runs[0].folder}: the accuracies after the last task are incomplete.")
    return Summary(
        label=label,
        config=config,
        seeds=tuple(run.config.seed for run in runs),
        accuracy=transferred.accuracy,
        ece=_estimate([one.ece for one in calibrations]),
        mce=_estimate([one.mce for one in calibrations]),
        recency_gap=_estimate([one.gap for one in recencies]),
        mra=_estimate([one.mra for one in robust if one.mra is not None]),
        transfer=transferred,
        calibration=_pooled(calibrations),
        recency=_mean_recency(recencies),
        robustness=_mean_robustness(robust),
    )


def _estimate(values: Sequence[float]) -> Estimate | None:
    return Bootstrap(len(values), 0.95, 10_000, 0)(values) if values else None


def _transfer(runs: Sequence[RunAnalysis]) -> Transfer:
    """Transfer over the tasks; a method that trains on all tasks at once has an accuracy only."""
    matrices = [run.result.matrix for run in runs]
    if any(len(matrix) != matrix.shape[1] for matrix in matrices):
        return transfer([[[run.result.accuracy]] for run in runs])
    return transfer([matrix.tolist() for matrix in matrices], [run.result.untrained.tolist() for run in runs])


def _pooled(parts: Sequence[Calibration]) -> Calibration | None:
    """The calibration of all seeds' predictions together."""
    if not parts:
        return None
    count = [sum(counts) for counts in zip(*(part.count for part in parts), strict=True)]

    def mean(values: Callable[[Calibration], list[float]]) -> list[float]:
        weighed = [[n * value for n, value in zip(part.count, values(part), strict=True)] for part in parts]
        return [sum(column) / max(1, n) for column, n in zip(zip(*weighed, strict=True), count, strict=True)]

    confidence, accuracy = mean(lambda part: part.confidence), mean(lambda part: part.accuracy)
    gaps = [abs(a - c) for a, c in zip(accuracy, confidence, strict=True)]
    ece = sum(n * gap for n, gap in zip(count, gaps, strict=True)) / sum(count)
    return Calibration(100 * ece, 100 * max(gaps), confidence, accuracy, count, parts[0].bins)


def _mean_recency(parts: Sequence[Recency]) -> Recency | None:
    if not parts:
        return None
    return Recency(
        _mean_list([part.task_probabilities for part in parts]),
        fmean(part.gap for part in parts),
        _mean_list([part.prediction_shares for part in parts]),
    )


def _mean_robustness(parts: Sequence[Robustness]) -> Robustness | None:
    if not parts:
        return None
    mras = [part.mra for part in parts if part.mra is not None]
    return replace(
        parts[0],
        clean=fmean(part.clean for part in parts),
        accuracy={name: _mean_list([part.accuracy[name] for part in parts]) for name in parts[0].accuracy},
        per_corruption=_mean_dict([part.per_corruption for part in parts]),
        per_category=_mean_dict([part.per_category for part in parts]),
        mra=fmean(mras) if mras else None,
    )


def _mean_list(rows: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(column) for column in zip(*rows, strict=True)]


def _mean_dict(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}


# --- method against method ---


def findings(title: str, summaries: Sequence[Summary]) -> Findings:
    """The methods compared, with their gains over er and the paper's claims where er is among them."""
    return Findings(title, tuple(summaries), _gains(summaries), claims(summaries))


def _reference(summaries: Sequence[Summary]) -> Summary | None:
    """The one summary of er; None if there is none, or if several settings of it leave the choice open."""
    found = [summary for summary in summaries if summary.method == REFERENCE]
    return found[0] if len(found) == 1 else None


def _rivals(summaries: Sequence[Summary]) -> list[Summary]:
    """The methods the claims are about: er with something added, not the bounds sgd and joint."""
    return [summary for summary in summaries if summary.method not in (REFERENCE, *WITHOUT_BUFFER)]


def _gains(summaries: Sequence[Summary]) -> dict[str, dict[str, float | None]]:
    reference = _reference(summaries)
    if reference is None or (base := _scores(reference)) is None:
        return {}
    made: dict[str, dict[str, float | None]] = {}
    for summary in _rivals(summaries):
        score = _scores(summary)
        if score is not None and base.accuracy > 0 and base.ece < 100 and base.recency_gap < 1:
            values: Gains = gains(score, base)
            defined = summary.recency_gap is not None
            made[summary.label] = {**asdict(values), "recency": values.recency if defined else None}
    return made


def _scores(summary: Summary) -> Scores | None:
    if summary.ece is None or not isfinite(summary.accuracy.mean):
        return None
    # Without a gap of its own, a method is compared in the other two; the recency gain is then dropped.
    gap = 0.0 if summary.recency_gap is None else summary.recency_gap.mean
    return Scores(summary.accuracy.mean, gap, summary.ece.mean)


def claims(summaries: Sequence[Summary]) -> tuple[Claim, ...]:
    """The paper's claims about er, each decided by the means over seeds where er and another method have the number."""
    questions: list[tuple[str, str, Callable[[Summary], Estimate | None], bool]] = [
        ("er is the most miscalibrated", "ECE", lambda summary: summary.ece, True),
        ("er is the most biased towards the last task", "recency gap", lambda summary: summary.recency_gap, True),
        ("er is the least robust", "mRA", lambda summary: summary.mra, False),
    ]
    reference, rivals = _reference(summaries), _rivals(summaries)
    decided = []
    for text, quantity, number, most in questions:
        own = None if reference is None else number(reference)
        others = {rival.label: value.mean for rival in rivals if (value := number(rival)) is not None}
        if own is None or not others:
            continue
        # Against the claim are those further out than er; if there are none, the nearest shows by how much it holds.
        order = sorted(others, key=lambda label: others[label], reverse=most)
        against = [label for label in order if (others[label] >= own.mean if most else others[label] <= own.mean)]
        numbers = ", ".join(f"{label} {others[label]:.2f}" for label in against or order[:1])
        decided.append(Claim(text, not against, f"{quantity}: er {own.mean:.2f}, {numbers}"))
    return tuple(decided)
