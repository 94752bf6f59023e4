"""Runs on one GPU, several at a time, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from holdfast import checkpoint
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.fleet import Outcome, run_fleet
from holdfast.plugins import import_plugins
from holdfast.run_state import Checkpointer
from holdfast.sweep import runner
from holdfast.sweep.runner import Emit, Event, Job

__all__ = ["FleetRunner"]


class FleetRunner:
    """A fleet of `size` runs on one GPU; without `size`, as many as make it faster."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self._checkpointers: dict[RunConfig, Checkpointer] = {}
        self._stopping = False

    def request_stop(self) -> None:
        """Let every run finish its step and write its state; KeyboardInterrupt follows."""
        self._stopping = True
        for checkpointer in list(self._checkpointers.values()):
            checkpointer.request_stop()

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """See `Runner`."""
        self._stopping, self._checkpointers = False, {}
        import_plugins(job.plugins, job.folder)
        for config in configs:
            if config is not None:
                self._fleet(chain([config], configs), job, emit)
            else:
                time.sleep(runner.POLL)
                emit(None)
            if self._stopping:
                raise KeyboardInterrupt

    def _fleet(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """One fleet, until all its runs have ended. An error that belongs to no run is the failure of all of them."""
        running: list[RunConfig] = []

        def take() -> Iterator[RunConfig]:
            for config in iter(lambda: None if self._stopping else next(configs, None), None):
                running.append(config)
                emit(Event("started", config))
                yield config

        def checkpointer(config: RunConfig, device: torch.device) -> Checkpointer:
            self._checkpointers[config] = made = runner.make_checkpointer(config, job, device)
            if self._stopping:
                made.request_stop()
            return made

        options: dict[str, Any] = {"size": self.size, "data": job.data, "device": job.device}
        try:
            for outcome in run_fleet(take(), **options, on_step=runner.throttled(emit), make_checkpointer=checkpointer):
                ended = _settled(outcome, job)
                running.remove(outcome.config)
                self._checkpointers.pop(outcome.config, None)
                emit(ended)
        except Exception as error:
            for config in running:
                emit(runner.failure(config, error))


def _settled(outcome: Outcome, job: Job) -> Event:
    """Save the result of a run, if it has one; returns how the run ended."""
    if outcome.error is not None:
        return runner.failure(outcome.config, outcome.error)
    if outcome.result is None:
        checkpoint.discard(runner.checkpoint_path(job.out, outcome.config))
        return Event("abandoned", outcome.config)
    try:
        runner.save(outcome.result, job)
    except HoldfastError as error:
        return runner.failure(outcome.config, error)
    return Event("done", outcome.config, 1.0)
