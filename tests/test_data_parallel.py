"""benchmarks/data_parallel.py: one network computes what replicas of it on several GPUs would."""

import importlib.util
import sys
from argparse import Namespace
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from holdfast.models import MODELS, ResNet18
from holdfast.models.batchnorm.groups import GroupedForward

FILE = Path(__file__).parents[1] / "benchmarks" / "data_parallel.py"


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("data_parallel", FILE)
    module = importlib.util.module_from_spec(specification)
    sys.modules["data_parallel"] = module
    before = set(MODELS)
    specification.loader.exec_module(module)
    yield module
    for name in set(MODELS) - before:
        del MODELS._entries[name]
    del sys.modules["data_parallel"]


def replicas(model, minibatch, gpus):
    """Copies of `model`, each with its outputs for its part; the first is the model itself, whose buffers remain."""
    outputs = []
    for number, part in enumerate(minibatch.chunk(gpus)):
        replica = model if number == 0 else deepcopy(model)
        for mine, theirs in zip(replica.parameters(), model.parameters(), strict=True):
            mine.data = theirs.data
        outputs.append((replica, replica(part)))
    return outputs


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("sizes", [[8], [8, 8, 8], [8, 6, 8]], ids=str)
def test_it_is_what_replicas_compute(script, gpus, sizes):
    torch.manual_seed(0)
    plain = ResNet18((3, 8, 8), 4, width=8)
    made = script.network(gpus, 8, (3, 8, 8), 4)
    made.load_state_dict(plain.state_dict())
    x, y = torch.randn(sum(sizes), 3, 8, 8), torch.arange(sum(sizes)) % 4

    outputs = torch.cat(GroupedForward(made)(x, sizes))
    F.cross_entropy(outputs, y).backward()

    found, copies = [], []
    for minibatch in x.split(sizes):  # one pass after the other
        for replica, output in replicas(plain, minibatch, gpus):
            found.append(output)
            copies.append(replica)
    F.cross_entropy(torch.cat(found), y).backward()
    torch.testing.assert_close(outputs, torch.cat(found), rtol=1e-4, atol=1e-5)
    for mine, *theirs in zip(made.parameters(), *(c.parameters() for c in dict.fromkeys(copies)), strict=True):
        torch.testing.assert_close(mine.grad, sum(each.grad for each in theirs), rtol=1e-3, atol=1e-5)
    for (name, mine), theirs in zip(made.named_buffers(), plain.buffers(), strict=True):
        if "running" in name:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_every_cell_comes_once_before_any_comes_twice(script):
    given = {"method": ["er"], "buffer_size": [20], "gpus": [1, 2], "seeds": 2, "epochs": 5, "width": 64, "set": []}
    made = script.configs(Namespace(**given))
    names = [(config.model, config.seed) for config in made]
    assert names == [("resnet18", 0), ("resnet18-2-gpus", 0), ("resnet18", 1), ("resnet18-2-gpus", 1)]
    assert {config.epochs for config in made} == {5}
    for name, _ in names:
        assert name in MODELS
