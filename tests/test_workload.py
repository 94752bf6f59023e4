"""How much runs compute and how long that takes: by hand, and beside runs that were timed."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from holdfast import data
from holdfast.benchmarks import BENCHMARKS, make_benchmark
from holdfast.config import RunConfig
from holdfast.models import MODELS
from holdfast.workload import SHAPES, expected_seconds, step_operations, steps_of

ROOT = Path(__file__).parent.parent


def test_every_benchmark_has_its_shape_and_size():
    assert set(SHAPES) == {name for name in BENCHMARKS if not name.startswith("test-")}


def test_operations_of_a_step_by_hand():
    # 2 operations per weight and sample forward, twice that backward, on 3 x 128 samples.
    weights = 784 * 100 + 100 * 100 + 100 * 10
    assert step_operations(RunConfig.preset("rot-mnist", "mse")) == 6 * weights * 384
    assert step_operations(RunConfig.preset("rot-mnist", "sgd")) == 6 * weights * 128


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_counted_without_computing(name):
    """On meta tensors, as on real ones."""
    from torch.utils.flop_counter import FlopCounterMode

    config = RunConfig.preset("seq-cifar10", "sgd").change(model=name)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        MODELS[name](*SHAPES["seq-cifar10"]).eval()(torch.zeros(1, 3, 32, 32))
    assert step_operations(config) == 3 * config.batch_size * counter.get_total_flops()


@pytest.mark.parametrize(
    ("benchmark", "changes"),
    [
        ("rot-mnist", {"tasks": 3}),
        ("seq-mnist", {}),
        ("rot-mnist", {"tasks": 2, "train_limit": 1000}),
        ("mnist-360", {}),
    ],
)
def test_steps_are_those_of_the_benchmark(benchmark, changes):
    config = RunConfig.preset(benchmark, "mse", **changes)
    made = make_benchmark(config, data.data_root(None))
    order = torch.Generator()
    sizes = [len(task.train().labels) for task in made.tasks]
    steps = config.epochs * sum(len(list(made.batches(size, config.batch_size, order))) for size in sizes)
    assert steps_of(config) == pytest.approx(steps, rel=0.02)


def test_the_speeds_are_those_that_were_measured():
    script = runpy.run_path(str(ROOT / "scripts" / "speeds.py"))
    for file, made in (("FILE", "speeds"), ("TOLD", "told")):
        assert json.loads(script[file].read_text("utf-8")) == script[made](), "run `make speeds`"


@pytest.mark.parametrize("file", ["rot-mnist/mse-200-seed0", "rot-mnist/sgd-seed0", "mnist-360/mse-200-seed0"])
def test_what_is_expected_is_near_what_was_measured(file):
    """Within a factor of two: it tells minutes from hours and days."""
    found = json.loads((ROOT / "results" / f"{file}.json").read_text("utf-8"))
    config = RunConfig.preset(found["benchmark"], found["method"], buffer_size=found["buffer_size"])
    assert steps_of(config) == pytest.approx(found["timing"]["steps"], rel=0.02)
    assert 0.5 < expected_seconds(config, "cpu") / found["seconds"] < 2


def test_nothing_is_known_of_other_benchmarks_and_devices():
    config = RunConfig.preset("rot-mnist", "mse")
    assert expected_seconds(config, "tpu") is None
    assert expected_seconds(config.change(benchmark="elsewhere"), "cpu") is None
