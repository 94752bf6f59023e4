"""What a user sees of the package: names, help, how objects show themselves, CPU threads."""

import inspect
import re
from typing import get_type_hints

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.learners.options import Options, ReplayOptions


def test_dir_shows_the_api_and_nothing_else():
    shown = {name for name in dir(hf) if not name.startswith("_")}
    assert shown == set(hf.__all__)
    assert all(hasattr(hf, name) for name in shown)
    assert [name for name in shown if inspect.ismodule(getattr(hf, name))] == ["analysis"]


@pytest.mark.parametrize("name", list(hf.LEARNERS))
def test_help_says_of_every_argument_what_it_means_and_its_default(name):
    learner = hf.LEARNERS[name]
    text = inspect.getdoc(learner)
    told = dict(re.findall(r"^- ([a-z_, 0-9]+): (.*(?:\n    .*)*)", text, re.MULTILINE))
    told = {each: meaning for names, meaning in told.items() for each in names.split(", ")}
    own = [each.name for each in inspect.signature(learner).parameters.values() if each.kind is each.KEYWORD_ONLY]
    kinds = ReplayOptions if learner.needs_buffer else Options
    shared = get_type_hints(kinds).keys() - {"network", "buffer_size", "generator"}  # these have no default
    for argument in {*own, *shared}:
        assert argument in told, f"{name} does not explain {argument}"
        assert "efault" in told[argument], f"{name} does not say the default of {argument}"


def test_learners_and_buffers_show_themselves():
    model = nn.Linear(4, 3)
    learner = hf.ConsistencyReplay(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20)
    for _ in range(3):
        learner.observe(torch.randn(8, 4), torch.randint(0, 3, (8,)))
    assert repr(learner) == "ConsistencyReplay(Linear, SGD, 20 of 20 samples stored)"
    assert repr(learner.buffer) == "Reservoir(20 of 20 samples stored, 24 offered)"
    assert len(learner.buffer) == 20


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_small_network_gets_one_thread_and_a_large_one_keeps_its_own(two_threads):
    network = nn.Sequential(nn.Linear(784, 1000), nn.BatchNorm1d(1000), nn.Dropout(), nn.Linear(1000, 10))
    state, drawn = {name: each.clone() for name, each in network.state_dict().items()}, torch.get_rng_state()
    operations = 2 * (784 * 1000 + 1000 * 10)  # of one sample
    assert hf.choose_threads(network, torch.zeros(100_000_000 // operations + 1, 784)) == torch.get_num_threads() == 2
    assert hf.choose_threads(network, torch.zeros(100_000_000 // operations, 784)) == torch.get_num_threads() == 1
    assert network.training
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(each, state[name]) for name, each in network.state_dict().items())


def test_a_network_on_another_device_changes_nothing(two_threads):
    assert hf.choose_threads(nn.Linear(2, 2, device="meta"), torch.zeros(1, 2)) == 2
