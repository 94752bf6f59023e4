"""A grid of runs -> results in a folder: resumable, shared by several sweeps, unharmed by kills.

What a folder holds beside the results (a folder per fingerprint, see `holdfast.results`):

    .claims/FINGERPRINT      who is carrying out this run: process, host, start of the process. Created exclusively, so
                             that two sweeps never carry out the same run; the claim of a dead process is taken over
    failed/FINGERPRINT.json  the settings and the error of a run that failed; the next sweep tries it again
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any, Literal, NamedTuple, Protocol

import torch

from holdfast import results
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.experiments import Results
from holdfast.fleet import run_fleet
from holdfast.training import Progress, choose_device, run

__all__ = [
    "Claims",
    "Engine",
    "Estimate",
    "Event",
    "FleetEngine",
    "Job",
    "LocalEngine",
    "Summary",
    "carry_out",
    "cores",
    "estimate",
    "local_engine",
    "sweep",
]

POLL = 0.5
"""Seconds between looks at runs that say nothing."""
REPORT = 0.25
"""Seconds between two reports of one run's progress."""
HEARTBEAT, SILENCE = 60.0, 600.0
"""Seconds between signs of life in a claim, and after which a claim of another host counts as abandoned."""


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


class Engine(Protocol):
    """Carries out runs. Results must be saved before an event says `done`."""

    def __call__(self, configs: Iterator[RunConfig | None], job: Job) -> Iterator[Event | None]:
        """Carry out the configs, drawn one at a time as there is room, and yield what happens.

        A config of None means: nothing to do just now, ask again after `POLL` seconds. An event of None means: nothing
        happened. Closing the iterator stops the runs in flight and leaves no process behind.
        """
        ...


Watch = Callable[[Event], None]


@dataclass
class Summary:
    """How a sweep ended."""

    done: list[RunConfig] = field(default_factory=list)
    """Carried out here and now."""
    there: list[RunConfig] = field(default_factory=list)
    """Finished before, or by another sweep meanwhile."""
    failed: dict[RunConfig, str] = field(default_factory=dict)
    interrupted: bool = False
    left: int = 0
    """Runs that an interruption left undone."""


def sweep(
    configs: Iterable[RunConfig],
    out: Path,
    *,
    engine: Engine | None = None,
    jobs: int | None = None,
    device: str = "auto",
    data: Path | None = None,
    plugins: Sequence[str] = (),
    finished: Results | None = None,
    watch: Watch | None = None,
) -> Summary:
    """Carry out the runs that are missing under `out`, and say how it went.

    Runs with a result under `out` or in `finished` are skipped; one that fails is recorded and does not stop the rest.
    Ctrl-C stops the runs in flight, keeps what is finished and returns with `interrupted` set; the same call continues.
    A run that another sweep is carrying out is waited for. Without an `engine`, `jobs` processes with one thread each
    on a CPU (default: one per core), or a fleet of `jobs` runs on a GPU (default: as many as make it faster).
    """
    results.check_writable(out)
    engine = engine or local_engine(device, jobs)
    agenda = _Agenda(configs, out, finished or Results())
    watch = watch or _ignore
    events = engine(iter(agenda), Job(out, data, device, tuple(plugins)))
    try:
        for event in events:
            agenda.beat()
            if event is not None:
                agenda.note(event)
                watch(event)
    except KeyboardInterrupt:
        agenda.summary.interrupted = True
    finally:
        _close(events)
        agenda.close()
    return agenda.summary


def _ignore(_: Event) -> None:
    pass


def _close(events: Iterator[Event | None]) -> None:
    """End the engine; a second Ctrl-C meanwhile must not leave its processes behind."""
    close = getattr(events, "close", None)
    while close is not None:
        try:
            return close()  # type: ignore[no-any-return]
        except KeyboardInterrupt:
            continue


def local_engine(device: str = "auto", jobs: int | None = None) -> Engine:
    """Fleets where the device is a GPU, processes otherwise."""
    if choose_device(device).type == "cuda":
        return FleetEngine(jobs)
    return LocalEngine(jobs or cores())


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Agenda:
    """What is still to be done: hands out runs nobody else has, and keeps the books."""

    def __init__(self, configs: Iterable[RunConfig], out: Path, finished: Results) -> None:
        self.summary = Summary()
        self._out, self._claims, self._began = out, Claims(out), time.time()
        self._beaten = time.monotonic()
        self._waiting: deque[RunConfig] = deque()
        for config in dict.fromkeys(configs):
            there = config in finished or _is_finished(out, config)
            (self.summary.there if there else self._waiting).append(config)

    def __iter__(self) -> Iterator[RunConfig | None]:
        """Runs to carry out, each claimed; None while others have all that is left."""
        refused = 0
        while self._waiting:
            config = self._waiting.popleft()
            if self._take(config):
                refused = 0
                yield config
            elif self._settled(config):
                continue
            else:
                self._waiting.append(config)
                refused += 1
                if refused >= len(self._waiting):
                    refused = 0
                    yield None

    def _take(self, config: RunConfig) -> bool:
        """Claim a run that is neither finished nor taken, and clear away what a killed attempt at it left behind."""
        if self._settled_elsewhere(config) or not self._claims.acquire(config):
            return False
        if _is_finished(self._out, config):  # By another sweep, between our look and our claim.
            self._claims.release(config)
            return False
        _remove_scratch(self._out, config)
        return True

    def _settled(self, config: RunConfig) -> bool:
        """Note a run that another sweep finished or failed at; False while it is still at it."""
        if _is_finished(self._out, config):
            self.summary.there.append(config)
            return True
        if self._settled_elsewhere(config):
            self.summary.failed[config] = _recorded_error(self._out, config)
            return True
        return False

    def _settled_elsewhere(self, config: RunConfig) -> bool:
        """Whether another sweep failed at the run since we began: trying it here as well would gain nothing."""
        with contextlib.suppress(OSError):
            return _failure(self._out, config).stat().st_mtime > self._began
        return False

    def note(self, event: Event) -> None:
        """Enter what happened; a finished or failed run is no longer claimed."""
        if event.kind == "done":
            self.summary.done.append(event.config)
            _failure(self._out, event.config).unlink(missing_ok=True)
        elif event.kind == "failed":
            self.summary.failed[event.config] = event.error
            _record_failure(self._out, event)
        else:
            return
        _remove_scratch(self._out, event.config)
        self._claims.release(event.config)

    def beat(self) -> None:
        """Show other hosts, now and then, that the claims are alive."""
        if time.monotonic() - self._beaten > HEARTBEAT:
            self._beaten = time.monotonic()
            self._claims.beat()

    def close(self) -> None:
        """Give back what was claimed and not finished."""
        given_back = self._claims.held()
        for config in given_back:
            _remove_scratch(self._out, config)
            self._claims.release(config)
        self.summary.left = len(given_back) + len(self._waiting)


def _is_finished(out: Path, config: RunConfig) -> bool:
    return (out / config.fingerprint / results.RESULT).exists()


def _remove_scratch(out: Path, config: RunConfig) -> None:
    """Folders that saving this run was killed in the middle of; only the holder of its claim may do this."""
    for folder in out.glob(f".{config.fingerprint}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _failure(out: Path, config: RunConfig) -> Path:
    return out / "failed" / f"{config.fingerprint}.json"


def _record_failure(out: Path, event: Event) -> None:
    path = _failure(out, event.config)
    path.parent.mkdir(exist_ok=True)
    record = {
        "error": event.error,
        "trace": event.trace,
        "config": event.config.to_dict(),
        "fingerprint": event.config.fingerprint,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "platform": platform.platform(),
    }
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def _recorded_error(out: Path, config: RunConfig) -> str:
    try:
        return str(json.loads(_failure(out, config).read_text("utf-8"))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return "failed in another sweep"


class Claims:
    """Which runs of a folder this process is carrying out, as files that other processes and hosts see."""

    def __init__(self, out: Path) -> None:
        self._folder = out / ".claims"
        self._mine: dict[RunConfig, Path] = {}
        self._text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())})

    def acquire(self, config: RunConfig) -> bool:
        """Claim a run; False if somebody alive has it."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / config.fingerprint
        if not self._create(path):
            # Judging a claim and replacing it must be one act, or two sweeps could both take over the same one.
            with _locked(self._folder / "lock"):
                if not _is_abandoned(path):
                    return False
                path.unlink(missing_ok=True)
                if not self._create(path):
                    return False
        self._mine[config] = path
        return True

    def _create(self, path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(self._text)
        return True

    def release(self, config: RunConfig) -> None:
        """Give a run back, finished or not."""
        self._mine.pop(config).unlink(missing_ok=True)

    def held(self) -> list[RunConfig]:
        """The runs claimed at present."""
        return list(self._mine)

    def beat(self) -> None:
        """Renew the time stamps, by which other hosts judge."""
        for path in self._mine.values():
            with contextlib.suppress(OSError):
                os.utime(path)


def _is_abandoned(path: Path) -> bool:
    """Whether the process behind a claim is gone; on another host, whether it has been silent for long."""
    try:
        age = time.time() - path.stat().st_mtime
        claim = json.loads(path.read_text("utf-8"))
        pid, host, started = int(claim["pid"]), claim["host"], claim["started"]
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return age > POLL  # Killed between creating the file and writing to it; younger, it may be about to.
    if host != socket.gethostname():
        return age > SILENCE
    return not _is_running(pid) or (started is not None and _started(pid) != started)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # It is somebody else's.
    return True


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the start of the machine: numbers of dead processes are used again."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return None  # Not every system tells; the number of the process then has to do.
    return None if status[0] in "ZX" else status[19]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however that ends; without effect where there are none."""
    try:
        from fcntl import LOCK_EX, flock
    except ImportError:
        yield
        return
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # Some network folders have no locks.
            flock(file, LOCK_EX)
        yield


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


class LocalEngine:
    """Processes on this machine, one thread each; they end with this process, however it ends."""

    def __init__(self, jobs: int) -> None:
        self.jobs = max(1, jobs)

    def __call__(self, configs: Iterator[RunConfig | None], job: Job) -> Iterator[Event | None]:
        """See `Engine`."""
        workers: list[_Worker] = []
        try:
            yield from self._run(configs, job, workers)
        finally:
            for worker in workers:
                worker.kill()

    def _run(
        self, configs: Iterator[RunConfig | None], job: Job, workers: list[_Worker]
    ) -> Iterator[Event | None]:
        exhausted = False
        while True:
            while not exhausted and (idle := _idle(workers, self.jobs)) is not None:
                config = next(configs, STOP)
                exhausted = config is STOP
                if not isinstance(config, RunConfig):
                    break
                worker = idle or _Worker(job)
                workers.extend([] if idle else [worker])
                worker.give(config)
                yield Event("started", config)
            busy = [worker for worker in workers if worker.config]
            if exhausted and not busy:
                return
            signs: list[Any] = [sign for worker in busy for sign in (worker.pipe, worker.process.sentinel)]
            ready = connection.wait(signs, POLL) if signs else time.sleep(POLL)
            yield None  # So that claims stay alive however long nothing happens.
            for worker in busy if ready else ():
                yield from worker.news()
            workers[:] = [worker for worker in workers if worker.process.is_alive()]


STOP = object()


def _idle(workers: list[_Worker], most: int) -> _Worker | Literal[False] | None:
    """A worker without work, False if a new one may be started, None if all that may run are busy."""
    free = [worker for worker in workers if not worker.config]
    return free[0] if free else False if len(workers) < most else None


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


class FleetEngine:
    """Several runs at once on one GPU, from this process."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def __call__(self, configs: Iterator[RunConfig | None], job: Job) -> Iterator[Event | None]:
        """See `Engine`."""
        for name in job.plugins:
            import_module(name)
        for first in configs:
            if first is None:
                time.sleep(POLL)
                yield None
            else:
                yield from self._fleet(chain([first], configs), job)

    def _fleet(self, configs: Iterator[RunConfig | None], job: Job) -> Iterator[Event | None]:
        """One fleet, until all it was given is settled. An error of the device ends all of its runs at once."""
        news: deque[Event] = deque()
        open_runs: dict[RunConfig, float] = {}
        fleet = run_fleet(
            _listed(configs, open_runs),
            size=self.size,
            data=job.data,
            device=job.device,
            on_step=_FleetReporter(news, open_runs),
        )
        try:
            for outcome in fleet:
                yield from _drain(news)
                del open_runs[outcome.config]
                if outcome.error is not None:
                    yield failure(outcome.config, outcome.error)
                elif outcome.result is not None:
                    results.save(outcome.result, job.out)
                    yield Event("done", outcome.config, 1.0)
        except Exception as error:
            for config in open_runs:
                yield failure(config, error)
