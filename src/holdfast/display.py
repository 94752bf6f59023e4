"""What the terminal shows: live progress on standard error, tables on standard output."""

import codecs
import io
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.measure import Measurement, measure_renderables
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from holdfast import training
from holdfast.data import reporting
from holdfast.experiments import Skipped
from holdfast.report.text import visible
from holdfast.results import RunResult

__all__ = [
    "Lines",
    "RunLine",
    "data_progress",
    "errors",
    "fitting",
    "output",
    "replace_unknown_signs",
    "show_progress",
    "show_runs",
    "steps_per_second",
    "table",
    "tell",
    "tell_skipped",
]

SHORT = {"current": "new", "replay": "old", "consistency": "drift"}
"""Names of the loss terms that leave room for the rest of the line."""
REFRESH = 0.1  # seconds between updates of a run's line; an update after every step would cost more than the step
ASCII = {"±": "+-", "✓": "v", "✗": "x", "–": "-", "−": "-", "·": ".", "…": "...", "◇": "o", "τ": "tau", "→": "->"}
"""What a terminal that cannot show our signs gets in their place."""


class Screen(Console):
    """A console that shows control characters in text and does not obey them: file names may contain any."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, with the control characters in strings made visible."""
        super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **options)


output = Screen()
errors = Screen(stderr=True)


def tell(text: str, to: Console = errors) -> None:
    """Print a line of plain text, whatever signs are in it."""
    to.print(text, highlight=False, markup=False, soft_wrap=True)


def tell_skipped(skipped: Sequence[Skipped], most: int) -> None:
    """Name the files that were not read as results, at most so many."""
    for path, reason in skipped[:most]:
        tell(f"skipped {path}: {reason}")
    if len(skipped) > most:
        tell(f"skipped {len(skipped) - most} more files")


def replace_unknown_signs() -> None:
    """From now on, replace signs that standard output and error cannot encode; Python would raise an error."""

    def replacement(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(ASCII.get(sign, "?") for sign in error.object[error.start : error.end]), error.end

    codecs.register_error("holdfast", replacement)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="holdfast")


class Lines(Progress):
    """Live lines on standard error: a title, a bar, percent, `details`, time left. They vanish at the end."""

    def __init__(self, *details: ProgressColumn, transient: bool = True) -> None:
        name, share = TextColumn("{task.description}", markup=False), TextColumn("{task.percentage:>3.0f}%")
        self._ids: dict[Hashable, TaskID] = {}
        self.bar_width = 16 if errors.width >= 100 else 8 if errors.width >= 80 else 0
        bar = [BarColumn(self.bar_width)] if self.bar_width else []
        columns = (name, *bar, share, *details, TimeRemainingColumn())
        # In a file, lines that vanish would leave an empty line.
        hidden = transient and not errors.is_interactive
        super().__init__(*columns, console=errors, transient=transient, disable=hidden)

    def move(self, title: str, done: float, total: float = 1.0, *, key: Hashable = None) -> None:
        """Set how much is done of what the line `key` shows (default: its title). A new key gets a line."""
        key = title if key is None else key
        if key not in self._ids:
            self._ids[key] = self.add_task(title, total=total)
        self.update(self._ids[key], completed=done, total=total)

    def end(self, key: Hashable) -> None:
        """Take the line `key` away, if there is one."""
        if key in self._ids:
            self.remove_task(self._ids.pop(key))

    def vanish(self) -> None:
        """End at once and leave nothing on the screen or in a file."""
        self.live.transient = True
        self.live.stop()
        self.disable = True  # `stop` would write an empty line into a file


@contextmanager
def show_progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """A bar while inside the block. Call the function it gives after each of `total` parts, with the part's name."""
    with Lines() as lines:
        line = lines.add_task(what, total=total)
        yield lambda name: lines.update(line, advance=1, description=visible(f"{what} {name}"))


@contextmanager
def data_progress() -> Iterator[None]:
    """Show downloads and decoding of data sets while inside the block."""
    with Lines() as lines, reporting(lines.move):
        yield


class RunLine:
    """A callback for `run(on_step=...)`: shows task, epoch, loss terms, steps per second and the time left."""

    def __init__(self, bars: Lines, title: str) -> None:
        self._bars = bars
        self._line = bars.add_task(title, total=1.0, where="", losses="", speed="")
        percentage, time_left, gaps = 4, 8, len(bars.columns) - 1
        self._room = errors.width - len(title) - bars.bar_width - percentage - time_left - gaps
        self._shown = self._called = self._began = time.perf_counter()
        self._before: int | None = None  # steps done when the clock began, and those not counted since
        self._step = 0
        self._evaluated = False  # whether the last call came after an evaluation

    @property
    def begun(self) -> bool:
        """Whether a step of the run was made."""
        return self._before is not None

    def __call__(self, progress: training.Progress) -> None:
        """Show where the run stands, at most every REFRESH seconds."""
        now = time.perf_counter()
        steps = self._count(progress, now)
        if now - self._shown >= REFRESH or progress.fraction >= 1:
            self._shown = now
            seconds = max(now - self._began, 1e-9)
            self._show(progress, f"{steps / seconds:,.0f} steps/s" if steps else "")

    def _count(self, progress: training.Progress, now: float) -> int:
        """The steps done since the clock began."""
        if self._before is None:
            # The clock starts after the first step, which includes preparations that happen only once. A resumed run
            # starts with steps done, which say nothing about the speed.
            self._before, self._began = progress.step, now
            self._bars.reset(self._line, completed=progress.fraction)  # type: ignore[arg-type]  # a fraction works
        elif progress.step == self._step or self._evaluated:
            # That was an evaluation, or the making of the next task's data and a step. The final table counts neither
            # evaluations nor data; the step goes uncounted, too.
            self._before += progress.step - self._step
            self._began += now - self._called
        self._evaluated = progress.step == self._step
        self._step, self._called = progress.step, now
        return progress.step - self._before

    def _show(self, progress: training.Progress, speed: str) -> None:
        """Update the line; a narrow terminal shows fewer details, so that none is cut short."""
        epochs = progress.config.epochs
        task = f"task {progress.task + 1}/{progress.stages}"
        epoch = f" epoch {progress.epoch + 1}/{epochs}" if epochs > 1 else ""
        terms = progress.losses or {}
        shown = {SHORT.get(term, term): value for term, value in terms.items() if value and term != "total"}
        losses = " ".join(f"{name} {value:.2f}" for name, value in shown.items())
        where = next((text for text in (task + epoch, task) if len(text) <= self._room), "")
        room = self._room - len(where)
        speed = speed if len(speed) <= room else ""
        losses = losses if len(losses) <= room - len(speed) else ""
        self._bars.update(self._line, completed=progress.fraction, where=where, losses=losses, speed=speed)


@contextmanager
def show_runs() -> Iterator[Callable[[str], RunLine]]:
    """Live lines while inside the block; the function it gives adds one for a run, named by its title.

    They stay, unless an error ends the block before any of the runs has begun.
    """
    details = (TextColumn(f"{{task.fields[{name}]}}") for name in ("where", "losses", "speed"))
    made: list[RunLine] = []

    def add(title: str) -> RunLine:
        made.append(RunLine(lines, title))
        return made[-1]

    with Lines(*details, transient=False) as lines:
        try:
            yield add
        except BaseException:
            if not any(line.begun for line in made):
                lines.vanish()
            raise


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> Group:
    """A title above a table whose first `left` columns are text and the rest numbers.

    Columns without any name have no header.
    """
    made = Table(show_header=any(columns))
    cells = [[_cell(value) for value in row] for row in rows]
    whole = zip(map(Text, columns), *cells, strict=True)
    widths = fitting([measure_renderables(output, output.options, column) for column in whole])
    for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
        # Long addresses are folded, not cut.
        made.add_column(column, justify="left" if number < left else "right", overflow="fold", width=width)
    for row in cells:
        made.add_row(*row)
    return Group(Text(visible(title), "bold"), made)  # a title of rich's own would be as narrow as the table


def fitting(sizes: Sequence[Measurement]) -> list[int]:
    """How wide the columns of a table are, each between its least width and its greatest, so that all fit.

    Left to itself, rich breaks the words of a narrow column before it wraps the lines of a wide one.
    """
    borders = 3 * len(sizes) + 1
    widths = [size.maximum for size in sizes]
    while sum(widths) > max(output.width - borders, len(widths)):
        loose = [place for place, size in enumerate(sizes) if widths[place] > size.minimum] or range(len(widths))
        widths[max(loose, key=widths.__getitem__)] -= 1
    return widths


def _cell(value: object) -> Text:
    """A number or a text that is shown as it is, without markup."""
    if value is None or value != value:
        return Text("-")
    if isinstance(value, float):
        return Text(f"{value:,.2f}")
    return Text(f"{value:,}" if type(value) is int else visible(str(value)))


def steps_per_second(result: RunResult) -> str | None:
    """How fast a run was, for a table; None if its result does not say."""
    rate = result.timing.get("steps_per_second")
    return None if rate is None else f"{rate:,.0f}"
