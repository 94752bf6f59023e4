"""benchmarks/long_runs.py: what it reads after each of the last steps."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.bench import made_up
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.models import MODELS
from holdfast.training import run

FILE = Path(__file__).parents[1] / "benchmarks" / "long_runs.py"


@pytest.fixture
def script():
    specification = importlib.util.spec_from_file_location("long_runs", FILE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    yield module
    del MODELS._entries["narrow"]


def with_few_tests(task):
    return replace(task, test=ImageSet(*(part[:100] for part in task.test)))


@pytest.mark.parametrize("tail", [1, 3])
def test_reading_accuracy_in_between_changes_nothing(script, monkeypatch, tmp_path, tail):
    config = RunConfig.preset("seq-cifar10", "linf", buffer_size=40).change(
        tasks=2, model="narrow", epochs=2, batch_size=8, train_limit=20, precision="float32"
    )
    made = made_up(config, samples=config.train_limit)
    data = replace(made, tasks=tuple(map(with_few_tests, made.tasks)))
    monkeypatch.setattr(script, "make_benchmark", lambda config, root, device: data)
    monkeypatch.setattr(script, "TAIL", tail)
    line, plain = script.long_run(config, tmp_path), run(config, benchmark=data, device="cpu")
    assert line["accuracy"] == round(plain.accuracy, 3)
    assert line["task_il_accuracy"] == round(plain.task_il_accuracy, 3)
    assert (len(line["tail"]), line["tail"][-1]) == (tail, round(plain.accuracy, 2))
    assert (line["mean_of_last_10_steps"] == line["accuracy"]) == (tail == 1)
    assert line["fingerprint"] == config.fingerprint
