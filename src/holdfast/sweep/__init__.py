"""A grid of runs -> results in a folder. A sweep can be stopped, continued, and shared by several processes.

    summary = sweep(EXPERIMENTS["table1"].configs(), Path("runs"))

Beside the results (one folder per fingerprint, see `holdfast.results`) the folder holds:

    .leases/FINGERPRINT      which process carries out this run; removed when the run ends
    .checkpoints/FINGERPRINT.safetensors
                             the state of a run that was stopped, or goes on; removed when its result is saved
    failed/FINGERPRINT.json  the settings and the error of a run that failed; the next sweep tries it again

A `Runner` carries out the runs: in processes (ProcessRunner), as fleets on a GPU (FleetRunner), or on a Ray cluster
(`holdfast.sweep.cluster.RayRunner`, with the extra `cluster`).
"""

from holdfast.sweep.agenda import SweepSummary
from holdfast.sweep.engines import open_engine
from holdfast.sweep.forecast import Rates, forecast
from holdfast.sweep.grid import local_runner, sweep
from holdfast.sweep.plan import Plan, fetch_missing, make_plan
from holdfast.sweep.processes import ProcessRunner, cores
from holdfast.sweep.runner import Event, Job, Runner

__all__ = ["Event", "Job", "Plan", "ProcessRunner", "Rates", "Runner", "SweepSummary", "cores", "fetch_missing"]
__all__ += ["forecast", "local_runner", "make_plan", "open_engine", "sweep"]
