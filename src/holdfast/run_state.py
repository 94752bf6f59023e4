"""The state of a run: where it is, its clock, its generators, and the checkpoint it continues from."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from holdfast import _startup, checkpoint
from holdfast.config import PROTOCOL, RunConfig
from holdfast.engine import Engine
from holdfast.errors import CheckpointError, TrainingError, UsageError
from holdfast.rng import own_generators, restore, swapped_globally
from holdfast.schema import Count, validated

__all__ = ["Checkpointer", "Clock", "Progress", "RunState", "on_stop_signals", "secluded"]

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

WATCHED = 50
"""Steps of a run that are watched for draws from PyTorch's global generators."""


@dataclass(kw_only=True)
class _Place:
    """The part of `Progress` that a checkpoint has."""

    task: Count = 0
    epoch: Count = 0
    step: Count = 0
    """Steps done since the start of the run."""
    fraction: float = 0.0
    """Share of the training done, 0 to 1."""
    losses: dict[str, float] | None = None
    """Mean loss terms of the last steps that were read."""
    row: list[float] | None = None
    """Accuracies after the last finished task."""
    batch: Count = 0
    """Minibatches done of this epoch."""


@dataclass
class Progress(_Place):
    """Where a run stands; updated in place after every step."""

    config: RunConfig
    stages: int

    @property
    def ends_task(self) -> bool:
        """Whether a task has just ended, so that `row` is new."""
        return self.batch == 0

    def advance(self, batches: int) -> None:
        """Count a step of an epoch that has so many `batches`."""
        self.step += 1
        self.batch += 1
        epochs = self.epoch + self.batch / batches
        self.fraction = (self.task + epochs / self.config.epochs) / self.stages


class Clock:
    """Wall time by what it was spent on."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.before = 0.0
        """Seconds the run took before it was continued here."""
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def total(self) -> float:
        """Seconds since the run was first started, without pauses."""
        return time.perf_counter() - self.start + self.before


@dataclass
class RunState:
    """Everything about a run that changes while it goes on."""

    engine: Engine
    generators: dict[str, torch.Generator]
    progress: Progress
    matrices: Tensor
    """Class-IL and Task-IL accuracies, (2, stages, tasks)."""
    clock: Clock = field(default_factory=Clock)
    untrained: list[float] = field(default_factory=list)
    """Accuracies of the untrained network."""
    epoch_order: Tensor | None = None
    """The state of the generator "order" when the epoch began."""

    def read_losses(self) -> dict[str, float]:
        """Mean loss terms since the last reading; a loss that is not finite ends the run and says where."""
        try:
            return self.engine.log.read()
        except TrainingError as error:
            raise type(error)(f"{self.progress.config.title}, task {self.progress.task + 1}: {error}") from None

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue after the last step."""
        return {
            "learner": self.engine.learner.state_dict(),
            "generators": {name: each.get_state() for name, each in self.generators.items()}
            | {"order": self.epoch_order},
            "log": self.engine.log.state_dict(),
            "progress": {each.name: getattr(self.progress, each.name) for each in fields(_Place)},
            "matrices": self.matrices,
            "untrained": self.untrained,
            "seconds": self.clock.seconds,
            "total": self.clock.total(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where the run was that gave `state`. If that makes no sense, this raises, halfway perhaps."""
        place: _Place = validated(_Place, state["progress"], "progress")
        if place.task >= self.progress.stages:
            raise ValueError(f"there is no task {place.task + 1}.")
        seconds = validated(dict[str, float], state["seconds"], "seconds")
        before = validated(float, state["total"], "total")
        self.untrained = validated(list[float], state["untrained"], "untrained")
        self.engine.learner.load_state_dict(state["learner"])
        for name, each in self.generators.items():
            restore(each, state["generators"][name])
        self.engine.log.load_state_dict(state["log"])
        vars(self.progress).update(vars(place))
        self.matrices.copy_(state["matrices"])
        self.clock.seconds, self.clock.before = seconds, before


def secluded(steps: Generator[T, None, R], seed: int, device: torch.device) -> Generator[T, None, R]:
    """The same steps, each with generators of the run's own in the place of PyTorch's global ones.

    Layers such as dropout draw from the global ones, and so may whatever happens between two steps, for instance a step
    of another run. Swapping takes time, so it ends after `WATCHED` steps if none of them drew. While a run has swapped,
    those in other threads wait. It swaps back after each step, as nobody need ever ask for the next.
    """
    own = own_generators(seed, "network", device)
    done = 0
    first: list[tuple[torch.Generator, Tensor]] = []
    while done < WATCHED or any(not torch.equal(each.get_state(), state) for each, state in first):
        with swapped_globally(own):
            try:
                progress = next(steps)
            except StopIteration as end:
                result: R = end.value
                return result
        # Draws are counted from the end of the first step: a run that continues sets the generators during it.
        first = first or [(each, each.get_state()) for each in own.values()]
        done += 1
        yield progress
    return (yield from steps)


@contextmanager
def on_stop_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM call `stop`; the second time, they have the effect they have outside.

    Handlers that are neither Python's own, nor the command's, nor of such a block are left alone.
    """
    usual: dict[int, Any] = {
        signal.SIGINT: (signal.default_int_handler, _startup.interrupt),
        signal.SIGTERM: (signal.SIG_DFL,),
    }
    outside = {number: signal.getsignal(number) for number in usual}
    ours = [number for number in usual if outside[number] in usual[number] or isinstance(outside[number], _StopHandler)]
    if threading.current_thread() is not threading.main_thread():
        ours = []  # only the main thread may handle signals
    for number in ours:
        signal.signal(number, _StopHandler(stop, outside[number]))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, outside[number])


class _StopHandler:
    def __init__(self, stop: Callable[[], object], outside: Any) -> None:
        self.stop, self.outside = stop, outside

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, self.outside)
        self.stop()


class Checkpointer:
    """Writes a run's state to a file every so many seconds, and continues a run from it.

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

    def request_stop(self) -> None:
        """Let the step at hand finish; then the state is written and KeyboardInterrupt ends the run.

        An interrupt in the middle of a step would leave a model that has learned from a minibatch which the buffer was
        never offered.
        """
        self._stopping = True

    def due(self) -> bool:
        """Whether it is time to write the state."""
        return self._stopping or time.perf_counter() >= self._next

    def save(self, state: RunState) -> None:
        """Write the state after a step; a loss that is not finite ends the run instead."""
        state.read_losses()
        state.clock.lap("training")
        outcome = f"its state is saved in {self.path}; started again in the same way, it continues from there."
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

    def resume(self, state: RunState) -> bool:
        """Bring the run to where its checkpoint is; False if there is none."""
        try:
            about, saved = checkpoint.read(self.path, "run")
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
            state.load_state_dict(saved)
        except checkpoint.NONSENSE as error:
            raise CheckpointError(f"{self.path} does not fit this run: {error} Delete it to start anew.") from error
        return True


def _difference(name: str, theirs: Any, own: Any) -> str:
    """What differs, down to the settings of a config."""
    if isinstance(theirs, dict) and isinstance(own, dict):
        names = [key for key in own | theirs if own.get(key) != theirs.get(key)]
        return ", ".join(f"{key} is {theirs.get(key)!r} there and {own.get(key)!r} here" for key in names)
    return f"{name} is {theirs!r} there and {own!r} here"
