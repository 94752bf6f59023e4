"""The sweep itself: a grid of runs -> results in a folder."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from holdfast import results
from holdfast.config import RunConfig
from holdfast.devices import choose_device
from holdfast.experiments import Results, load_results
from holdfast.run_state import on_stop_signals
from holdfast.sweep.agenda import Agenda, SweepSummary
from holdfast.sweep.fleets import FleetRunner
from holdfast.sweep.processes import ProcessRunner
from holdfast.sweep.runner import Emit, Event, Job, Runner

__all__ = ["carry_out_all", "local_runner", "sweep"]

log = logging.getLogger(__name__)


def sweep(
    configs: Iterable[RunConfig],
    out: Path,
    *,
    runner: Runner | None = None,
    jobs: int | None = None,
    device: str = "auto",
    data: Path | None = None,
    plugins: Sequence[str] = (),
    there: Results | None = None,
    watch: Callable[[Event], None] | None = None,
    checkpoint_every: float = 180.0,
    until: float | None = None,
) -> SweepSummary:
    """Carry out the runs that are missing under `out`; returns how they ended.

    Runs with a result under `out`, or among those that are `there`, are skipped. A run that fails is recorded and does
    not stop the others. A run that another sweep carries out is waited for. Without a `runner`, see `local_runner`.

    Every run writes its state each `checkpoint_every` seconds. On Ctrl-C or SIGTERM, all runs in flight do, and this
    returns with `interrupted` set; pressed a second time, Ctrl-C ends them at once. The same call continues the sweep,
    and each run where it was, with the result it would have had without the stop. `until`, a moment of
    `time.monotonic`, stops it in the same way, and `out_of_time` is set.
    """
    results.check_writable(out)
    runner = runner or local_runner(device, jobs, until)
    agenda = Agenda(configs, out, load_results(out) if there is None else there)

    def emit(event: Event | None) -> None:
        agenda.leases.renew()
        if event is not None:
            agenda.note(event)
            if watch:
                watch(event)

    job = Job(out, data, device, tuple(plugins), Path.cwd(), checkpoint_every)
    summary = agenda.summary
    try:
        stopped = not carry_out_all(runner, iter(agenda), job, emit, until)
        summary.out_of_time = stopped and _passed(until)
        summary.interrupted = stopped and not summary.out_of_time
    finally:
        agenda.close()
    return summary


def carry_out_all(
    runner: Runner, configs: Iterator[RunConfig | None], job: Job, emit: Emit, until: float | None = None
) -> bool:
    """Have the runner carry out all configs; False if it was stopped, after every run saved its state.

    Ctrl-C and SIGTERM stop it, and so does the moment `until` of `time.monotonic`.
    """
    in_time = True

    def stop(why: str = "stopping: every run writes its state. Ctrl-C again ends them at once.") -> None:
        log.warning(why)
        if not hasattr(runner, "request_stop"):
            raise KeyboardInterrupt
        runner.request_stop()

    def emit_in_time(event: Event | None) -> bool | None:
        nonlocal in_time
        answer = emit(event)
        if in_time and _passed(until):
            in_time = False
            stop("time is up: every run writes its state.")
        return answer

    try:
        with on_stop_signals(stop):
            runner(configs, job, emit_in_time)
    except KeyboardInterrupt:
        return False
    return True


def _passed(moment: float | None) -> bool:
    return moment is not None and time.monotonic() >= moment


def local_runner(device: str = "auto", jobs: int | None = None, until: float | None = None) -> Runner:
    """Runs on this machine: a fleet of `jobs` runs on a GPU, or `jobs` processes on a CPU.

    By default, as many runs as make the fleet faster, or as many processes as have a core for each of their threads. If
    `until` is given, runs of a fleet that cannot end by then wait for those that can, see `Deadline`.
    """
    if choose_device(device).type == "cuda":
        return FleetRunner(jobs, until)
    return ProcessRunner(jobs)
