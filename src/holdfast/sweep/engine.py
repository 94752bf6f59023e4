"""What carries out the runs of a sweep, and what it says meanwhile."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from holdfast import results
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.training import Progress, run

__all__ = ["POLL", "REPORT", "Emit", "Engine", "Event", "Job", "carry_out", "failure"]

POLL = 0.5
"""Seconds between looks at runs that say nothing."""
REPORT = 0.25
"""Seconds between two reports of one run's progress."""


class Event(NamedTuple):
    """News of one run: it `started`, it `moved` (to `fraction` of its training), it is `done`, or it `failed`."""

    kind: Literal["started", "moved", "done", "failed"]
    config: RunConfig
    fraction: float = 0.0
    error: str = ""
    trace: str = ""
    """Where the error arose, for the record; empty for errors that explain themselves."""


class Job(NamedTuple):
    """Where and how the runs of a sweep are carried out."""

    out: Path
    data: Path | None = None
    device: str = "auto"
    plugins: tuple[str, ...] = ()
    """Modules to import first, for what they register."""


Emit = Callable[[Event | None], None]
"""Takes what happens in a sweep; None is a sign of life while nothing happens."""


class Engine(Protocol):
    """Carries out runs."""

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """Carry out the configs, drawn one at a time as there is room, and tell `emit` what happens, or None meanwhile.

        A config of None means: nothing to do just now, ask again after `POLL` seconds. A result must be saved before
        its run is said to be done. Whatever is raised, Ctrl-C included, no run is left behind.
        """
        ...


def carry_out(config: RunConfig, job: Job, on_step: Callable[[Progress], None] | None = None) -> None:
    """One run from its settings to its result under `job.out`, with one thread on a CPU."""
    for name in job.plugins:
        import_module(name)
    results.save(run(config, data=job.data, device=job.device, threads=1, on_step=on_step), job.out)


def failure(config: RunConfig, error: Exception) -> Event:
    """The event of a run that raised: its message, and the trace unless the message explains itself."""
    if isinstance(error, HoldfastError):
        return Event("failed", config, error=str(error))
    trace = "".join(traceback.format_exception(error))
    return Event("failed", config, error=f"{type(error).__name__}: {error}", trace=trace)
