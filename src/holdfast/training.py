"""The loop: a generator that yields after every step, so that runs can be watched, stopped and interleaved."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.augment import View
from holdfast.benchmarks.base import Benchmark, Task, make_benchmark, shuffled
from holdfast.config import RunConfig
from holdfast.data import ImageSet, data_root
from holdfast.devices import choose_device, cpu_threads, own_stream, threads_for
from holdfast.engine import Engine, accelerate, make_engine
from holdfast.errors import UsageError
from holdfast.evaluation import Exam, evaluate, grade, predict
from holdfast.learners import FadingRate, Learner, Parts, make_learner, make_optimizer
from holdfast.methods import learner_of
from holdfast.models import MODELS, group_batchnorm
from holdfast.models.batchnorm.ahead import compiling_ahead
from holdfast.results import RunResult, environment
from holdfast.rng import generator, seeded_globally
from holdfast.run_state import Checkpointer, Clock, Progress, RunState, on_stop_signals, secluded

__all__ = ["Progress", "build_model", "run", "train"]

Batches = Callable[[int, int, torch.Generator], Iterable[Tensor]]


def train(
    config: RunConfig, benchmark: Benchmark, device: torch.device, checkpointer: Checkpointer | None = None
) -> Generator[Progress, None, RunResult]:
    """Train and evaluate as `config` says; yields after every step and returns the result.

    With a `checkpointer`, the run continues from its checkpoint, if there is one, and writes its state now and then.
    """
    return (yield from secluded(_train(config, benchmark, device, checkpointer), config.seed, device))


def _train(
    config: RunConfig, benchmark: Benchmark, device: torch.device, checkpointer: Checkpointer | None
) -> Generator[Progress, None, RunResult]:
    """What `train` does, with PyTorch's global generators as they are."""
    clock = Clock()
    engine, generators = _prepare(config, benchmark, device)
    learner = engine.learner
    stages: list[Callable[[], ImageSet]] = [task.train for task in benchmark.tasks]
    # A learner that overrides no hook is not told of tasks: captured steps can be used from task to task.
    overridden = (type(learner).begin_task, type(learner).end_task) != (Learner.begin_task, Learner.end_task)
    batches, hooks = benchmark.batches, benchmark.boundaries and overridden
    if learner.all_at_once:
        stages, batches, hooks = [benchmark.joint], shuffled, False
    exams = [Exam.of(task.test, task.classes, benchmark.classes, device) for task in benchmark.tasks]
    matrices = torch.full((2, len(stages), len(exams)), torch.nan, dtype=torch.float64)
    progress = Progress(config, len(stages))
    state = RunState(engine, generators, progress, matrices, clock)
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    with compiling_ahead(learner.model, learner.passes, benchmark.shape, config.batch_size, dtype, device):
        if checkpointer is None or not checkpointer.resume(state):
            state.untrained = evaluate(learner.evaluated(), exams, benchmark.normalize, config.precision).class_il
    clock.lap("setup")

    # A run that continues enters this loop, and those over epochs and minibatches, where it left them.
    for stage in range(progress.task, len(stages)):
        progress.task = stage
        data = stages[stage]()
        engine.load(data, benchmark.classes)
        if not (progress.epoch or progress.batch):
            _begin(state, benchmark.tasks[stage] if hooks else None, len(data.labels), batches)
        clock.lap("data")
        yield from _learn(len(data.labels), batches, state, checkpointer)
        progress.losses = state.read_losses()
        if hooks:
            learner.end_task(data.images.to(device), data.labels.to(device))
            engine.learner_changed()
        del data  # before the next task's are made: memory holds one task at a time
        engine.unload()
        clock.lap("training")
        # Test on all tasks seen, and on the next one for forward transfer; after the last stage on all.
        logits = _test(state, exams[: stage + 2] if stage + 1 < len(stages) else exams, benchmark.normalize)
        clock.lap("evaluation")
        yield progress
        progress.epoch = 0

    return _result(state, logits, exams)


def _begin(state: RunState, task: Task | None, samples: int, batches: Batches) -> None:
    """Begin a task: tell the learner, if it wants to know, and restart the learning rate's schedule."""
    engine, config = state.engine, state.progress.config
    if task is not None:
        engine.learner.begin_task(task.classes)
        engine.learner_changed()
    if isinstance(engine.learner.scheduler, FadingRate):
        order = state.generators["order"]
        same = torch.Generator(order.device).set_state(order.get_state())  # to count minibatches without drawing
        engine.learner.scheduler.restart(config.epochs * len(list(batches(samples, config.batch_size, same))))


def _learn(samples: int, batches: Batches, state: RunState, checkpointer: Checkpointer | None) -> Iterator[Progress]:
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
                progress.losses = state.read_losses()
            if checkpointer is not None and checkpointer.due():
                checkpointer.save(state)
            yield progress
        progress.batch = 0


def _test(state: RunState, exams: Sequence[Exam], view: View) -> list[Tensor]:
    """Enter the accuracies on these test sets into the matrices, in the row of the task at hand; returns the logits."""
    network, progress = state.engine.learner.evaluated(), state.progress
    logits = [predict(network, exam.images.images, view, progress.config.precision) for exam in exams]
    accuracies = grade(logits, exams)
    state.matrices[:, progress.task, : len(exams)] = torch.tensor(accuracies, dtype=torch.float64)
    progress.row = accuracies.class_il
    return logits


def _prepare(
    config: RunConfig, benchmark: Benchmark, device: torch.device
) -> tuple[Engine, dict[str, torch.Generator]]:
    """The engine around a learner, and the generators of all that is random."""
    kind: type[Learner] = learner_of(config.method)
    if kind.needs_boundaries and not benchmark.boundaries:
        raise UsageError(
            f"{config.method} must be told where tasks begin and end, and {config.benchmark} has no such boundaries; "
            "choose a method that needs none, for instance er."
        )
    model = build_model(config, benchmark).to(device)
    for parameter in model.parameters():
        if parameter.dim() == 4:  # of a convolution: so tensor cores want it, and a CPU needs a fifth less time
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    generators = {name: generator(config.seed, name, device) for name in ("order", "augment", "buffer")}
    augment, buffer = generators["augment"], generators["buffer"]
    plain, schedule = make_optimizer(config, model, device)
    network, optimizer = accelerate(model, plain, config.precision, device, twin=not kind.uses_parameters)
    learner = make_learner(config, Parts(model, optimizer, benchmark.train_view(augment), buffer, network, schedule))
    return make_engine(learner, device, (augment, buffer), config.batch_size), generators


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
    on_step: Callable[[Progress], object] | None = None,
    checkpoint: Path | str | None = None,
    every: float = 60.0,
) -> RunResult:
    """Carry out one run and return its result; `on_step` is called after every step.

    With `checkpoint`, the run's state is written to that file `every` so many seconds. A run that was stopped continues
    from it: on a CPU, with the result it would have had without the stop, bit for bit. The file is left there at the
    end; remove it once the result is safe. Ctrl-C then waits for the end of the step and writes the state before it
    ends the run; pressed a second time, it ends the run at once.

    The seed also decides what the network draws from PyTorch's global generators, for dropout for instance; after the
    run they are in the state they were in before. One exception: a network that draws nothing in its first 50 steps,
    and draws later, draws from the global generators as they are then. Runs in threads of one process each have the
    result they have alone; their steps take turns, all of them if a network draws and the first 50 of each if not.

    `benchmark` is made from `config` and the data root `data` if it is not given. `threads` are torch's CPU threads; by
    default as many as `threads_for` says.
    """
    target = choose_device(device)
    checkpointer = Checkpointer(Path(checkpoint), config, target, every) if checkpoint is not None else None
    benchmark = benchmark or make_benchmark(config, data_root(data), target)
    stoppable = on_stop_signals(checkpointer.request_stop) if checkpointer else nullcontext()
    with cpu_threads(threads or threads_for(config)), own_stream(target), stoppable:
        steps = train(config, benchmark, target, checkpointer)
        while True:
            try:
                progress = next(steps)
            except StopIteration as end:
                result: RunResult = end.value
                return result
            if on_step:
                on_step(progress)


def _result(state: RunState, logits: list[Tensor], exams: list[Exam]) -> RunResult:
    """What a run has found: accuracies, times, and the network that was tested, with its logits."""
    engine, clock, progress = state.engine, state.clock, state.progress
    rates = {"steps": progress.step, "steps_per_second": progress.step / clock.seconds["training"]}
    ready = (engine.at_full_speed or clock.last) - clock.start  # seconds until steps ran at full speed
    weights = engine.learner.evaluated().state_dict()
    return RunResult(
        config=progress.config,
        matrix=state.matrices[0],
        task_matrix=state.matrices[1],
        untrained=torch.tensor(state.untrained, dtype=torch.float64),
        seconds=clock.total(),
        timing=clock.seconds | rates | {"until_full_speed": ready},
        environment=environment(engine.device),
        logits=_answers(logits, exams),
        weights={name: each.cpu().clone().contiguous() for name, each in weights.items()},
    )


def _answers(logits: list[Tensor], exams: list[Exam]) -> dict[str, Tensor]:
    """The final logits and the labels of every test set, by name, for the analyses."""
    named = {f"logits.{number}": answers.cpu() for number, answers in enumerate(logits)}
    # Tasks may share their labels; tensors in a file may not.
    labels = {f"labels.{number}": exam.images.labels.cpu().clone() for number, exam in enumerate(exams)}
    return named | labels
