"""A grid of runs -> results in a folder: resumable, shared by several sweeps, unharmed by kills.

    summary = sweep(EXPERIMENTS["table1"].configs(), Path("runs"))

What a folder holds beside the results (a folder per fingerprint, see `holdfast.results`):

    .claims/FINGERPRINT      who is carrying out this run; gone when it has ended
    failed/FINGERPRINT.json  the settings and the error of a run that failed; the next sweep tries it again

How runs are carried out is an `Engine`: processes (LocalEngine), fleets on a GPU (FleetEngine), or a Ray cluster
(`holdfast.sweep.cluster.RayEngine`, with the extra `cluster`).
"""

from holdfast.sweep.agenda import Summary
from holdfast.sweep.engine import Emit, Engine, Event, Job
from holdfast.sweep.estimates import Estimate, Rates, estimate
from holdfast.sweep.fleets import FleetEngine
from holdfast.sweep.grid import local_engine, sweep
from holdfast.sweep.processes import LocalEngine, cores

__all__ = [
    "Emit",
    "Engine",
    "Estimate",
    "Event",
    "FleetEngine",
    "Job",
    "LocalEngine",
    "Rates",
    "Summary",
    "cores",
    "estimate",
    "local_engine",
    "sweep",
]
