"""The loop: a generator that yields after every step, so that runs can be watched, stopped and interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.benchmarks import Benchmark, Task, shuffled
from holdfast.benchmarks import build as build_benchmark
from holdfast.config import RunConfig
from holdfast.data import ImageSet, data_root
from holdfast.engine import Engine, make_engine
from holdfast.errors import TrainingError, UsageError
from holdfast.evaluation import Exam, evaluate, grade, predict
from holdfast.learners import Learner, Parts, PlainSgd
from holdfast.learners import build as build_learner
from holdfast.models import MODELS, group_batchnorm
from holdfast.results import RunResult, environment
from holdfast.rng import generator, seeded_globally

__all__ = ["Progress", "choose_device", "run", "train"]


@dataclass(slots=True)
class Progress:
    """Where a run stands; updated in place after every step."""

    config: RunConfig
    stages: int
    task: int = 0
    epoch: int = 0
    step: int = 0
    """Steps done since the start of the run."""
    fraction: float = 0.0
    """Share of the training done, 0 to 1."""
    losses: dict[str, float] | None = None
    """Mean loss terms of the last steps that were read."""
    row: list[float] | None = None
    """Accuracies after the last finished task."""


def train(config: RunConfig, benchmark: Benchmark, device: torch.device) -> Generator[Progress, None, RunResult]:
    """Train and evaluate as `config` says; yields after every step and returns the result."""
    clock = _Clock()
    model, learner, order, engine = _prepare(config, benchmark, device)
    stages: list[Callable[[], ImageSet]] = [task.train for task in benchmark.tasks]
    batches = benchmark.batches
    if learner.all_at_once:
        stages, batches = [benchmark.joint], shuffled
    exams = [_exam(task, benchmark.classes, device) for task in benchmark.tasks]
    untrained = evaluate(model, exams, benchmark.normalize, config.precision)
    matrices = torch.full((2, len(stages), len(exams)), torch.nan, dtype=torch.float64)
    progress = Progress(config, len(stages))
    clock.lap("setup")

    for stage, make_data in enumerate(stages):
        progress.task = stage
        data = make_data()
        engine.load(data, benchmark.classes)
        clock.lap("data")
        for epoch in range(config.epochs):
            progress.epoch = epoch
            epoch_batches = list(batches(len(data.labels), config.batch_size, order))
            for number, indices in enumerate(epoch_batches, start=1):
                engine.step(indices)
                progress.step += 1
                progress.fraction = (stage + (epoch + number / len(epoch_batches)) / config.epochs) / len(stages)
                if engine.log.due():
                    progress.losses = _read(engine, progress)
                yield progress
        progress.losses = _read(engine, progress)
        clock.lap("training")
        # What has been seen, and the next task for forward transfer; after the last stage that is everything.
        known = exams[: stage + 2] if stage + 1 < len(stages) else exams
        logits = [predict(model, exam.images.images, benchmark.normalize, config.precision) for exam in known]
        row = grade(logits, known)
        matrices[:, stage, : len(known)] = torch.tensor(row, dtype=torch.float64)
        progress.row = row.class_il
        clock.lap("evaluation")
        yield progress

    return RunResult(
        config=config,
        matrix=matrices[0],
        task_matrix=matrices[1],
        untrained=torch.tensor(untrained.class_il, dtype=torch.float64),
        seconds=clock.total(),
        timing=clock.seconds | _rates(engine, clock, progress.step),
        environment=environment(device),
        logits=_answers(logits, exams),
        weights={name: tensor.cpu().clone().contiguous() for name, tensor in model.state_dict().items()},
    )


def _prepare(
    config: RunConfig, benchmark: Benchmark, device: torch.device
) -> tuple[nn.Module, Learner, torch.Generator, Engine]:
    """The network, the learner around it, the generator of the order of samples, and the engine."""
    model = build_model(config, benchmark).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as tensor cores want it
    order, augment, buffer = (generator(config.seed, name, device) for name in ("order", "augment", "buffer"))
    optimizer = PlainSgd(model.parameters(), config.lr)
    learner = build_learner(config, Parts(model, optimizer, benchmark.train_view(augment), buffer))
    return model, learner, order, make_engine(learner, device, (augment, buffer), config.batch_size)


def build_model(config: RunConfig, benchmark: Benchmark) -> nn.Module:
    """The network of a run, initialised from its seed, ready for several minibatches in one pass."""
    with seeded_globally(config.seed, "init"):
        return group_batchnorm(MODELS[config.model](benchmark.shape, benchmark.classes))


def run(
    config: RunConfig,
    benchmark: Benchmark | None = None,
    *,
    data: Path | str | None = None,
    device: str = "auto",
    threads: int | None = None,
    on_step: Callable[[Progress], None] | None = None,
) -> RunResult:
    """Carry out one run and return its result; `on_step` is called after every step.

    `benchmark` is built from `config` and the data root `data` if it is not given.
    `threads` are torch's CPU threads; by default 1 for the small MLP, whose products are too small to share, and
    torch's own choice for larger networks.
    """
    target = choose_device(device)
    benchmark = benchmark or build_benchmark(config, data_root(data), target)
    with _threads(threads or (1 if config.model == "mlp" else torch.get_num_threads())), _own_stream(target):
        steps = train(config, benchmark, target)
        while True:
            try:
                progress = next(steps)
            except StopIteration as end:
                result: RunResult = end.value
                return result
            if on_step:
                on_step(progress)


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"unknown device '{name}': use cpu, cuda or auto.")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("no CUDA device is available here; use --device cpu.")
    return torch.device(name)


def _read(engine: Engine, progress: Progress) -> dict[str, float]:
    """The engine's loss terms; a loss that is not finite ends the run, with the place where it happened."""
    try:
        return engine.log.read()
    except TrainingError as error:
        raise TrainingError(f"{progress.config.title}, task {progress.task + 1}: {error}") from None


def _exam(task: Task, outputs: int, device: torch.device) -> Exam:
    """A task's test set on the device."""
    mask = torch.zeros(outputs, dtype=torch.bool)
    mask[list(task.classes)] = True
    images = ImageSet(task.test.images.to(device), task.test.labels.to(device))
    return Exam(images, None if mask.all() else mask.to(device))


def _answers(logits: list[Tensor], exams: list[Exam]) -> dict[str, Tensor]:
    """The final logits and the labels of every test set, by name, for the analyses."""
    kept = {f"logits.{number}": answers.cpu() for number, answers in enumerate(logits)}
    # Tasks may share their labels; tensors in a file may not.
    labels = {f"labels.{number}": exam.images.labels.cpu().clone() for number, exam in enumerate(exams)}
    return kept | labels


def _rates(engine: Engine, clock: _Clock, steps: int) -> dict[str, float]:
    """Steps, steps per second of training, and seconds from the start until steps ran at full speed."""
    return {
        "steps": steps,
        "steps_per_second": steps / clock.seconds["training"],
        "until_full_speed": (engine.at_full_speed or clock.last) - clock.start,
    }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Steps are captured in CUDA graphs, which the default stream does not allow."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


class _Clock:
    """Wall time by what it was spent on."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def total(self) -> float:
        return time.perf_counter() - self.start
