"""The candidates of benchmarks/beyond.py: without ideas the paper's method, and each idea does what it says."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.methods import LEARNERS

FILE = Path(__file__).parents[1] / "benchmarks" / "beyond.py"


@pytest.fixture(scope="module")
def beyond():
    specification = importlib.util.spec_from_file_location("beyond", FILE)
    module = importlib.util.module_from_spec(specification)
    sys.modules["beyond"] = module  # as the learner's settings are found through its module
    specification.loader.exec_module(module)
    yield module
    del LEARNERS._entries["beyond"], sys.modules["beyond"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def stream(steps=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def learn(kind, **settings):
    model = network()
    learner = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20, seed=3, **settings)
    for x, y in stream():
        learner.observe(x, y)
    return learner


def test_without_ideas_it_is_consistency_replay(beyond):
    ours, paper = learn(beyond.Beyond, beta=0.5), learn(hf.ConsistencyReplay, beta=0.5)
    for mine, theirs in zip(ours.model.state_dict().values(), paper.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert ours.evaluated() is ours.model


def test_average_is_the_mean_of_all_networks_at_first(beyond):
    model = network()
    learner = beyond.Beyond(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20, decay=0.999)
    weights = [model[0].weight.detach().clone()]
    for x, y in stream():
        learner.observe(x, y)
        weights.append(model[0].weight.detach().clone())
    # Until the decay limits it, the average of n steps gives each the weight 1 / (n + 1), the beginning included.
    torch.testing.assert_close(learner.evaluated()[0].weight, torch.stack(weights).mean(0))


def test_statistics_of_the_buffer(beyond):
    learner = learn(beyond.Beyond, decay=0.9, statistics="buffer")
    norm = learner.evaluated()[1]
    inputs = learner.average[0](learner.buffer.contents().x)
    torch.testing.assert_close(norm.running_mean, inputs.mean(0))
    torch.testing.assert_close(norm.running_var, inputs.var(0))


def test_asymmetric_minibatch_leaves_absent_classes_alone(beyond):
    learner = learn(beyond.Beyond, asymmetric=True, alpha=0.0, beta=0.0)
    x = torch.randn(4, 6)
    before = learner.model[3].bias.detach().clone()
    learner.observe(x, torch.zeros(4, dtype=torch.int64))
    assert torch.equal(learner.model[3].bias[1:], before[1:])


def test_every_candidate_has_a_config_of_its_own(beyond):
    common = {"benchmark": "seq-cifar10", "buffer_size": 200, "epochs": 5, "seed": 0}
    configs = {name: beyond.config_of(settings, **common) for name, settings in beyond.CANDIDATES.items()}
    assert len(set(configs.values())) == len(configs)
    assert all(config.validation == beyond.VALIDATION for config in configs.values())


def test_target_without_an_average_is_refused(beyond):
    with pytest.raises(hf.UsageError, match="needs an averaged network"):
        learn(beyond.Beyond, target="average")
