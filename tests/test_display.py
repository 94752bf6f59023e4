"""The terminal: lines of progress at any width, and none where nobody watches."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from holdfast import display
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.training import Progress


@pytest.fixture
def screen(monkeypatch):
    """Call with a width: standard error is then a terminal of that width, or a file. Gives what is written to it."""

    def use(width: int, terminal: bool = True) -> io.StringIO:
        written = io.StringIO()
        console = Console(file=written, width=width, force_terminal=terminal, color_system=None)
        monkeypatch.setattr(display, "errors", console)
        return written

    return use


@pytest.mark.parametrize("epochs", [1, 50])
@pytest.mark.parametrize("width", [56, 60, 66, 72, 80, 100, 140])
def test_nothing_in_the_line_of_a_run_is_cut_short(screen, monkeypatch, width, epochs):
    monkeypatch.setattr(display, "REFRESH", 0)
    written = screen(width)
    config = RunConfig.preset("seq-cifar10", "simclr", buffer_size=5120, epochs=epochs)
    progress = Progress(config, 20)
    progress.losses = {"total": 3.0, "current": 1.5, "replay": 0.25, "consistency": 12.0}
    with display.show_runs() as line:
        show = line(config.title)
        for _ in range(3):
            progress.advance(5)
            show(progress)
    shown = next(
        text for text in reversed(re.split(r"\r|\n|\x1b\[[0-9;?]*[A-Za-z]", written.getvalue())) if text.strip()
    )
    assert "…" not in shown
    assert config.title in shown
    assert ("task 1/20" in shown) == (width >= 66)
    assert ("drift 12.00" in shown) == (width == 140)


def test_the_speed_of_a_run_counts_no_evaluation_and_no_making_of_data(screen, monkeypatch):
    monkeypatch.setattr(display, "REFRESH", 0)
    now = [0.0]
    monkeypatch.setattr(display.time, "perf_counter", lambda: now[0])
    written = screen(140)
    progress = Progress(RunConfig.preset("rot-mnist", "er", buffer_size=200), 20)
    with display.show_runs() as line:
        show = line("run")
        for moves, seconds in ((True, 5.0), (True, 0.1), (False, 60.0), (True, 30.0), (True, 0.1)):
            if moves:
                progress.advance(10)
            now[0] += seconds
            show(progress)
    assert re.findall(r"(\d+) steps/s", written.getvalue())[-1] == "10"


def test_where_no_step_was_timed_there_is_no_speed(screen):
    written = screen(140)
    progress = Progress(RunConfig.preset("rot-mnist", "er", buffer_size=200), 2)
    with display.show_runs() as line:
        show = line("run")
        for task in range(2):
            progress.task = task
            progress.advance(1)
            show(progress)
            show(progress)
    assert "task 2/2" in written.getvalue()
    assert "steps/s" not in written.getvalue()


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_is_refused_before_its_first_step_leaves_no_line(screen, terminal, begun):
    written = screen(80, terminal)

    def fails():
        with display.show_runs() as line:
            show = line("er, seed 0")
            if begun:
                progress = Progress(RunConfig.preset("rot-mnist", "er", buffer_size=200), 20)
                progress.advance(10)
                show(progress)
            raise UsageError("refused")

    with pytest.raises(UsageError, match="refused"):
        fails()
    left = re.split(r"\r|\x1b\[2K|\x1b\[1A", re.sub(r"\x1b\[\?25[hl]", "", written.getvalue()))[-1]
    assert ("er, seed 0" in left) == begun
    assert left.endswith("\n") == begun


def test_lines_that_vanish_leave_nothing_in_a_file(screen):
    written = screen(80, terminal=False)
    with display.show_progress(2, "reading") as advance:
        advance("one")
    with display.data_progress():
        pass
    assert written.getvalue() == ""


def test_a_title_longer_than_its_table_is_one_line_and_leaves_the_table_narrow():
    output = io.StringIO()
    Console(file=output, width=60).print(display.table(f"title {30 * 'a'}", ("a", "b"), [("c", 1)]))
    title, *lines = output.getvalue().splitlines()
    assert title == f"title {30 * 'a'}"
    assert {len(line) for line in lines} == {9}


def test_a_table_of_columns_without_names_has_no_header():
    output = io.StringIO()
    Console(file=output, width=60).print(display.table("title", ("", ""), [("accuracy", 1.5)]))
    assert [line.strip("┌┬┐└┴┘─ ") for line in output.getvalue().splitlines()] == [
        "title",
        "",
        "│ accuracy │ 1.50 │",
        "",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1234.5, "1,234.50"), (1234, "1,234"), (True, "True"), (float("nan"), "-"), (None, "-"), ("1234", "1234")],
)
def test_a_cell(value, shown):
    output = io.StringIO()
    Console(file=output, width=60).print(display.table("title", ("", ""), [("name", value)]))
    assert f" {shown} " in output.getvalue()


def test_a_speed_has_no_decimals():
    assert display.steps_per_second(SimpleNamespace(timing={"steps_per_second": 1234.56})) == "1,235"
    assert display.steps_per_second(SimpleNamespace(timing={})) is None


def test_no_word_of_a_table_is_broken_where_lines_can_be_wrapped(monkeypatch):
    monkeypatch.setattr(display, "output", Console(file=(written := io.StringIO()), width=60))
    rows = [("seq-tinyimagenet", 72, "about 1,928 days", "cifar10, cifar100 missing, and fetched first")]
    display.output.print(display.table("title", ("benchmark", "runs", "time, 2 at once", "data"), rows, left=4))
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) == 60
    words = re.findall(r"[^\s│┃]+", written.getvalue())
    assert {"seq-tinyimagenet", "benchmark", "cifar10,", "cifar100", "missing,", "fetched"} <= set(words)


def test_a_word_longer_than_the_table_is_folded(monkeypatch):
    monkeypatch.setattr(display, "output", Console(file=(written := io.StringIO()), width=30))
    display.output.print(display.table("", ("name", "where"), [("mnist", "https://example.org/" + 30 * "a")], left=2))
    assert "mnist" in written.getvalue()
    assert written.getvalue().count("a") == 30 + 2, "and those of 'name' and 'example'"
