"""The interface of what carries out the runs of a sweep, and one run from its settings to its saved result."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from holdfast import results
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.plugins import import_plugins
from holdfast.training import Progress, run

__all__ = ["POLL", "Emit", "Event", "Job", "Runner", "carry_out", "checkpoint_path", "failure", "throttled"]

POLL = 0.5
"""Seconds between two looks at runs that report nothing."""
REPORT = 0.25
"""Seconds between two reports of one run's progress."""


class Event(NamedTuple):
    """News of one run: it `started`, `moved` (to `fraction` of its training), is `done`, or `failed`."""

    kind: Literal["started", "moved", "done", "failed"]
    config: RunConfig
    fraction: float = 0.0
    error: str = ""
    trace: str = ""
    """Where the error arose, for the record; empty if the message says enough."""


class Job(NamedTuple):
    """Where and how the runs of a sweep are carried out."""

    out: Path
    data: Path | None = None
    device: str = "auto"
    plugins: tuple[str, ...] = ()
    """Modules to import first, for what they register."""
    folder: Path | None = None
    """Where plugins are looked for that are not installed; the current folder if None."""


Emit = Callable[[Event | None], None]
"""Takes the news of a sweep; None says that the runner is alive and has no news."""


class Runner(Protocol):
    """Carries out runs."""

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """Carry out the configs, drawn one at a time as there is room, and tell `emit` what happens.

        A config of None means: nothing to do now, ask again after `POLL` seconds. A run is reported as done after its
        result is saved. When this returns or raises, Ctrl-C included, none of its runs goes on.
        """
        ...


def checkpoint_path(out: Path, config: RunConfig) -> Path:
    """Where the state of a run is saved while it goes on; readers of results pass over hidden folders."""
    return out / ".checkpoints" / f"{config.fingerprint}.safetensors"


def carry_out(config: RunConfig, job: Job, on_step: Callable[[Progress], None] | None = None) -> None:
    """One run from its settings to its result under `job.out`."""
    import_plugins(job.plugins, job.folder)
    results.save(run(config, data=job.data, device=job.device, on_step=on_step), job.out)


def failure(config: RunConfig, error: Exception) -> Event:
    """The event of a run that raised `error`."""
    if isinstance(error, HoldfastError):
        return Event("failed", config, error=str(error))
    trace = "".join(traceback.format_exception(error))
    return Event("failed", config, error=f"{type(error).__name__}: {error}", trace=trace)


def throttled(tell: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """`tell`, but at most once in `REPORT` seconds for each run."""
    last: dict[RunConfig, float] = {}

    def on_step(progress: Progress) -> None:
        now = time.perf_counter()
        if now - last.get(progress.config, 0.0) > REPORT:
            last[progress.config] = now
            tell(progress)

    return on_step
