"""The loop: a generator that yields after every step, so that runs can be watched, stopped and interleaved."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import checkpoint
from holdfast.benchmarks import Benchmark, Task, make_benchmark, shuffled
from holdfast.config import PROTOCOL, RunConfig
from holdfast.data import ImageSet, data_root
from holdfast.engine import Engine, make_engine
from holdfast.errors import CheckpointError, TrainingError, UsageError
from holdfast.evaluation import Exam, evaluate, grade, predict
from holdfast.learners import Learner, Parts, PlainSgd
from holdfast.learners import build as build_learner
from holdfast.models import MODELS, group_batchnorm, preferred_threads
from holdfast.results import RunResult, environment
from holdfast.rng import generator, own_generators, restore, seeded_globally, swapped_globally

__all__ = ["Keeper", "Progress", "choose_device", "run", "train"]

log = logging.getLogger(__name__)

KEPT = ("task", "epoch", "batch", "step", "fraction", "losses", "row")
"""What a checkpoint holds of a run's progress."""


WATCHED = 50
"""So many steps of a run are watched for draws from PyTorch's global generators."""


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
    batch: int = 0
    """Minibatches done of this epoch."""

    def advance(self, batches: int) -> None:
        """Count a step of an epoch that has so many `batches`."""
        self.step += 1
        self.batch += 1
        epochs = self.epoch + self.batch / batches
        self.fraction = (self.task + epochs / self.config.epochs) / self.stages


def train(
    config: RunConfig, benchmark: Benchmark, device: torch.device, keeper: Keeper | None = None
) -> Generator[Progress, None, RunResult]:
    """Train and evaluate as `config` says; yields after every step and returns the result.

    With a `keeper`, the run continues from the checkpoint there is, and its state is kept now and then.
    """
    return (yield from _secluded(_train(config, benchmark, device, keeper), config.seed, device))


def _secluded(
    steps: Generator[Progress, None, RunResult], seed: int, device: torch.device
) -> Generator[Progress, None, RunResult]:
    """The same steps, with generators of the run's own in the place of PyTorch's global ones while one is made.

    Layers such as dropout draw from those, and so may whatever happens between two steps: another run's, for instance.
    Swapping them takes time, so it ends after `WATCHED` steps if none of them drew. Runs in several threads take turns
    as long as it is done: for a step each, never from one to the next, since nobody may ever ask for the next.
    """
    own, taken = own_generators(seed, "network", device), 0
    beginning = {kind: each.get_state() for kind, each in own.items()}
    while taken < WATCHED or any(not torch.equal(each.get_state(), beginning[kind]) for kind, each in own.items()):
        with swapped_globally(own):
            try:
                progress = next(steps)
            except StopIteration as end:
                result: RunResult = end.value
                return result
        taken += 1
        yield progress
    return (yield from steps)


def _train(
    config: RunConfig, benchmark: Benchmark, device: torch.device, keeper: Keeper | None
) -> Generator[Progress, None, RunResult]:
    """What `train` does, wherever PyTorch's global generators are."""
    clock = _Clock()
    model, learner, generators, engine = _prepare(config, benchmark, device)
    stages: list[Callable[[], ImageSet]] = [task.train for task in benchmark.tasks]
    batches = benchmark.batches
    if learner.all_at_once:
        stages, batches = [benchmark.joint], shuffled
    exams = [_exam(task, benchmark.classes, device) for task in benchmark.tasks]
    matrices = torch.full((2, len(stages), len(exams)), torch.nan, dtype=torch.float64)
    progress = Progress(config, len(stages))
    state = _State(learner, generators, engine, progress, matrices, clock)
    if keeper is None or not keeper.resume(state):
        state.untrained = evaluate(model, exams, benchmark.normalize, config.precision).class_il
    clock.lap("setup")

    # A run that continues enters this loop, and those over epochs and minibatches, where it left them.
    for stage in range(progress.task, len(stages)):
        progress.task = stage
        data = stages[stage]()
        engine.load(data, benchmark.classes)
        clock.lap("data")
        yield from _learn(len(data.labels), batches, state, keeper)
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
        progress.epoch = 0

    return RunResult(
        config=config,
        matrix=matrices[0],
        task_matrix=matrices[1],
        untrained=torch.tensor(state.untrained, dtype=torch.float64),
        seconds=clock.total(),
        timing=clock.seconds | _rates(engine, clock, progress.step),
        environment=environment(device),
        logits=_answers(logits, exams),
        weights={name: tensor.cpu().clone().contiguous() for name, tensor in model.state_dict().items()},
    )


def _learn(
    samples: int,
    batches: Callable[[int, int, torch.Generator], Iterable[Tensor]],
    state: _State,
    keeper: Keeper | None,
) -> Iterator[Progress]:
    """All epochs on the data that the engine holds."""
    engine, progress, order = state.engine, state.progress, state.generators["order"]
    for epoch in range(progress.epoch, progress.config.epochs):
        progress.epoch = epoch
        state.epoch_order = order.get_state()  # from which the epoch's order is made again
        epoch_batches = list(batches(samples, progress.config.batch_size, order))
        for indices in epoch_batches[progress.batch :]:
            engine.step(indices)
            progress.advance(len(epoch_batches))
            if engine.log.due():
                progress.losses = _read(engine, progress)
            if keeper is not None and keeper.due():
                keeper.keep(state)
            yield progress
        progress.batch = 0


def _prepare(
    config: RunConfig, benchmark: Benchmark, device: torch.device
) -> tuple[nn.Module, Learner, dict[str, torch.Generator], Engine]:
    """The network, the learner around it, the generators of all that is random, and the engine."""
    model = build_model(config, benchmark).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as tensor cores want it
    generators = {name: generator(config.seed, name, device) for name in ("order", "augment", "buffer")}
    augment, buffer = generators["augment"], generators["buffer"]
    optimizer = PlainSgd(model.parameters(), config.lr)
    learner = build_learner(config, Parts(model, optimizer, benchmark.train_view(augment), buffer))
    return model, learner, generators, make_engine(learner, device, (augment, buffer), config.batch_size)


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
    checkpoint: Path | str | None = None,
    every: float = 60.0,
) -> RunResult:
    """Carry out one run and return its result; `on_step` is called after every step.

    With `checkpoint`, the run's state is written to that file `every` so many seconds, and a run that was stopped
    continues from it: on a CPU, with the result it would have had without the stop, bit for bit. The file is left
    there at the end; remove it once the result is safe. Ctrl-C then lets the step at hand finish and writes the state
    before it ends the run; pressed a second time, it ends it at once.

    What the network draws from PyTorch's global generators, for dropout for instance, is decided by the seed as well;
    whoever else uses them finds them where they were. Only a network that draws nothing in its first 50 steps, and does
    so later, draws from wherever they are then. Runs in threads of one process each have the result they have alone;
    their steps take turns, all of them if a network draws and the first 50 of each if not.

    `benchmark` is built from `config` and the data root `data` if it is not given.
    `threads` are torch's CPU threads; by default 1 for the small MLP, whose products are too small to share, and
    torch's own choice for larger networks.
    """
    target = choose_device(device)
    keeper = Keeper(Path(checkpoint), config, target, every) if checkpoint is not None else None
    benchmark = benchmark or make_benchmark(config, data_root(data), target)
    threads = threads or preferred_threads(config.model) or torch.get_num_threads()
    with _threads(threads), _own_stream(target), keeper.stoppable() if keeper else nullcontext():
        steps = train(config, benchmark, target, keeper)
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


@dataclass
class _State:
    """Everything about a run that changes while it goes on."""

    learner: Learner
    generators: dict[str, torch.Generator]
    engine: Engine
    progress: Progress
    matrices: Tensor
    clock: _Clock
    untrained: list[float] = field(default_factory=list)
    """Accuracies of the untrained network."""
    epoch_order: Tensor | None = None
    """The state of the generator "order" when the epoch began."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue after the last step."""
        place = self.progress
        return {
            "learner": self.learner.state_dict(),
            "generators": {name: each.get_state() for name, each in self.generators.items()}
            | {"order": self.epoch_order},
            "log": self.engine.log.state_dict(),
            "progress": {name: getattr(place, name) for name in KEPT},
            "matrices": self.matrices,
            "untrained": self.untrained,
            "seconds": self.clock.seconds,
            "total": self.clock.total(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where the run was that gave `state`."""
        self.learner.load_state_dict(state["learner"])
        for name, each in self.generators.items():
            restore(each, state["generators"][name])
        self.engine.log.load_state_dict(state["log"])
        for name in KEPT:
            setattr(self.progress, name, state["progress"][name])
        self.matrices.copy_(state["matrices"])
        self.untrained = state["untrained"]
        self.clock.seconds, self.clock.before = state["seconds"], state["total"]


class Keeper:
    """Writes a run's state to a file every so many seconds, and finds it there again.

    A checkpoint that cannot be written, for instance because the disk is full, is a warning, not the end of the run.
    """

    def __init__(self, path: Path, config: RunConfig, device: torch.device, every: float = 60.0) -> None:
        if not every >= 0:
            raise UsageError(f"seconds between checkpoints must be at least 0, not {every}.")
        self.path, self.every = path, every
        self.about = {
            "fingerprint": config.fingerprint,
            "protocol": PROTOCOL,
            "config": config.to_dict(),
            "device": device.type,
        }
        self._next = time.perf_counter() + every
        self._warned = False
        self._stopping = False

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Inside, Ctrl-C, or being asked to end as batch systems do, makes a checkpoint due, which ends the run.

        The second time, it has the usual effect at once. In the middle of a step, the model may have learned from a
        minibatch that the buffer has not been offered yet.
        """
        usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        ours = [number for number, handler in usual.items() if signal.getsignal(number) == handler]
        if threading.current_thread() is not threading.main_thread():
            ours = []  # signals arrive elsewhere; others than these have a meaning already

        def stop(number: int, _frame: FrameType | None) -> None:
            signal.signal(number, usual[number])
            self._stopping = True

        for number in ours:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, usual[number])

    def due(self) -> bool:
        """Whether it is time to keep the state."""
        return self._stopping or time.perf_counter() >= self._next

    def keep(self, state: _State) -> None:
        """Write the state, which is that after a step; a loss that is not finite ends the run instead."""
        _read(state.engine, state.progress)
        state.clock.lap("training")
        outcome = f"its state is kept in {self.path}; started again in the same way, it continues from there."
        try:
            checkpoint.write(self.path, "run", state.state_dict(), self.about)
        except CheckpointError as error:
            outcome = f"but {error}"
            if not self._warned and not self._stopping:
                log.warning("the run goes on, %s", outcome)
            self._warned = True
        if self._stopping:
            raise KeyboardInterrupt(f"the run was stopped after step {state.progress.step}; {outcome}")
        state.clock.lap("checkpoints")
        self._next = time.perf_counter() + self.every

    def resume(self, state: _State) -> bool:
        """Bring the run to where its checkpoint is; False if there is none."""
        try:
            about, kept = checkpoint.read(self.path, "run")
        except CheckpointError:
            if self.path.exists():
                raise
            return False
        for name, own in self.about.items():
            if about.get(name) != own:
                raise CheckpointError(
                    f"{self.path} belongs to another run: {_difference(name, about.get(name), own)}. "
                    "Run with the settings it was made with, or delete it to start anew."
                )
        try:
            state.load_state_dict(kept)
        except checkpoint.NONSENSE as error:
            raise CheckpointError(f"{self.path} does not fit this run: {error} Delete it to start anew.") from error
        return True


def _difference(name: str, theirs: Any, own: Any) -> str:
    """What differs, down to the settings of a config."""
    if isinstance(theirs, dict) and isinstance(own, dict):
        names = [key for key in own | theirs if own.get(key) != theirs.get(key)]
        return ", ".join(f"{key} is {theirs.get(key)!r} there and {own.get(key)!r} here" for key in names)
    return f"{name} is {theirs!r} there and {own!r} here"


class _Clock:
    """Wall time by what it was spent on."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.before = 0.0
        """Seconds the run took before it was continued here."""
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def total(self) -> float:
        return time.perf_counter() - self.start + self.before
