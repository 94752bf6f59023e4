"""Runs on one GPU, several at a time, from this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path

from holdfast import results
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.fleet import Outcome, run_fleet
from holdfast.sweep.engine import POLL, REPORT, Emit, Event, Job, failure
from holdfast.training import Progress

__all__ = ["FleetEngine"]


class FleetEngine:
    """Several runs at once on one GPU, from this process."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """See `Engine`."""
        for name in job.plugins:
            import_module(name)
        for config in configs:
            if config is None:
                time.sleep(POLL)
                emit(None)
            else:
                self._fleet(chain([config], configs), job, emit)

    def _fleet(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """One fleet, until all it was given is settled; an error of none in particular ends all of its runs."""
        taken: dict[RunConfig, float] = {}  # and when each last reported, in seconds

        def take() -> Iterator[RunConfig]:
            for config in iter(lambda: next(configs, None), None):
                taken[config] = 0.0
                emit(Event("started", config))
                yield config

        def report(progress: Progress) -> None:
            now = time.perf_counter()
            if now - taken[progress.config] > REPORT:
                taken[progress.config] = now
                emit(Event("moved", progress.config, progress.fraction))

        try:
            for outcome in run_fleet(take(), size=self.size, data=job.data, device=job.device, on_step=report):
                ended = _settled(outcome, job.out)
                del taken[outcome.config]
                emit(ended)
        except Exception as error:
            for config in taken:
                emit(failure(config, error))


def _settled(outcome: Outcome, out: Path) -> Event:
    """Save a run's result, if it has one; how the run ended."""
    if outcome.result is None:
        return failure(outcome.config, outcome.error or HoldfastError("it ended without a result"))
    try:
        results.save(outcome.result, out)
    except HoldfastError as error:
        return failure(outcome.config, error)
    return Event("done", outcome.config, 1.0)
