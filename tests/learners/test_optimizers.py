"""The optimisers of runs against torch's own, and schedules against their formulas."""

import copy
import math

import pytest
import torch
from torch import nn

from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners import FadingRate, PlainSgd, make_optimizer
from holdfast.learners.optimizers import MomentumSgd, clip_gradients
from holdfast.rng import generator


def test_plain_sgd_is_torch_sgd():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    unused = nn.Parameter(torch.ones(3))
    other = copy.deepcopy(model)
    ours = PlainSgd([*model.parameters(), unused], lr=0.3)
    theirs = torch.optim.SGD(other.parameters(), lr=0.3)
    x = torch.randn(16, 4, generator=generator(0, "x"))
    for _ in range(5):
        for network, optimizer in ((model, ours), (other, theirs)):
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()
    for mine, yours in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, yours)
    assert torch.equal(unused, torch.ones(3))


def train(model, optimizer, schedule=None, steps=6):
    x = torch.randn(16, 4, generator=generator(0, "x"))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def config(**changes):
    return RunConfig.preset("rot-mnist", "er", lr=0.1, **changes)


@pytest.mark.parametrize(
    ("changes", "torchs"),
    [
        ({}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ({"weight_decay": 0.01}, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01)),
        (
            {"momentum": 0.5, "weight_decay": 0.1},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1),
        ),
        ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, lr=0.1)),
        ({"optimizer": "adamw", "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
    ],
)
def test_the_optimiser_of_a_run_is_torchs(changes, torchs):
    ours, theirs = network(), network()
    optimizer, schedule = make_optimizer(config(**changes), ours, torch.device("cpu"))
    assert schedule is None
    train(ours, optimizer)
    train(theirs, torchs(theirs.parameters()))
    for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, yours)


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9}, {"optimizer": "adam"}])
@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_a_falling_rate(changes, shape):
    """Against torch's optimiser with the rate set by hand, twice through: the schedule begins anew with every task."""
    ours, theirs = network(), network()
    optimizer, schedule = make_optimizer(config(schedule=shape, **changes), ours, torch.device("cpu"))
    kind = torch.optim.Adam if "optimizer" in changes else torch.optim.SGD
    reference = kind(theirs.parameters(), lr=0.1, **{k: v for k, v in changes.items() if k == "momentum"})
    for _ in range(2):
        schedule.restart(5)
        train(ours, optimizer, schedule, steps=5)
        for step in range(5):
            share = step / 5
            left = (1 + math.cos(math.pi * share)) / 2 if shape == "cosine" else 1 - share
            reference.param_groups[0]["lr"] = 0.1 * left
            train(theirs, reference, steps=1)
    for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-5, atol=1e-6)


def test_a_schedule_continues_in_place():
    lr = torch.tensor(0.5)
    one, other = FadingRate(lr, "linear"), FadingRate(torch.tensor(0.5), "linear")
    one.restart(4)
    one.step()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for each in (one, other):
        each.step()
    assert other.lr.item() == one.lr.item() == pytest.approx(0.25)


def test_momentum_continues_in_place():
    model, twin = network(), network()
    optimizers = [MomentumSgd(each.parameters(), 0.1, 0.9, 0.0) for each in (model, twin)]
    train(model, optimizers[0], steps=3)
    twin.load_state_dict(model.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    train(model, optimizers[0], steps=2)
    train(twin, optimizers[1], steps=2)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("limit", [1e-3, 0.5, 1e3])
def test_clipping_is_torchs(limit):
    model, other = network(), network()
    x = torch.randn(16, 4, generator=generator(0, "x"))
    for each in (model, other):
        each(x).square().mean().backward()
    clip_gradients([each.grad for each in model.parameters()], limit)
    nn.utils.clip_grad_norm_(other.parameters(), limit)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("limit", [0.1, 1e3])
def test_clipping_sparse_gradients_is_that_of_dense_ones(limit):
    rows, found = torch.tensor([[1, 1, 4], [2, 1, 0]]), []  # some of them several times
    for sparse in (False, True):
        model = nn.Sequential(nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 2))
        model.load_state_dict({name: torch.ones_like(each) for name, each in model.state_dict().items()})
        model(rows).square().mean().backward()
        clip_gradients([each.grad for each in model.parameters()], limit)
        found.append([each.grad.to_dense() for each in model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": "sdg"}, "unknown optimizer 'sdg': did you mean 'sgd'"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin': did you mean 'cosine'"),
        ({"momentum": -1}, "momentum must be a finite number of at least 0"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum belongs to sgd"),
    ],
)
def test_what_a_run_cannot_choose(changes, says):
    with pytest.raises(UsageError, match=says):
        config(**changes)


def test_defaults_are_not_part_of_a_fingerprint():
    """A setting that is added later never changes what an old config is called."""
    assert config().fingerprint == "521da3349ce971a7"
    assert config(momentum=0.9).fingerprint != config().fingerprint
