"""The examples run as they are and show what they promise."""

import ast
import contextlib
import io
import json
import re
import runpy
import sys

import pytest
import torch

import holdfast as hf

from .blocks import ROOT

pytestmark = pytest.mark.pages
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def run(monkeypatch):
    """Runs an example in this process, as `python examples/NAME.py` would; gives what it printed."""
    before = dict(hf.REGULARIZERS._entries)
    threads = torch.get_num_threads()

    def go(name):
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])  # what pytest was given is not for the example
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return printed.getvalue()

    with torch.random.fork_rng():
        yield go
    torch.set_num_threads(threads)
    hf.REGULARIZERS._entries.clear()
    hf.REGULARIZERS._entries.update(before)


def numbers(text):
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def test_own_stream(run):
    _, plain, ours = run("own_stream").splitlines()
    assert min(numbers(plain)) < 70 < 90 < min(numbers(ours))


def test_add_a_regularizer(run):
    nothing, er, _, centred = (numbers(line) for line in run("add_a_regularizer").splitlines())
    assert nothing == [0.0]
    assert centred[0] > er[0]
    assert centred[1] < er[1]


def test_resume(run):
    printed = run("resume")
    assert "begins at step 120" in printed
    assert printed.strip().endswith("equal")


def test_analyse_your_model(run):
    printed = run("analyse_your_model")
    alone, consistent, explained = re.split("with consistency|What this says", printed)
    assert printed.count("calibration error") == printed.count("belief by task") == 2
    # What it says in the end is what it found.
    assert "right more often" in explained
    assert numbers(alone)[0] < numbers(consistent)[0]
    assert "probabilities are too low" in explained
    assert "less sure than it may be" in consistent
    uneven = [float(re.search(r"gets ([\d.]+) times", part)[1]) for part in (alone, consistent)]
    worst = [float(re.findall(r"([\d.]+) % right at severity", part)[-1]) for part in (alone, consistent)]
    assert uneven[0] > uneven[1]
    assert worst[0] < worst[1]


def test_no_boundaries(run):
    *_, forgets, replay, consistent = (numbers(line) for line in run("no_boundaries").splitlines())
    assert sum(forgets) < sum(replay) < sum(consistent)


def test_growing_head(run):
    fixed, grown = run("growing_head").splitlines()
    assert abs(numbers(grown)[0] - numbers(fixed)[0]) < 4
    assert min(numbers(grown + fixed)) > 80
    assert grown.endswith("with outputs 2 2 4 6 8 10")


def test_monitor(run):
    forgetful, lasting = run("monitor").split("500, with consistency")
    assert "'digits 0 and 1' has lost" in forgetful
    lost = [
        [float(line.split()[-2 - line.endswith("dropped")]) for line in part.splitlines() if " 625 " in line]
        for part in (forgetful, lasting)
    ]
    assert len(lost[0]) == len(lost[1]) == 5
    assert sum(lost[0]) > 2 * sum(lost[1])
    assert forgetful.count("dropped") == forgetful.count("has lost") > lasting.count("has lost")


def test_add_a_class_to_a_detector(run):
    _, forgetful, before, lasting = (numbers(line) for line in run("add_a_class_to_a_detector").splitlines())
    assert forgetful[:2] == [0.0, 0.0]
    assert before[2] == 0.0  # crosses were not there yet
    assert min(lasting) > 75


def test_production_job(run):
    # What the job that is killed prints goes to the real standard output.
    killed, again, whole, *_, alert, verdict = run("production_job").splitlines()
    assert killed == "killed by signal 9 at step 333"
    assert (again, whole) == ("begins at step 325", "begins at step 0")
    assert json.loads(alert)["points lost"] > 5
    assert verdict.endswith(": equal")


def test_every_example_is_tested_and_shown():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    page = (ROOT / "docs" / "examples.md").read_text("utf-8")
    for path in EXAMPLES:
        # That one needs several processes, and has tests of its own.
        assert path.stem in tested or path.stem == "distributed", path.name
        assert f'--8<-- "examples/{path.name}"' in page
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), path.name
