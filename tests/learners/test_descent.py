"""Plain SGD against torch's own, and the bfloat16 twin against autocast."""

import copy

import pytest
import torch
from torch import nn

from holdfast.augment import CropFlip, Normalize
from holdfast.engine import _compile
from holdfast.learners import BfloatTwin, ConsistencyReplay, Learner, PlainSgd
from holdfast.models import ResNet18, group_batchnorm
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


def small_learner() -> ConsistencyReplay:
    torch.manual_seed(0)
    model = group_batchnorm(ResNet18((3, 8, 8), 10, width=4))
    view = CropFlip(Normalize((0.5,) * 3, (0.2,) * 3), generator(0, "augment"), padding=2)
    optimizer = PlainSgd(model.parameters(), 0.03)
    return ConsistencyReplay(
        model, optimizer, buffer_size=20, augment=view, precision="bfloat16", validate=False, seed=1
    )


def batches():
    draw = generator(3, "batches")
    for _ in range(6):
        images = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8, generator=draw)
        yield images, torch.randint(0, 10, (16,), generator=draw)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, when it is imported
def test_the_twin_gives_what_autocast_gives():
    plain, twinned = small_learner(), small_learner()
    parts = _compile(twinned)
    assert isinstance(twinned.optimizer, BfloatTwin)
    assert {part.name for part in parts} == {"objective", "update", "place", "render"}
    for x, y in batches():
        assert plain.observe(x, y) == twinned.observe(x, y)
    expected, got = plain.model.state_dict(), twinned.model.state_dict()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_the_twin_shares_all_but_the_matrices():
    model = group_batchnorm(ResNet18((3, 8, 8), 10, width=4))
    twin = BfloatTwin(model, 0.1)
    ours, theirs = dict(model.named_parameters()), dict(twin.network.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        is_norm = "bn" in name or "shortcut.1" in name
        assert (parameter is ours[name]) == is_norm
        assert parameter.dtype == (torch.float32 if is_norm else torch.bfloat16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, when it is imported
def test_a_learner_that_names_no_pure_functions_has_only_its_network_compiled():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    (part,) = _compile(Learner(model, PlainSgd(model.parameters(), 0.1)))
    assert (part.name, part.plain) == ("network", model)
