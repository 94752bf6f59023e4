"""A finished run -> what its files say about calibration, recency and robustness. Nothing is trained again."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import results
from holdfast.analysis.calibration import Calibration, calibration
from holdfast.analysis.corruptions import BENCHMARK_CORRUPTIONS, CORRUPTIONS, SEVERITIES
from holdfast.analysis.recency import Recency, recency
from holdfast.analysis.robustness import CorruptedImages, Robustness, robustness
from holdfast.benchmarks import BENCHMARKS, Benchmark, make_benchmark
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.errors import DataError, HoldfastError, UsageError
from holdfast.evaluation import predict
from holdfast.methods import LEARNERS, REGULARIZERS, is_registered, learner_of
from holdfast.models import MODELS
from holdfast.results import RunResult
from holdfast.training import build_model

__all__ = ["RunAnalysis", "analyze_run", "exam_images", "final_model", "find_runs", "rerun_command", "with_robustness"]


@dataclass(frozen=True)
class RunAnalysis:
    """What one run's files say. None where it is not defined or a file it takes is missing; `notes` say why.

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
    """What the logits in `folder` say about calibration and recency; its weights are left for `with_robustness`."""
    result, logits = results.read(folder), results.read_tensors(folder, results.LOGITS)
    if not logits:
        again = rerun_command(result.config, folder)
        note = f"{folder} has no logits: no calibration, no recency. To get them: {again}"
        return RunAnalysis(folder, result, None, None, notes=(note,))
    try:
        return RunAnalysis(folder, result, *_analyze(logits, bins))
    except (UsageError, RuntimeError) as error:
        raise DataError(f"{folder / results.LOGITS} ({result.config.title}): {error}") from error


def _analyze(stored: Mapping[str, Tensor], bins: int) -> tuple[Calibration, Recency | None]:
    """Calibration over all test sets, and recency if there are several tasks and each has classes of its own."""
    names = [(f"logits.{task}", f"labels.{task}") for task in range(max(1, len(stored) // 2))]
    expected = {name for pair in names for name in pair}
    if expected != set(stored):
        raise UsageError(f"expected tensors {', '.join(sorted(expected))}, found {', '.join(sorted(stored))}.")
    logits, labels = (torch.cat([stored[name] for name in column]) for column in zip(*names, strict=True))
    classes: list[list[int]] = [torch.unique(stored[name]).tolist() for _, name in names]
    disjoint = sum(map(len, classes)) == len(torch.unique(labels))
    return calibration(logits, labels, bins), recency(logits, classes) if disjoint and len(classes) > 1 else None


def _check_registered(config: RunConfig, folder: Path) -> None:
    """Raise if the method of a run is unknown: what it makes of the network is then unknown as well."""
    if not is_registered(config.method):
        raise UsageError(
            f"{folder} is a run of the method '{config.method}', which is not registered. If a plugin has it, import "
            "its module first: --plugin MODULE on the command line."
        )


def rerun_command(config: RunConfig, folder: Path) -> str:
    """What to type to make the result in `folder` again, with logits and weights."""
    _check_registered(config, folder)
    preset = RunConfig.preset(config.benchmark, config.method, buffer_size=config.buffer_size, seed=config.seed)
    parts = ["holdfast", "run", config.benchmark, config.method]
    parts += [] if config.buffer_size is None else ["--buffer-size", str(config.buffer_size)]
    parts += ["--seed", str(config.seed)]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in ("options", "settings") and value != getattr(preset, field.name):
            parts += ["--set", f"{field.name}={value}"]
    own = [f"regularizer.{name}={number}" for name, number in config.options]
    own += [f"{name}={value}" for name, value in config.settings if (name, value) not in preset.settings]
    parts += [part for each in own for part in ("--set", each)]
    parts += [part for name in _plugins(config) for part in ("--plugin", name)]
    named = folder if folder.name.strip(".") else folder.resolve()  # the parent of "." would be "." itself
    return " ".join(map(quote, [*parts, "--out", str(named.parent), "--force"]))


def _plugins(config: RunConfig) -> list[str]:
    """The modules from outside that register what the run needs."""
    methods = LEARNERS.origin(config.method), REGULARIZERS.origin(config.method)
    found = {BENCHMARKS.origin(config.benchmark), *methods, MODELS.origin(config.model)}
    return sorted(name for name in found if name and name.partition(".")[0] not in ("holdfast", "__main__"))


def exam_images(benchmark: Benchmark) -> ImageSet:
    """All images that runs are tested on; if corruptions of them are published, in the order of that publication."""
    if benchmark.corruptible is not None:
        return benchmark.corruptible
    return ImageSet.joined(task.test for task in benchmark.tasks)


def with_robustness(
    runs: Sequence[RunAnalysis],
    root: Path,
    *,
    corruptions: Sequence[str] = BENCHMARK_CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int, str], None] | None = None,
    made: CorruptedImages | None = None,
) -> list[RunAnalysis]:
    """The runs with their final models evaluated on corrupted test images; data comes from the data root `root`.

    Where corruptions of a benchmark's test images are published and lie in `root`, those are used; everything else is
    generated. Grey images leave out the corruptions that need colour. Runs tested on the same images share the
    corrupted ones, also with other calls that are given the same `made`. A run whose weights are missing or damaged
    comes back with a note that says so. `progress` is called after each evaluation, with counts over all runs.
    """
    for run in runs:
        _check_registered(run.config, run.folder)  # now, and not after the evaluation of the runs before it
    total = sum((run.folder / results.WEIGHTS).exists() for run in runs)
    done = itertools.count(1)

    def advance(_: int, each: int, name: str) -> None:
        if progress is not None:
            progress(next(done), each * total, name)

    options = {"severities": severities, "progress": advance, "made": made or CorruptedImages()}
    found = []
    for run in runs:
        readable = _readable_model(run, root)
        if isinstance(readable, str):
            found.append(replace(run, notes=(*run.notes, readable)))
        else:
            evaluated = _evaluate(run, readable, root, device, corruptions, **options)
            found.append(replace(run, robustness=evaluated))
    return found


def _readable_model(run: RunAnalysis, root: Path) -> tuple[nn.Module, Benchmark] | str:
    """What `final_model` gives for the run, or why there is no such model."""
    try:
        weights = results.read_tensors(run.folder, results.WEIGHTS)
    except HoldfastError as error:
        return f"no robustness: {error}"
    if not weights:
        again = rerun_command(run.config, run.folder)
        return f"{run.folder} has no weights: no robustness. To get them: {again}"
    benchmark = make_benchmark(run.config, root)
    try:
        return _network(run.folder, run.config, weights, benchmark), benchmark
    except DataError as error:
        return f"no robustness: {error}"


def _evaluate(
    run: RunAnalysis,
    final: tuple[nn.Module, Benchmark],
    root: Path,
    device: torch.device | str,
    corruptions: Iterable[str],
    **options: Any,
) -> Robustness:
    """What `robustness` says of a run's final model."""
    model, benchmark = final
    classify = partial(predict, model.to(device), view=benchmark.normalize, precision=run.config.precision)
    images, labels = exam_images(benchmark)
    grey = images.ndim == 4 and images.shape[1] == 1
    names = [name for name in corruptions if not (grey and CORRUPTIONS[name].needs_colour)]
    published = None if benchmark.corruptible is None else root
    return robustness(classify, images.to(device), labels.to(device), names, published=published, **options)


def final_model(
    folder: Path, config: RunConfig, weights: Mapping[str, Tensor], root: Path
) -> tuple[nn.Module, Benchmark]:
    """The network that a run ended with, and its benchmark, whose data comes from the data root `root`."""
    _check_registered(config, folder)
    benchmark = make_benchmark(config, root)
    return _network(folder, config, weights, benchmark), benchmark


def _network(folder: Path, config: RunConfig, weights: Mapping[str, Tensor], benchmark: Benchmark) -> nn.Module:
    """The network that a run on the benchmark ended with; a DataError if the weights are of another one."""
    model: nn.Module = learner_of(config.method).wrap(build_model(config, benchmark), **dict(config.settings))
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{folder / results.WEIGHTS} does not fit the model of its run ({reason}). "
            f"To make it again: {rerun_command(config, folder)}"
        ) from error
    return model
