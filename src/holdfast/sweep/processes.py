"""Runs in processes of this machine."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

import torch

from holdfast.config import RunConfig
from holdfast.devices import threads_for
from holdfast.errors import UsageError
from holdfast.sweep import runner
from holdfast.sweep.runner import Emit, Event, Job

__all__ = ["ProcessRunner", "cores"]


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """A process that carries out one run after another."""

    def __init__(self, job: Job) -> None:
        context = get_context("spawn")  # a forked copy of a process that has used torch's threads may hang
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, job, torch.get_num_threads()), daemon=True)
        _start(self.process)
        theirs.close()
        self.config: RunConfig | None = None

    def tell(self, config: RunConfig | None) -> None:
        """Ask it to carry out a run; None asks it to abandon the one it has, which may have ended by then."""
        self.config = config or self.config
        with suppress(OSError):  # it is dead; `news` reports that
            self.pipe.send(config)

    def news(self) -> Iterator[Event]:
        """Its messages since the last call; its death is the failure of its run."""
        try:
            while self.config and self.pipe.poll():
                event: Event = self.pipe.recv()
                if event.kind != "moved":
                    self.config = None
                yield event
        except (EOFError, OSError):
            self.process.join(runner.POLL)
        if self.config and not self.process.is_alive():
            config, self.config = self.config, None
            yield Event("failed", config, error=f"its process {_ending(self.process.exitcode)}")


class ProcessRunner:
    """`jobs` processes on this machine, by default as many as have a core for each of their threads.

    They end with this process, however it ends.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs
        self._stopping = False

    def request_stop(self) -> None:
        """Let every run finish its step and write its state; KeyboardInterrupt follows, between two pieces of news."""
        self._stopping = True  # an exception raised here could interrupt `emit` while it records an event

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """See `Runner`."""
        workers: list[_Worker] = []
        more = True

        def has_room() -> bool:
            return not self._stopping and self._has_room([worker.config for worker in workers if worker.config])

        def start(config: RunConfig) -> None:
            if self._stopping:  # the signal came while `emit` was told that this run starts
                return
            idle = next((worker for worker in workers if worker.config is None), None)
            if idle is None:
                idle = _Worker(job)
                workers.append(idle)
            idle.tell(config)

        try:
            while True:
                more = more and runner.hand_out(configs, has_room, start, emit)
                if self._stopping:
                    raise KeyboardInterrupt
                busy = [worker for worker in workers if worker.config]
                if not more and not busy:
                    return
                _listen(busy, emit)
                # A worker that died with its run stays until `_listen` has reported it.
                workers[:] = [worker for worker in workers if worker.config or worker.process.is_alive()]
        finally:
            self._stopping = False
            _end(workers)

    def _has_room(self, running: list[RunConfig]) -> bool:
        if self.jobs or not running:
            return len(running) < (self.jobs or 1)
        return sum(map(_threads, running)) < cores()


def _threads(config: RunConfig) -> int:
    """CPU threads that the run will use."""
    try:
        return threads_for(config)
    except UsageError:  # the network of a plugin, which only the workers have imported
        return 1


def _listen(busy: list[_Worker], emit: Emit) -> None:
    """Wait for news of the workers, at most `POLL` seconds, and pass it on."""
    signs: list[Any] = [sign for worker in busy for sign in (worker.pipe, worker.process.sentinel)]
    if signs:
        connection.wait(signs, runner.POLL)
    else:
        time.sleep(runner.POLL)
    emit(None)
    for worker in busy:
        for event in worker.news():
            if emit(event) and worker.config == event.config:
                worker.tell(None)


def _end(workers: list[_Worker]) -> None:
    """End all workers; those with a run may finish a step and write its state first. Ctrl-C ends them at once."""
    try:
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
        deadline = time.monotonic() + runner.GRACE
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def _start(process: BaseProcess) -> None:
    """Start a process that Ctrl-C does not reach and that imports no module from the current folder."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        if os.name == "posix":  # started with the first process, it would let SIGINT through again
            resource_tracker.ensure_running()
        with runner.signals_blocked(signal.SIGINT):
            process.start()
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    return f"ended with exit code {code}"


def _work(pipe: Connection, job: Job, threads: int) -> None:
    """The main function of a worker: carries out runs until the sweep asks for no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all its processes; the sweep decides
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)  # as many as the same run has in the sweep's own process: same arithmetic

    def send(event: Event) -> None:
        with suppress(OSError):  # the sweep has ended; the run must still come to write its state
            pipe.send(event)

    def moved(event: Event) -> None:
        send(event)
        with suppress(EOFError, OSError):  # the sweep has ended
            if event.fraction < 1 and pipe.poll() and pipe.recv() is None:
                raise runner.Abandoned

    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            config: RunConfig | None = pipe.recv()
            if config is None:  # the run to abandon had just ended
                continue
            try:
                runner.carry_out(config, job, runner.throttled(moved))
            except runner.Abandoned:
                send(Event("abandoned", config))
            except Exception as error:
                send(runner.failure(config, error))
            else:
                send(Event("done", config, 1.0))


def _end_with_parent() -> None:
    """End soon after the sweep does: the next sweep carries on with this run."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(runner.GRACE)
        os._exit(1)
