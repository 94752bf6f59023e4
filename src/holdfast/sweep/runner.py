"""The interface of what carries out the runs of a sweep, and one run from its settings to its saved result."""

import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from holdfast import checkpoint, results
from holdfast.config import RunConfig
from holdfast.devices import choose_device
from holdfast.errors import CheckpointError, DivergenceError, HoldfastError
from holdfast.plugins import import_plugins
from holdfast.results import RunResult
from holdfast.run_state import Checkpointer, Progress
from holdfast.training import run

__all__ = ["GRACE", "POLL", "Abandoned", "Emit", "Event", "Job", "Runner", "carry_out", "checkpoint_path"]
__all__ += ["failure", "hand_out", "make_checkpointer", "save", "signals_blocked", "throttled"]

log = logging.getLogger(__name__)

POLL = 0.5
"""Seconds between two looks at runs that report nothing."""
REPORT = 0.25
"""Seconds between two reports of one run's progress."""
GRACE = 60.0
"""Seconds that runs have to write their state when the sweep is stopped."""


class Abandoned(Exception):
    """Ends a run whose result is no longer wanted."""


class Event(NamedTuple):
    """News of one run: it `started`, `moved` (to `fraction` of its training), is `done`, `failed` or `abandoned`."""

    kind: Literal["started", "moved", "done", "failed", "abandoned"]
    config: RunConfig
    fraction: float = 0.0
    error: str = ""
    trace: str = ""
    """Where the error arose, for the record; empty if the message says enough."""
    row: tuple[float, ...] | None = None
    """Accuracies on the tasks learned so far, if a task has just ended."""
    diverged: bool = False
    """Whether it failed because its loss or weights became infinite: the fault of its settings."""


class Job(NamedTuple):
    """Where and how the runs of a sweep are carried out."""

    out: Path
    data: Path | None = None
    device: str = "auto"
    plugins: tuple[str, ...] = ()
    """Modules to import first, for what they register."""
    folder: Path | None = None
    """Where plugins are looked for that are not installed; the current folder if None."""
    checkpoint_every: float = 180.0
    """Seconds between two checkpoints of a run."""
    resumable: bool = True
    """Whether runs have checkpoints. Without a folder that outlives a node, they would be of no use."""


Emit = Callable[[Event | None], bool | None]
"""Takes the news of a sweep; None says that the runner is alive and has no news.

True, in answer to `moved`, asks the runner to abandon that run. It may still end in another way.
"""


class Runner(Protocol):
    """Carries out runs."""

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """Carry out the configs, drawn one at a time as there is room, and tell `emit` what happens.

        A config of None means: nothing to do now, ask again after `POLL` seconds. A run is reported as done after its
        result is saved. When this returns or raises, none of its runs goes on. On KeyboardInterrupt, each run writes
        its state first. A runner that must not be interrupted at any moment has a method `request_stop`, which is
        called instead.
        """
        ...


def hand_out(
    configs: Iterator[RunConfig | None], has_room: Callable[[], bool], start: Callable[[RunConfig], object], emit: Emit
) -> bool:
    """Start runs while there is room for more; False once no run is left."""
    while has_room():
        try:
            config = next(configs)
        except StopIteration:
            return False
        if config is None:
            break
        emit(Event("started", config))
        start(config)
    return True


def checkpoint_path(out: Path, config: RunConfig) -> Path:
    """Where the state of a run is saved while it goes on; readers of results pass over hidden folders."""
    return out / ".checkpoints" / f"{config.fingerprint}.safetensors"


def make_checkpointer(config: RunConfig, job: Job, device: torch.device) -> Checkpointer:
    """The checkpointer of a run. A checkpoint that is damaged, or of another version or device, is removed first.

    A sweep must not stop at such a file: the run starts anew.
    """
    made = Checkpointer(checkpoint_path(job.out, config), config, device, job.checkpoint_every)
    if made.path.exists():
        try:
            usable = checkpoint.read(made.path, "run").about == made.about
        except CheckpointError:
            usable = False
        if not usable:
            log.warning("%s starts anew: its checkpoint cannot be used", config.title)
            checkpoint.discard(made.path)
    return made


def carry_out(config: RunConfig, job: Job, on_step: Callable[[Progress], object] | None = None) -> None:
    """One run from its settings, or its checkpoint, to its result under `job.out`. `on_step` may raise `Abandoned`."""
    import_plugins(job.plugins, job.folder)
    path = make_checkpointer(config, job, choose_device(job.device)).path if job.resumable else None
    every = job.checkpoint_every
    try:
        result = run(config, data=job.data, device=job.device, on_step=on_step, checkpoint=path, every=every)
    except Abandoned:
        checkpoint.discard(checkpoint_path(job.out, config))
        raise
    with signals_blocked(signal.SIGINT, signal.SIGTERM):  # they would lose a finished run
        save(result, job)


def save(result: RunResult, job: Job) -> None:
    """Save the result of a run, and remove its checkpoint."""
    results.save(result, job.out)
    checkpoint.discard(checkpoint_path(job.out, result.config))


@contextmanager
def signals_blocked(*numbers: int) -> Iterator[None]:
    """Inside, these signals wait; processes that are started here never get them."""
    if os.name != "posix":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def failure(config: RunConfig, error: Exception) -> Event:
    """The event of a run that raised `error`."""
    if isinstance(error, HoldfastError):
        return Event("failed", config, error=str(error), diverged=isinstance(error, DivergenceError))
    trace = "".join(traceback.format_exception(error))
    return Event("failed", config, error=f"{type(error).__name__}: {error}", trace=trace)


def throttled(tell: Callable[[Event], bool | None]) -> Callable[[Progress], bool | None]:
    """To be called after every step: tells of each run at most once in `REPORT` seconds, and whenever a task ends."""
    last: dict[RunConfig, float] = {}

    def on_step(progress: Progress) -> bool | None:
        now, row = time.perf_counter(), progress.row if progress.ends_task else None
        if not progress.ends_task and now - last.get(progress.config, 0.0) <= REPORT:
            return None
        last[progress.config] = now
        # The last row has all tasks, also where they were learned at once.
        learned = progress.task + 1 if progress.task + 1 < progress.stages else None
        return tell(Event("moved", progress.config, progress.fraction, row=tuple(row[:learned]) if row else None))

    return on_step
