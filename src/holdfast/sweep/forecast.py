"""How long runs will take, judged by earlier ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from holdfast.config import RunConfig
from holdfast.devices import choose_device
from holdfast.experiments import Results

__all__ = ["Forecast", "Rates", "forecast"]


class Forecast(NamedTuple):
    """How long runs will take."""

    seconds: float
    """Wall time of the runs whose time can be told."""
    unknown: list[RunConfig]
    """Runs of benchmarks that were never measured."""


class Rates:
    """Measured times: of runs with the same settings, else the same benchmark and method, else the same benchmark."""

    def __init__(self, known: Results, device: str) -> None:
        # A GPU that is named may be on another machine, so it is not looked for here.
        device_type = choose_device(device).type if device == "auto" else device.partition(":")[0]
        self._seconds: dict[tuple[object, ...], list[float]] = {}
        for stored in known:
            if stored.result.environment.get("device_type") == device_type:
                for key in _likeness(stored.config):
                    self._seconds.setdefault(key, []).append(stored.result.seconds)

    def seconds(self, config: RunConfig) -> float | None:
        """The time the run will take alone, or None if no run like it was measured."""
        for key in _likeness(config):
            if key in self._seconds:
                return median(self._seconds[key])
        return None


def _likeness(config: RunConfig) -> Iterator[tuple[object, ...]]:
    """Keys that runs of about the same length share, the closest first."""
    yield (config.change(seed=0),)
    size = (config.benchmark, config.tasks, config.epochs, config.train_limit)
    yield (*size, config.method)
    yield size


def forecast(configs: Sequence[RunConfig], known: Results, *, jobs: int, device: str = "auto") -> Forecast:
    """How long the runs will take, `jobs` at a time, judged by the times in `known` on this kind of device."""
    rates = Rates(known, device)
    each = [(config, rates.seconds(config)) for config in configs]
    told = [seconds for _, seconds in each if seconds is not None]
    # However many go at once, it takes as long as the longest run.
    return Forecast(max([sum(told) / max(1, jobs), *told], default=0.0), [c for c, seconds in each if seconds is None])
