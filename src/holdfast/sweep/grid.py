"""The sweep itself: a grid of runs -> results in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from holdfast import results
from holdfast.config import RunConfig
from holdfast.experiments import Results, load_results
from holdfast.sweep.agenda import Agenda, Summary
from holdfast.sweep.engine import Engine, Event, Job
from holdfast.sweep.fleets import FleetEngine
from holdfast.sweep.processes import LocalEngine, cores
from holdfast.training import choose_device

__all__ = ["local_engine", "sweep"]


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
    watch: Callable[[Event], None] | None = None,
) -> Summary:
    """Carry out the runs that are missing under `out`, and say how it went.

    Runs with a result under `out` or in `finished` are skipped; one that fails is recorded and does not stop the rest.
    Ctrl-C stops the runs in flight, keeps what is finished and returns with `interrupted` set; the same call continues.
    A run that another sweep is carrying out is waited for. Without an `engine`, `jobs` processes with one thread each
    on a CPU (default: one per core), or a fleet of `jobs` runs on a GPU (default: as many as make it faster).
    """
    results.check_writable(out)
    engine = engine or local_engine(device, jobs)
    agenda = Agenda(configs, out, load_results(out) if finished is None else finished)

    def emit(event: Event | None) -> None:
        agenda.beat()
        if event is not None:
            agenda.note(event)
            if watch:
                watch(event)

    try:
        engine(iter(agenda), Job(out, data, device, tuple(plugins)), emit)
    except KeyboardInterrupt:
        agenda.summary.interrupted = True
    finally:
        agenda.close()
    return agenda.summary


def local_engine(device: str = "auto", jobs: int | None = None) -> Engine:
    """Fleets where the device is a GPU, processes otherwise."""
    if choose_device(device).type == "cuda":
        return FleetEngine(jobs)
    return LocalEngine(jobs or cores())
