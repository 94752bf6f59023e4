"""An experiment before it is carried out: which runs are missing, which data they read and how long they take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from holdfast import data as datasets
from holdfast.benchmarks import required_data
from holdfast.config import RunConfig
from holdfast.devices import choose_device, lacks_bfloat16
from holdfast.errors import DataError, HoldfastError
from holdfast.experiments import MEASURES, Experiment, Results
from holdfast.experiments.measures import unmeasured
from holdfast.sweep.forecast import Forecast, forecast
from holdfast.sweep.processes import cores

__all__ = ["Part", "Plan", "fetch_missing", "make_plan"]


class Part(NamedTuple):
    """The runs of a plan on one benchmark, or all of them."""

    runs: int
    there: int
    """Runs that have a result."""
    time: Forecast
    """Of the other runs."""
    missing_data: list[str]

    @property
    def to_run(self) -> int:
        """Runs that have no result yet."""
        return self.runs - self.there

    def to_json(self) -> dict[str, Any]:
        """The part as plain JSON values."""
        counts = {"runs": self.runs, "there": self.there, "to_run": self.to_run, "seconds": self.time.seconds}
        return {**counts, "not_measured": len(self.time.unknown), "missing_data": self.missing_data}


@dataclass(frozen=True)
class Plan:
    """What is there of an experiment, and what is still to be done. See `make_plan`."""

    experiment: Experiment
    configs: list[RunConfig]
    """Every run of the experiment, each once."""
    there: Results
    missing: list[RunConfig]
    """The runs that have no result yet."""
    missing_data: dict[str, list[str]]
    """Data sets that are needed and not there, each with the benchmarks that read it."""
    slow: list[RunConfig]
    """The missing runs that take longer than any forecast knows: this processor has no instructions for bfloat16."""
    jobs: int | None
    device: str

    @cached_property
    def at_once(self) -> int:
        """Runs at a time for which the time is told."""
        # How many runs a GPU takes is found by trying. One at a time is the longest it can take.
        return self.jobs or (cores() if choose_device(self.device).type == "cpu" else 1)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """What there is to do by benchmark, if there are several, and for `all` of them."""
        benchmarks = list(dict.fromkeys(config.benchmark for config in self.configs))
        each = {name: self._part([name]) for name in benchmarks} if len(benchmarks) > 1 else {}
        return {**each, "all": self._part(benchmarks)}

    def _part(self, benchmarks: Sequence[str]) -> Part:
        runs = sum(config.benchmark in benchmarks for config in self.configs)
        missing = [config for config in self.missing if config.benchmark in benchmarks]
        time = forecast(missing, self.there, jobs=self.at_once, device=self.device)
        data = [name for name, readers in self.missing_data.items() if not set(readers).isdisjoint(benchmarks)]
        return Part(runs, runs - len(missing), time, data)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        parts = {name: part.to_json() for name, part in self.parts.items()}
        return {"experiment": self.experiment.name, "at_once": self.at_once, "plan": parts}


def make_plan(
    experiment: Experiment,
    seeds: Sequence[int],
    there: Results,
    *,
    jobs: int | None = None,
    device: str = "auto",
    data: Path | None = None,
    here: bool = True,
) -> Plan:
    """What an experiment with these seeds needs beyond the results that are there.

    Unless it is carried out `here`, other machines must have the data and a processor that suits.
    """
    for cell in experiment.cells:
        MEASURES[cell.metric]  # an unknown name raises an error now, and not when all runs are done
    configs = experiment.configs(seeds)
    missing = [config for config in configs if config not in there]
    readers = [*missing, *(stored.config for stored in unmeasured(experiment, configs, there))]
    missing_data = _missing_data(readers, data) if here else {}
    slow = [config for config in missing if config.precision == "bfloat16"] if here else []
    slow = slow if slow and lacks_bfloat16(choose_device(device)) else []
    return Plan(experiment, configs, there, missing, missing_data, slow, jobs, device)


def _missing_data(configs: Iterable[RunConfig], root: Path | None) -> dict[str, list[str]]:
    """The data sets that the runs read and that cannot be read as they are, each with its benchmarks."""
    found: dict[str, list[str]] = {}
    for benchmark in dict.fromkeys(config.benchmark for config in configs):
        for name in required_data(benchmark):
            found.setdefault(name, []).append(benchmark)
    absent = [name for name in found if datasets.status(name, root).state in ("missing", "damaged")]
    return {name: found[name] for name in absent}


def fetch_missing(plan: Plan, root: Path | None = None) -> None:
    """Fetch the data that a plan lacks. What cannot be had is told once, all of it."""
    failed = {}
    for name in plan.missing_data:
        try:
            datasets.fetch(name, root)
        except HoldfastError as error:
            failed[name] = error
    if failed:
        readers = dict.fromkeys(reader for name in failed for reader in plan.missing_data[name])
        raise DataError(
            f"nothing was run, as data is missing for {', '.join(readers)}. "
            + " ".join(f"{name}: {error}" for name, error in failed.items())
            + " To run the rest, choose its benchmarks with --only benchmark=NAME."
        )
