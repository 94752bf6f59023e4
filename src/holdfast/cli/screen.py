"""The live screen of a sweep, on standard error: done, running, failed, time left, means so far."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdfast import results
from holdfast.config import RunConfig
from holdfast.display import Lines, errors
from holdfast.errors import HoldfastError
from holdfast.report.text import duration
from holdfast.sweep import Event, Rates

__all__ = ["SweepScreen"]

SPARE_LINES = 6  # lines of the terminal that stay free around the means
FIRST_GUESS = 0.02  # share of the work that must be done before the time left means anything


class SweepScreen(Lines):
    """Shows a sweep while inside a `with` block; silent where standard error is not a terminal."""

    def __init__(self, title: str, missing: Sequence[RunConfig], out: Path, rates: Rates) -> None:
        self._title, self._out = title, out
        guesses = [seconds for config in missing if (seconds := rates.seconds(config))]
        usual = fmean(guesses) if guesses else 1.0
        self._work = {config: rates.seconds(config) or usual for config in missing}
        self._running: dict[RunConfig, float] = {}
        self._ended: set[RunConfig] = set()
        self._failed = 0
        self._means: dict[tuple[str, str, int | None], list[float]] = {}
        self._began = time.monotonic()
        super().__init__()  # last, as it already calls get_renderables

    def watch(self, event: Event) -> None:
        """Take in what happened."""
        if event.kind in ("started", "moved"):
            self._running[event.config] = event.fraction
            self.move(event.config.title, event.fraction, key=event.config)
            return
        self._running.pop(event.config, None)
        self.end(event.config)
        self._ended.add(event.config)
        if event.kind == "failed":
            self._failed += 1
        elif errors.is_terminal:
            self._count(event.config)

    def _count(self, config: RunConfig) -> None:
        try:
            result = results.find(self._out, config)
        except HoldfastError:
            return  # the screen only looks; files that cannot be read are named at the end
        if result is not None:
            key = (config.benchmark, config.method, config.buffer_size)
            self._means.setdefault(key, []).append(result.accuracy)

    def time_left(self) -> float | None:
        """Seconds to go at the pace so far; None until enough is done to tell."""
        total = sum(self._work.values())
        done = sum(self._work.get(config, 0.0) for config in self._ended)
        done += sum(self._work.get(config, 0.0) * fraction for config, fraction in self._running.items())
        if not total or done < FIRST_GUESS * total:
            return None
        return (time.monotonic() - self._began) * (total - done) / done

    def headline(self) -> str:
        """Where the sweep stands, in one line."""
        done = len(self._ended) - self._failed
        waiting = max(0, len(self._work) - len(self._ended) - len(self._running))
        left = self.time_left()
        pace = "" if left is None else f", about {duration(left)} left"
        return f"{done} done, {len(self._running)} running, {self._failed} failed, {waiting} waiting{pace}"

    def get_renderables(self) -> Iterator[RenderableType]:
        """The headline, a line for each run under way, and the means so far."""
        yield Text(f"{self._title}: {self.headline()}", style="bold")
        yield from super().get_renderables()
        yield self._mean_lines()

    def _mean_lines(self) -> Table:
        """The mean accuracies so far, the latest if there is no room for all."""
        room = errors.height - len(self._running) - SPARE_LINES
        lines = Table.grid(padding=(0, 2))
        for (benchmark, method, buffer_size), values in list(self._means.items())[-max(1, room) :]:
            buffer = "" if buffer_size is None else str(buffer_size)
            lines.add_row(benchmark, method, buffer, f"{fmean(values):.2f} %", f"n = {len(values)}", style="dim")
        return lines
