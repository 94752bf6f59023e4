"""Calibration, recency and robustness of the runs in the tables, the same seeds of each method."""

from collections.abc import Collection, Iterable
from math import isnan

from holdfast.analysis.claims import REFERENCE, Place
from holdfast.analysis.comparisons import REPLAY
from holdfast.config import RunConfig
from holdfast.experiments.base import Cell, Experiment
from holdfast.experiments.measures import MEASURES
from holdfast.experiments.stored import Stored
from holdfast.experiments.verdicts import Table, Verdict, judge

__all__ = ["trust"]


def trust(tables: Iterable[Table], shown: Collection[tuple[RunConfig, str]] = ()) -> tuple[Table, list[str]]:
    """A table of the measures beyond accuracy, a block for each measure, a row for each method, a column for each place
    (benchmark and buffer).

    A column has exactly the runs behind the accuracies of `tables`, of those seeds that all its methods have: other
    seeds would compare unlike things. Where there is no such seed, the column is refused with a sentence. Numbers that
    are `shown` elsewhere, as (config, measure), are left out.
    """
    verdicts: list[Verdict] = []
    refused: list[str] = []
    for place, runs in _runs(tables).items():
        for metric in ("ece", "recency_gap", "mra"):
            fresh = [stored for stored in runs.values() if (stored[0].config.change(seed=0), metric) not in shown]
            measured = {stored[0].config.method: found for stored in fresh if (found := _measured(stored, metric))}
            if REFERENCE not in measured or len(measured) < 2:
                continue
            shared = sorted(set.intersection(*map(set, measured.values())))
            if not shared:
                refused.append(
                    f"{place}: {MEASURES[metric].label} is not compared, as no seed is there of all methods."
                )
                continue
            column = str(place).replace("buffer ", "")
            for method, by_seed in measured.items():
                config = by_seed[shared[0]].config.change(seed=0)
                cell = Cell(MEASURES[metric].label, method, column, metric, config)
                verdicts.append(judge(cell, [by_seed[seed] for seed in shared]))
    verdicts.sort(key=lambda verdict: REPLAY.index(verdict.cell.row))
    experiment = Experiment("trust", "Can it be trusted?", "", "", tuple(verdict.cell for verdict in verdicts))
    return Table(experiment, tuple(verdicts)), refused


def _runs(tables: Iterable[Table]) -> dict[Place, dict[str, tuple[Stored, ...]]]:
    """The runs behind the accuracies of the paper's methods, by place and method."""
    found: dict[Place, dict[str, tuple[Stored, ...]]] = {}
    for verdict in (verdict for table in tables for verdict in table.verdicts if verdict.cell.metric == "accuracy"):
        config = verdict.cell.config
        if verdict.n and verdict.cell.row == config.method in REPLAY:
            found.setdefault(Place.of(config), {}).setdefault(config.method, verdict.stored)
    return found


def _measured(runs: Iterable[Stored], metric: str) -> dict[int, Stored]:
    """The runs that have the measure, by seed. A recency takes tasks with classes of their own."""
    return {
        stored.config.seed: stored
        for stored in runs
        if not isnan(MEASURES[metric].of(stored)) and not (metric == "recency_gap" and stored.result.shares_classes)
    }
