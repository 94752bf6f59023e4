"""The presets of the field: every setting is known to its learner, and published values are where they belong."""

import pytest
import torch

from holdfast.benchmarks import BENCHMARKS
from holdfast.config import RunConfig
from holdfast.learners import LEARNERS, Parts, make_learner, settings_of
from learners.conftest import network


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("method", [name for name in LEARNERS if name != "consistency"])
@pytest.mark.parametrize("buffer_size", [200, 500, 5120])
def test_a_learner_takes_all_settings_of_its_presets(benchmark, method, buffer_size):
    model = network("mlp", torch.float32)
    parts = Parts(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda x: x, torch.Generator())
    config = RunConfig.preset(benchmark, method, buffer_size=buffer_size)
    learner = make_learner(config, parts)
    assert type(learner) is LEARNERS[method]
    for name, value in config.settings:
        # The setting `teacher` of ballast is a decay; the teacher itself is a network.
        name = "teacher_decay" if name == "teacher" else name
        assert getattr(learner, name, value) == value


# lr, batch size, replay size, what else: the best values in the code of CLS-ER's and ESMER's authors.
PUBLISHED = {
    ("rot-mnist", "der", 200): (0.2, 128, 128, {"beta": 1.0}),
    ("rot-mnist", "der", 500): (0.2, 128, 128, {"beta": 0.5}),
    ("seq-mnist", "der", 500): (0.03, 10, 128, {"beta": 1.0}),
    ("seq-cifar10", "der", 500): (0.03, 32, 32, {"beta": 0.3}),
    ("mnist-360", "der", 200): (0.1, 16, 64, {"beta": 0.5}),
    ("mnist-360", "der", 1000): (0.1, 8, 16, {"beta": 0.5}),
    ("seq-tinyimagenet", "der", 5120): (0.03, 32, 32, {"beta": 0.1}),
    ("rot-mnist", "fdr", 500): (0.2, 128, 128, {"beta": 0.3}),
    ("seq-mnist", "fdr", 200): (0.03, 128, 128, {"beta": 0.5}),
    ("seq-cifar10", "fdr", 500): (0.03, 32, 32, {"beta": 1.0}),
    ("rot-mnist", "gem", 200): (0.01, 128, None, {}),
    ("seq-mnist", "gem", 200): (0.01, 10, None, {"margin": 1.0}),
    ("seq-cifar10", "gem", 500): (0.03, 32, None, {}),
    ("rot-mnist", "agem", 500): (0.3, 128, 128, {}),
    ("seq-cifar10", "agem", 200): (0.03, 32, 32, {}),
    ("mnist-360", "agem", 500): (0.1, 16, 128, {}),
    ("seq-mnist", "icarl", 200): (0.1, 10, None, {}),
    ("seq-cifar10", "icarl", 500): (0.1, 32, None, {"weight_decay": 2e-5}),
    ("seq-cifar10", "icarl", 5120): (0.03, 32, None, {"weight_decay": 2e-5}),
    ("rot-mnist", "ewc", None): (0.1, 128, None, {"strength": 0.7}),
    ("seq-mnist", "ewc", None): (0.03, 10, None, {"strength": 90.0}),
    ("seq-cifar10", "ewc", None): (0.03, 32, None, {"strength": 10.0}),
    ("rot-mnist", "si", None): (0.1, 128, None, {}),
    ("seq-mnist", "si", None): (0.1, 10, None, {"damping": 0.9}),
    ("seq-cifar10", "si", None): (0.03, 32, None, {"strength": 0.5}),
    ("seq-cifar10", "lwf", None): (0.01, 32, None, {"weight_decay": 0.001, "distillation": 3.0}),
    ("seq-cifar10", "clser", 200): (0.1, 32, 32, {"consistency": 0.15, "stable_rate": 0.1, "plastic_rate": 0.3}),
    ("mnist-360", "clser", 500): (0.2, 16, 32, {"consistency": 1.25, "stable_decay": 0.99, "stable_rate": 0.9}),
    ("seq-cifar10", "esmer", 200): (0.03, 32, 32, {"consistency": 0.15, "rate": 0.1, "loss_margin": 1.2}),
    ("seq-cifar100", "er-ace", 500): (0.03, 32, 32, {}),
    ("seq-cifar10", "dualnet", 200): (0.03, 32, 32, {}),
}


@pytest.mark.parametrize(("benchmark", "method", "buffer_size"), PUBLISHED)
def test_published_values(benchmark, method, buffer_size):
    lr, batch, replay, others = PUBLISHED[benchmark, method, buffer_size]
    config = RunConfig.preset(benchmark, method, buffer_size=buffer_size)
    assert (config.lr, config.batch_size, config.buffer_size) == (lr, batch, buffer_size)
    assert replay in (None, config.replay_size)
    found = {**config.to_dict(), **dict(config.settings)}
    for name, value in others.items():
        assert found[name] == value


def test_the_defaults_of_dualnet_are_its_authors_values():
    defaults = {name: each.default for name, each in settings_of(LEARNERS["dualnet"]).items() if name != "replay_size"}
    assert defaults == {
        "distillation": 10.0,
        "temperature": 2.0,
        "slow_lr": 3e-4,
        "slow_steps": 2,
        "slow_size": 32,
        "lookahead": 0.05,
    }
