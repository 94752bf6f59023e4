"""Runs on one GPU, several at a time, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from holdfast import checkpoint
from holdfast.benchmarks import make_benchmark
from holdfast.config import RunConfig
from holdfast.data import data_root
from holdfast.devices import choose_device
from holdfast.fleet import FleetSize, Member
from holdfast.plugins import import_plugins
from holdfast.results import RunResult
from holdfast.run_state import Checkpointer, Progress
from holdfast.sweep import runner
from holdfast.sweep.runner import Emit, Event, Job

__all__ = ["FleetRunner"]


class FleetRunner:
    """A fleet of `size` runs on one GPU; without `size`, as many as make it faster.

    Each run gives the result it would give alone. A run that fails does not affect the others.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self._members: dict[Member, Checkpointer] = {}
        self._stopping = False

    def request_stop(self) -> None:
        """Let every run finish its step and write its state; KeyboardInterrupt follows."""
        self._stopping = True
        for checkpointer in list(self._members.values()):
            checkpointer.request_stop()

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """See `Runner`."""
        import_plugins(job.plugins, job.folder)
        device = choose_device(job.device)
        self._members, self._stopping = {}, False
        size, tell = FleetSize(self.size, device), runner.throttled(emit)
        more, ask_at = True, 0.0

        def has_room() -> bool:
            return len(self._members) < size.now and not self._stopping

        def start(config: RunConfig) -> None:
            try:
                benchmark = make_benchmark(config, data_root(job.data), device)
                checkpointer = runner.make_checkpointer(config, job, device)
                self._members[Member(config, benchmark, device, checkpointer)] = checkpointer
            except Exception as error:  # a plugin's benchmark may raise anything
                emit(runner.failure(config, error))
            if self._stopping:
                self.request_stop()  # the signal may have come before this run was among the members

        while self._members or (more and not self._stopping):
            if more and time.monotonic() >= ask_at:
                more = runner.hand_out(configs, has_room, start, emit)
                ask_at = time.monotonic() + runner.POLL if has_room() else 0.0
            if not self._members and more:
                time.sleep(runner.POLL)
                emit(None)
            for member in list(self._members):
                try:
                    ended = _step(member, size, tell, job)
                except KeyboardInterrupt as stop:
                    if not stop.args:  # Ctrl-C in the middle of a step has no message, a checkpointer's stop has one
                        raise
                    del self._members[member]
                    continue
                if ended:
                    del self._members[member]
                    emit(ended)
        if self._stopping:
            raise KeyboardInterrupt


def _step(member: Member, size: FleetSize, tell: Callable[[Progress], bool | None], job: Job) -> Event | None:
    """One step of a run; returns how the run ended, or None if it goes on. A result is saved here."""
    try:
        news = member.step()
        if isinstance(news, RunResult):
            runner.save(news, job)
            return Event("done", member.config, 1.0)
        size.stepped()
    except Exception as error:  # a plugin's method may raise anything, a device may be out of memory
        return runner.failure(member.config, error)
    if not tell(news):
        return None
    checkpoint.discard(runner.checkpoint_path(job.out, member.config))
    return Event("abandoned", member.config)
