"""Runs in processes of this machine, one thread each."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, Literal

import torch

from holdfast.config import RunConfig
from holdfast.sweep.engine import POLL, REPORT, Emit, Event, Job, carry_out, failure
from holdfast.training import Progress

__all__ = ["LocalEngine", "cores"]


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalEngine:
    """Processes on this machine, one thread each; they end with this process, however it ends."""

    def __init__(self, jobs: int) -> None:
        self.jobs = max(1, jobs)

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """See `Engine`."""
        workers: list[_Worker] = []
        more = True
        try:
            while True:
                more = more and self._hand_out(configs, job, workers, emit)
                busy = [worker for worker in workers if worker.config]
                if not more and not busy:
                    return
                _listen(busy, emit)
                # One that died just now, with its run, has yet to be listened to.
                workers[:] = [worker for worker in workers if worker.config or worker.process.is_alive()]
        finally:
            for worker in workers:
                worker.kill()

    def _hand_out(self, configs: Iterator[RunConfig | None], job: Job, workers: list[_Worker], emit: Emit) -> bool:
        """Give runs to idle workers, and to new ones while there may be more; False once there are no more runs."""
        while sum(worker.config is not None for worker in workers) < self.jobs:
            try:
                config = next(configs)
            except StopIteration:
                return False
            if config is None:
                return True
            idle = [worker for worker in workers if worker.config is None]
            if not idle:
                idle = [_Worker(job)]
                workers += idle
            idle[0].give(config)
            emit(Event("started", config))
        return True


def _listen(busy: list[_Worker], emit: Emit) -> None:
    """Wait for a word of the workers, but not for long, and pass it on."""
    signs: list[Any] = [sign for worker in busy for sign in (worker.pipe, worker.process.sentinel)]
    if signs:
        connection.wait(signs, POLL)
    else:
        time.sleep(POLL)
    emit(None)
    for worker in busy:
        for event in worker.news():
            emit(event)


class _Worker:
    """A process that carries out one run after another."""

    def __init__(self, job: Job) -> None:
        context = get_context("spawn")  # A forked copy of a process that has used torch's threads may hang.
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, job), daemon=True)
        self.process.start()
        theirs.close()
        self.config: RunConfig | None = None

    def give(self, config: RunConfig) -> None:
        """Have it carry out a run."""
        self.config = config
        with contextlib.suppress(OSError):  # It is dead; `news` will tell.
            self.pipe.send(config.to_dict())

    def news(self) -> Iterator[Event]:
        """What it has said since it was last asked; its death is the failure of its run."""
        try:
            while self.config and self.pipe.poll():
                yield self._understand(*self.pipe.recv())
        except (EOFError, OSError):
            self.process.join(POLL)
        if self.config and not self.process.is_alive():
            config, self.config = self.config, None
            yield Event("failed", config, error=f"its process {_ending(self.process.exitcode)}")

    def _understand(self, kind: Literal["moved", "done", "failed"], *details: Any) -> Event:
        assert self.config is not None
        config = self.config
        if kind == "moved":
            return Event(kind, config, fraction=details[0])
        self.config = None
        return Event(kind, config, 1.0, *details)

    def kill(self) -> None:
        """End it at once; what it has saved stays."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    return f"ended with exit code {code}"


def _work(pipe: Connection, job: Job) -> None:
    """What a worker does: runs, one after the other, until nobody asks for more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the sweep decides what ends.
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            config = RunConfig.from_dict(pipe.recv())
            try:
                carry_out(config, job, _Reporter(pipe))
            except Exception as error:
                event = failure(config, error)
                pipe.send(("failed", event.error, event.trace))
            else:
                pipe.send(("done",))


def _end_with_parent() -> None:
    """A killed sweep must not leave runs behind that its successor would carry out a second time."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


class _Reporter:
    """Says now and then how far a run is."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._last = pipe, 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.perf_counter()
        if now - self._last > REPORT:
            self._last = now
            self._pipe.send(("moved", progress.fraction))
