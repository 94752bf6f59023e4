"""How long runs will take, from how long earlier ones took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from holdfast.config import RunConfig
from holdfast.experiments import Results
from holdfast.training import choose_device

__all__ = ["Estimate", "Rates", "estimate"]


class Estimate(NamedTuple):
    """How long runs will take, from the measured times of earlier ones."""

    seconds: float
    """Wall time with the given number of runs at a time; of the runs that can be told."""
    unknown: list[RunConfig]
    """Runs of benchmarks without a measured time."""


class Rates:
    """Measured times of runs: of the same settings, else the same benchmark and method, else the same benchmark."""

    def __init__(self, known: Results, device: str) -> None:
        # A GPU that is asked for by name may be another machine's.
        device_type = choose_device(device).type if device == "auto" else device.partition(":")[0]
        self._seconds: dict[tuple[object, ...], list[float]] = {}
        for stored in known:
            if stored.result.environment.get("device_type") == device_type:
                for key in _likeness(stored.config):
                    self._seconds.setdefault(key, []).append(stored.result.seconds)

    def seconds(self, config: RunConfig) -> float | None:
        """What the run will take alone, or None if nothing like it was measured."""
        for key in _likeness(config):
            if key in self._seconds:
                return median(self._seconds[key])
        return None


def _likeness(config: RunConfig) -> Iterator[tuple[object, ...]]:
    """What runs of about the same length have in common, from the closest to the farthest."""
    yield (config.change(seed=0),)
    size = (config.benchmark, config.tasks, config.epochs, config.train_limit)
    yield (*size, config.method)
    yield size


def estimate(configs: Sequence[RunConfig], known: Results, *, jobs: int, device: str = "auto") -> Estimate:
    """How long the runs will take, `jobs` at a time, by the measured times in `known` on this kind of device."""
    rates = Rates(known, device)
    each = [(config, rates.seconds(config)) for config in configs]
    told = [seconds for _, seconds in each if seconds is not None]
    # No shorter than the longest run, however many go at once.
    return Estimate(max([sum(told) / max(1, jobs), *told], default=0.0), [c for c, seconds in each if seconds is None])
