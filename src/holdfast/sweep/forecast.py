"""How long runs will take, judged by earlier ones, or else by machines that were measured."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from holdfast.config import RunConfig
from holdfast.devices import choose_device
from holdfast.experiments import Results
from holdfast.workload import expected_seconds

__all__ = ["Forecast", "Rates", "forecast"]


class Forecast(NamedTuple):
    """How long runs will take."""

    seconds: float
    """Wall time of the runs whose time can be told."""
    unknown: list[RunConfig]
    """Runs of benchmarks about which nothing is known."""
    guessed: int
    """Of how many runs the time is a guess, because none like them was measured here."""


class Rates:
    """Measured times: of runs with the same settings, else the same benchmark and method, else the same benchmark."""

    def __init__(self, there: Results, device: str) -> None:
        # A GPU that is named may be on another machine, so it is not looked for here.
        self._type = device_type = choose_device(device).type if device == "auto" else device.partition(":")[0]
        self._seconds: dict[tuple[object, ...], list[float]] = {}
        for stored in there:
            if stored.result.environment.get("device_type") == device_type:
                for key in _likeness(stored.config):
                    self._seconds.setdefault(key, []).append(stored.result.seconds)

    def seconds(self, config: RunConfig) -> float | None:
        """The time the run will take alone, measured or guessed; None if there is nothing to go by."""
        return self.measured(config) or expected_seconds(config, self._type)

    def measured(self, config: RunConfig) -> float | None:
        """The time that runs like this one took here, or None if there was none."""
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


def forecast(configs: Sequence[RunConfig], there: Results, *, jobs: int, device: str = "auto") -> Forecast:
    """How long the runs will take, `jobs` at a time, judged by results that are `there` and of this kind of device."""
    rates = Rates(there, device)
    each = {config: rates.seconds(config) for config in configs}
    told = [seconds for seconds in each.values() if seconds is not None]
    unknown = [config for config, seconds in each.items() if seconds is None]
    measured = sum(rates.measured(config) is not None for config in each)
    # However many go at once, it takes as long as the longest run.
    return Forecast(max([sum(told) / max(1, jobs), *told], default=0.0), unknown, len(told) - measured)
