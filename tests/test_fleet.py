from functools import cache

import pytest
import torch

from fleets import run_fleet
from holdfast.config import RunConfig
from holdfast.learners import LEARNERS
from holdfast.models import MODELS
from holdfast.results import RunResult
from holdfast.training import run


def short(method: str, **changes) -> RunConfig:
    return RunConfig.preset("rot-mnist", method, buffer_size=50, tasks=2, train_limit=400, **changes)


@pytest.fixture(autouse=True)
def _few_digits(few_digits):
    """Of which each run is tested on 200 in place of 10,000."""


@cache
def alone(config: RunConfig) -> RunResult:
    return run(config, device="cpu")


@pytest.fixture
def every_step(monkeypatch):
    """Runs report every step."""
    monkeypatch.setattr("holdfast.sweep.runner.REPORT", -1.0)


@pytest.mark.parametrize("size", [1, 2, 3, None])
def test_each_run_of_a_fleet_gives_what_it_gives_alone(tmp_path, size):
    check_fleet([short("sgd"), short("er", seed=1), short("mse")], tmp_path, size)


def test_every_method_gives_in_a_fleet_what_it_gives_alone(tmp_path):
    check_fleet([short(name) for name in LEARNERS if name != "consistency"], tmp_path, None)


def check_fleet(configs: list[RunConfig], out, size: int | None) -> None:
    moved = set()

    def watch(_runner, event):
        if event.kind == "moved":
            moved.add(event.config)

    found = run_fleet(configs, out, size=size, watch=watch)
    assert found.keys() == moved == set(configs)
    for config, result in found.items():
        expected = alone(config)
        assert torch.equal(result.matrix.nan_to_num(), expected.matrix.nan_to_num())
        assert all(torch.equal(expected.weights[name], tensor) for name, tensor in result.weights.items())


class Forgetful(torch.nn.Sequential):
    """Dropout draws from PyTorch's global generator, which all runs of a process share."""

    def __init__(self, shape, classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(784, classes))


def test_runs_of_a_fleet_do_not_take_each_others_random_numbers(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS._entries, "forgetful", Forgetful)
    configs = [short("er", model="forgetful", seed=seed, batch_size=8) for seed in range(2)]
    for config, result in run_fleet(configs, tmp_path, size=2).items():
        expected = run(config, device="cpu")
        assert all(torch.equal(expected.weights[name], tensor) for name, tensor in result.weights.items())


def test_a_run_that_fails_leaves_the_others_untouched(tmp_path):
    bad, unknown, good = short("mse", lr=1e6), short("mse", model="resnet81"), short("er")
    found = run_fleet([bad, unknown, good], tmp_path, size=3)
    assert "no longer finite" in found[bad]
    assert "resnet81" in found[unknown]
    assert found[good].accuracy == alone(good).accuracy


def test_an_empty_fleet_ends_at_once(tmp_path):
    assert run_fleet([], tmp_path) == {}


def test_a_fleet_that_is_stopped_writes_all_states_and_continues(tmp_path, every_step):
    configs, seen = [short("er", seed=1), short("mse"), short("sgd")], []

    def stop(runner, event):
        if event.kind == "moved":
            seen.append(event.fraction)
            if len(seen) == 5:  # the third step of the first run, the second of the other
                runner.request_stop()

    with pytest.raises(KeyboardInterrupt):
        run_fleet(configs, tmp_path, size=2, watch=stop)
    saved = {path.stem for path in (tmp_path / ".checkpoints").iterdir()}
    assert saved == {config.fingerprint for config in configs[:2]}

    first = {}

    def watch(_runner, event):
        if event.kind == "moved":
            first.setdefault(event.config, event.fraction)

    for config, result in run_fleet(configs, tmp_path, size=2, watch=watch).items():
        expected = alone(config)
        assert all(torch.equal(expected.weights[name], tensor) for name, tensor in result.weights.items())
    # Four steps are one of the two tasks.
    assert [first[config] for config in configs] == [4 / 8, 4 / 8, 1 / 8]


def test_a_fleet_starts_no_run_once_it_is_stopped(tmp_path):
    started = []

    def stop(runner, event):
        if event.kind == "started":
            started.append(event.config)
            runner.request_stop()

    with pytest.raises(KeyboardInterrupt):
        run_fleet([short("er"), short("mse")], tmp_path, size=2, watch=stop)
    assert started == [short("er")]
    assert {path.stem for path in (tmp_path / ".checkpoints").iterdir()} == {short("er").fingerprint}


def test_ctrl_c_in_the_middle_of_a_step_ends_the_fleet_at_once(tmp_path):
    def press(_runner, event):
        if event.kind == "moved":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fleet([short("er"), short("mse")], tmp_path, size=2, watch=press)
    assert not (tmp_path / ".checkpoints").exists()
