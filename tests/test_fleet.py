from functools import cache

import pytest
import torch

from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.fleet import run_fleet
from holdfast.learners import LEARNERS
from holdfast.models import MODELS
from holdfast.results import RunResult
from holdfast.run_state import Checkpointer
from holdfast.training import run


def short(method: str, **changes) -> RunConfig:
    return RunConfig.preset("rot-mnist", method, buffer_size=50, tasks=2, train_limit=400, **changes)


@cache
def alone(config: RunConfig) -> RunResult:
    return run(config, device="cpu")


@pytest.mark.parametrize("size", [1, 2, 3, None])
def test_each_run_of_a_fleet_gives_what_it_gives_alone(size):
    check_fleet([short("sgd"), short("er", seed=1), short("mse")], size)


def test_every_method_gives_in_a_fleet_what_it_gives_alone():
    check_fleet([short(name) for name in LEARNERS if name != "consistency"], None)


def check_fleet(configs: list[RunConfig], size: int | None) -> None:
    steps = []
    outcomes = list(run_fleet(configs, size=size, device="cpu", on_step=lambda progress: steps.append(progress.config)))
    assert {outcome.config for outcome in outcomes} == set(configs)
    assert set(steps) == set(configs)
    for outcome in outcomes:
        expected = alone(outcome.config)
        assert outcome.error is None
        assert torch.equal(outcome.result.matrix.nan_to_num(), expected.matrix.nan_to_num())
        assert all(torch.equal(expected.weights[name], tensor) for name, tensor in outcome.result.weights.items())


class Forgetful(torch.nn.Sequential):
    """Dropout draws from PyTorch's global generator, which all runs of a process share."""

    def __init__(self, shape, classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(784, classes))


def test_runs_of_a_fleet_do_not_take_each_others_random_numbers(monkeypatch):
    monkeypatch.setitem(MODELS._entries, "forgetful", Forgetful)
    configs = [short("er", model="forgetful", seed=seed, batch_size=8) for seed in range(2)]
    for outcome in run_fleet(configs, size=2, device="cpu"):
        expected = run(outcome.config, device="cpu")
        assert all(torch.equal(expected.weights[name], tensor) for name, tensor in outcome.result.weights.items())


def test_a_run_that_fails_leaves_the_others_untouched():
    bad, unknown, good = short("mse", lr=1e6), short("mse", model="resnet81"), short("er")
    outcomes = {outcome.config: outcome for outcome in run_fleet([bad, unknown, good], size=3, device="cpu")}
    assert "no longer finite" in str(outcomes[bad].error)
    assert isinstance(outcomes[unknown].error, UsageError)
    assert outcomes[good].result.accuracy == alone(good).accuracy


def test_an_empty_fleet_ends_at_once():
    assert list(run_fleet([], device="cpu")) == []


def test_a_fleet_that_is_stopped_writes_all_states_and_continues(tmp_path):
    configs, made, steps = [short("er", seed=1), short("mse"), short("sgd")], [], []

    def checkpointer(config, device):
        made.append(Checkpointer(tmp_path / config.fingerprint, config, device))
        return made[-1]

    def stop(progress):
        if progress.step == 3:
            for each in made:
                each.request_stop()

    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        list(run_fleet(configs, size=2, device="cpu", on_step=stop, make_checkpointer=checkpointer))
    assert {path.name for path in tmp_path.iterdir()} == {config.fingerprint for config in configs[:2]}
    for outcome in run_fleet(
        configs,
        size=2,
        device="cpu",
        on_step=lambda progress: steps.append((progress.config, progress.step)),
        make_checkpointer=checkpointer,
    ):
        expected = alone(outcome.config)
        assert all(torch.equal(expected.weights[name], tensor) for name, tensor in outcome.result.weights.items())
    assert [min(step for config, step in steps if config == each) for each in configs] == [4, 4, 1]


def test_ctrl_c_in_the_middle_of_a_step_ends_the_fleet_at_once():
    def press(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_fleet([short("er"), short("mse")], size=2, device="cpu", on_step=press))
