"""Runs on one GPU, several at a time, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from holdfast import results
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.fleet import Outcome, run_fleet
from holdfast.plugins import import_plugins
from holdfast.sweep.runner import POLL, Emit, Event, Job, failure, throttled

__all__ = ["FleetRunner"]


class FleetRunner:
    """A fleet of `size` runs on one GPU; without `size`, as many as make it faster."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """See `Runner`."""
        import_plugins(job.plugins, job.folder)
        for config in configs:
            if config is None:
                time.sleep(POLL)
                emit(None)
            else:
                self._fleet(chain([config], configs), job, emit)

    def _fleet(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """One fleet, until all its runs have ended. An error that belongs to no run is the failure of all of them."""
        running: list[RunConfig] = []

        def take() -> Iterator[RunConfig]:
            for config in iter(lambda: next(configs, None), None):
                running.append(config)
                emit(Event("started", config))
                yield config

        report = throttled(lambda progress: emit(Event("moved", progress.config, progress.fraction)))
        try:
            for outcome in run_fleet(take(), size=self.size, data=job.data, device=job.device, on_step=report):
                ended = _settled(outcome, job.out)
                running.remove(outcome.config)
                emit(ended)
        except Exception as error:
            for config in running:
                emit(failure(config, error))


def _settled(outcome: Outcome, out: Path) -> Event:
    """Save the result of a run, if it has one; returns how the run ended."""
    if outcome.result is None:
        return failure(outcome.config, outcome.error or HoldfastError("it ended without a result"))
    try:
        results.save(outcome.result, out)
    except HoldfastError as error:
        return failure(outcome.config, error)
    return Event("done", outcome.config, 1.0)
