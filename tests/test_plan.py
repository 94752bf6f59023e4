"""The plan of an experiment: what is there, what is missing, and what that takes. Nothing runs here."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.data import Status
from holdfast.errors import DataError, UsageError
from holdfast.experiments import Cell, Experiment, Results, Stored
from holdfast.results import RunResult
from holdfast.sweep import Plan, fetch_missing, make_plan, open_engine
from test_sweep import tiny

IMAGES = tiny().change(benchmark="seq-cifar10", precision="bfloat16")
GREY = tiny()


@pytest.fixture
def experiment() -> Experiment:
    cells = [Cell("all", config.benchmark, "ours", "accuracy", config) for config in (IMAGES, GREY)]
    return Experiment("two", "Two benchmarks", "nowhere", "Little.", tuple(cells))


@pytest.fixture(autouse=True)
def no_files(monkeypatch):
    """No data set that would have to be fetched is there; the names of those that were looked for."""
    asked = []

    def status(name, root):
        asked.append(name)
        return Status("bundled" if name == "mnist" else "missing", Path(), "", 0)

    monkeypatch.setattr("holdfast.data.status", status)
    return asked


def results(*configs, **measures) -> Results:
    """Results of 40 s each."""
    matrix = torch.full((2, 2), 30.0, dtype=torch.float64)
    made = [RunResult(each, matrix, matrix, matrix[0], 40.0, environment={"device_type": "cpu"}) for each in configs]
    stored = [Stored(each, Path(f"{each.config.fingerprint}.json"), measures) for each in made]
    return Results({each.config.fingerprint: each for each in stored})


def test_an_unknown_measure_is_told_before_the_runs(experiment):
    """It was told after them."""
    cells = (*experiment.cells, replace(experiment.cells[0], metric="acuracy"))
    with pytest.raises(UsageError, match="unknown measure 'acuracy': did you mean 'accuracy'"):
        make_plan(replace(experiment, cells=cells), range(1), results())


def test_what_is_there_and_what_is_missing(experiment):
    there = results(GREY, GREY.change(seed=7))
    plan = make_plan(experiment, range(2), there, jobs=2, device="cpu")
    assert plan.configs == [config.change(seed=seed) for seed in range(2) for config in (IMAGES, GREY)]
    assert plan.missing == [IMAGES, IMAGES.change(seed=1), GREY.change(seed=1)]
    assert plan.missing_data == {"cifar10": ["seq-cifar10"]}
    assert {name: (part.runs, part.there, part.to_run, part.missing_data) for name, part in plan.parts.items()} == {
        "seq-cifar10": (2, 0, 2, ["cifar10"]),
        "rot-mnist": (2, 1, 1, []),
        "all": (4, 1, 3, ["cifar10"]),
    }
    assert plan.parts["rot-mnist"].time == (40.0, [], 0)


def test_one_benchmark_has_no_part_of_its_own(experiment):
    assert list(make_plan(replace(experiment, cells=experiment.cells[:1]), [0], Results()).parts) == ["all"]


def test_with_every_result_there_is_nothing_to_do(experiment):
    plan = make_plan(experiment, [0], results(IMAGES, GREY), device="cpu")
    assert (plan.missing, plan.missing_data, plan.slow) == ([], {}, [])
    assert plan.parts["all"].time == (0.0, [], 0)


def test_a_result_that_is_to_be_measured_needs_its_data(experiment):
    robust = replace(experiment, cells=(replace(experiment.cells[0], metric="mra"),))
    assert make_plan(robust, [0], results(IMAGES)).missing_data == {"cifar10": ["seq-cifar10"]}
    measured = dict.fromkeys(("robust_noise", "robust_blur", "robust_weather", "robust_digital", "mra"), 12.5)
    assert make_plan(robust, [0], results(IMAGES, **measured)).missing_data == {}


@pytest.mark.parametrize("lacks", [True, False])
def test_runs_that_this_processor_is_slow_at(experiment, monkeypatch, lacks):
    monkeypatch.setattr("holdfast.sweep.plan.lacks_bfloat16", lambda _: lacks)
    assert make_plan(experiment, [0], Results(), device="cpu").slow == ([IMAGES] if lacks else [])


def test_what_other_machines_carry_out_says_nothing_of_this_one(experiment, monkeypatch, no_files):
    monkeypatch.setattr("holdfast.sweep.plan.lacks_bfloat16", lambda _: True)
    plan = make_plan(experiment, [0], Results(), device="cuda", here=False)  # there may be no GPU here
    assert (plan.missing, plan.missing_data, plan.slow) == ([IMAGES, GREY], {}, [])
    assert no_files == []


@pytest.mark.parametrize(
    ("jobs", "kind", "at_once"), [(None, "cpu", 5), (3, "cpu", 3), (None, "cuda", 1), (2, "cuda", 2)]
)
def test_runs_at_once(experiment, monkeypatch, jobs, kind, at_once):
    monkeypatch.setattr("holdfast.sweep.plan.cores", lambda: 5)
    monkeypatch.setattr("holdfast.sweep.plan.choose_device", lambda _: SimpleNamespace(type=kind))
    assert Plan(experiment, [], Results(), [], {}, [], jobs, "auto").at_once == at_once


def test_json(experiment):
    told = json.loads(json.dumps(make_plan(experiment, [0], results(GREY), jobs=2, device="cpu").to_json()))
    assert (told["experiment"], told["at_once"]) == ("two", 2)
    nothing = {"runs": 1, "there": 1, "to_run": 0, "seconds": 0.0, "not_measured": 0, "missing_data": []}
    assert told["plan"]["rot-mnist"] == nothing
    assert told["plan"]["all"]["missing_data"] == ["cifar10"]


def test_all_that_is_missing_is_fetched_before_anything_is_said(experiment, monkeypatch):
    asked = []

    def fetch(name, root):
        asked.append((name, root))
        if name != "good":
            raise DataError(f"no {name}.")

    monkeypatch.setattr("holdfast.data.fetch", fetch)
    missing = {"cifar10": ["seq-cifar10"], "good": ["rot-mnist"], "other": ["seq-cifar10", "mnist-360"]}
    plan = Plan(experiment, [], Results(), [], missing, [], None, "cpu")
    with pytest.raises(
        DataError, match=r"missing for seq-cifar10, mnist-360\. cifar10: no cifar10\. other: no other\. "
    ):
        fetch_missing(plan, Path("root"))
    assert asked == [(name, Path("root")) for name in missing]


@pytest.mark.parametrize(
    ("name", "out", "address", "message"),
    [
        ("rya", "runs", None, "unknown engine 'rya': did you mean 'ray'"),
        ("local", "s3://bucket", None, "--out can be an address only with --engine ray"),
        ("local", "runs", "host:1", "--address is for --engine ray"),
    ],
)
def test_engines_that_cannot_be_had(name, out, address, message):
    with pytest.raises(UsageError, match=message), open_engine(name, out, address=address):
        pass


def test_the_local_engine(tmp_path):
    with open_engine("local", str(tmp_path), jobs=3, device="cpu") as (folder, runner):
        assert (folder, runner.jobs) == (tmp_path, 3)
