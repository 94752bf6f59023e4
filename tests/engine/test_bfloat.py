"""The bfloat16 twin against autocast, and networks that are not all matrices."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from holdfast.augment import CropFlip, Normalize
from holdfast.engine import BfloatTwin
from holdfast.learners import ConsistencyReplay, PlainSgd, Sgd
from holdfast.models import ResNet18, group_batchnorm
from holdfast.rng import generator


def small_learner(twinned: bool, decay: float) -> ConsistencyReplay:
    torch.manual_seed(0)
    model = group_batchnorm(ResNet18((3, 8, 8), 10, width=4))
    view = CropFlip(Normalize((0.5,) * 3, (0.2,) * 3), generator(0, "augment"), padding=2)
    optimizer = BfloatTwin(model, 0.03, decay) if twinned else PlainSgd(model.parameters(), 0.03, decay)
    network = optimizer.network if twinned else None
    options = {"buffer_size": 20, "augment": view, "precision": "bfloat16", "validate": False, "seed": 1}
    return ConsistencyReplay(model, optimizer, network=network, **options)


def batches():
    draw = generator(3, "batches")
    for _ in range(6):
        images = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8, generator=draw)
        yield images, torch.randint(0, 10, (16,), generator=draw)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_twin_gives_what_autocast_gives(decay):
    plain, twinned = small_learner(twinned=False, decay=decay), small_learner(twinned=True, decay=decay)
    for x, y in batches():
        assert plain.observe(x, y).as_dict() == twinned.observe(x, y).as_dict()
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


def sgd(model, **options):
    twin = BfloatTwin(model, 0.1)
    return Sgd(model, twin, network=twin.network, precision="bfloat16", validate=False, **options)


def layers(*, norm: bool, unused: bool = False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm2d(4)] if norm else []
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), *middle, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    )
    if unused:
        model[0].unused = nn.Linear(2, 2)  # a part of the model that no output depends on
    return model


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("unused", [True, False])
def test_layers_without_norms_and_layers_that_are_not_used(norm, unused):
    model, plain = layers(norm=norm, unused=unused), layers(norm=norm, unused=unused)
    learner = sgd(model)
    other = Sgd(plain, PlainSgd(plain.parameters(), 0.1), precision="bfloat16", validate=False)
    for x, y in batches():
        for each in (learner, other):
            each.observe(x.float() / 255, y)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_frozen_layers_stay_as_they_are():
    model = layers(norm=True)
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    learner = sgd(model)
    for x, y in batches():
        learner.observe(x.float() / 255, y)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("limit", [1e-4, 1e-2])
def test_clipping_sees_the_gradients_of_matrices(limit):
    model, plain = layers(norm=True), layers(norm=True)
    learner = sgd(model, clip=limit)
    other = Sgd(plain, PlainSgd(plain.parameters(), 0.1), precision="bfloat16", validate=False, clip=limit)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x, y = next(batches())
    for each in (learner, other):
        each.observe(x.float() / 255, y)
    moved = torch.cat([(old - new).flatten() for old, new in zip(before, model.parameters(), strict=True)])
    assert 0.9 * limit < moved.detach().norm() / 0.1 < 1.1 * limit
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-6)


def test_a_copy_of_the_model_does_not_copy_the_twin():
    model = layers(norm=True)
    twin = BfloatTwin(model, 0.1)
    copied = deepcopy(model)
    copied.load_state_dict({name: value + 1 for name, value in copied.state_dict().items()})
    assert all(torch.equal(master.bfloat16(), each) for master, each in zip(twin.masters, twin.twins, strict=True))
    model.load_state_dict(copied.state_dict())
    assert all(torch.equal(master.bfloat16(), each) for master, each in zip(twin.masters, twin.twins, strict=True))
    assert torch.equal(twin.masters[0], copied[0].weight)
