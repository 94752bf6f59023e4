"""What the terminal shows: live progress on standard error, tables on standard output."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from holdfast.data import reporting
from holdfast.training import Progress

__all__ = ["RunDisplay", "data_progress", "errors", "output", "table"]

output = Console()
errors = Console(stderr=True)

SHORT = {"current": "new", "replay": "old", "consistency": "drift"}
"""Names of the loss terms that leave room for the rest of the line."""

REFRESH = 0.1  # seconds between looks at a run; looking after every step would cost more than the step


class RunDisplay:
    """A live line per run: task, epoch, loss terms, steps per second, time left."""

    def __init__(self, quiet: bool = False) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=_bar_width()),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[where]}"),
            TextColumn("[dim]{task.fields[losses]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=errors,
            disable=quiet,
        )

    def __enter__(self) -> RunDisplay:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def watch(self, title: str) -> _Line:
        """A callback for `run(on_step=...)` that shows the run on a line of its own."""
        return _Line(self._bars, title)


class _Line:
    def __init__(self, bars: Bars, title: str) -> None:
        self._bars = bars
        self._line = bars.add_task(title, total=1.0, where="", losses="", speed="")
        percentage, time_left, gaps = 4, 7, 6
        self._room = errors.width - len(title) - _bar_width() - percentage - time_left - gaps
        self._shown = self._began = time.perf_counter()
        self._before: int | None = None  # steps done when the clock began

    def __call__(self, progress: Progress) -> None:
        now = time.perf_counter()
        if self._before is None:
            self._before, self._began = progress.step, now  # the first step came with all that is done but once
            # A head start says nothing about the speed. (Any number will do, whatever the annotation says.)
            self._bars.reset(self._line, completed=progress.fraction)  # type: ignore[arg-type]
        if now - self._shown < REFRESH and progress.fraction < 1:
            return
        self._shown = now
        epochs = progress.config.epochs
        where = f"task {progress.task + 1}/{progress.stages}"
        where += f" epoch {progress.epoch + 1}/{epochs}" if epochs > 1 else ""
        terms = progress.losses or {}
        speed = f"{(progress.step - self._before) / max(now - self._began, 1e-9):,.0f} steps/s"
        losses = " ".join(f"{name} {terms[term]:.2f}" for term, name in SHORT.items() if terms.get(term))
        # On a narrow terminal, rather leave these out than cut everything short.
        room = self._room - len(where)
        speed = speed if len(speed) <= room else ""
        losses = losses if len(losses) <= room - len(speed) else ""
        self._bars.update(self._line, completed=progress.fraction, where=where, losses=losses, speed=speed)


def _bar_width() -> int:
    return 16 if errors.width >= 100 else 8


@contextmanager
def data_progress() -> Iterator[None]:
    """Show downloads and decoding of data sets while inside the block."""
    layout = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    lines: dict[str, TaskID] = {}
    with Bars(*layout, console=errors, transient=True) as bars:

        def show(what: str, done: int, total: int) -> None:
            if what not in lines:
                lines[what] = bars.add_task(what, total=total)
            bars.update(lines[what], completed=done, total=total)

        with reporting(show):
            yield


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> Table:
    """A table whose first `left` columns are text and the rest numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", min_width=min(len(title), output.width))
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right", overflow="fold")  # addresses stay whole
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:,.2f}"
    return "-" if value is None else str(value)
