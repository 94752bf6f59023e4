"""Learners that forget stored samples, and buffers with other policies."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import StorageError, UsageError

from .conftest import stream


def make(kind=hf.ConsistencyReplay, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 10)).double()
    model(next(iter(stream(1)))[0])
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"buffer_size": 20, **options})


@pytest.mark.parametrize("kind", [hf.ConsistencyReplay, hf.ExperienceReplay])
def test_forgotten_samples_are_gone_and_learning_goes_on(kind, tmp_path):
    learner = make(kind)
    for x, y in stream(6):
        learner.observe(x, y)
    label = int(learner.buffer.contents().y[0])
    count = int((learner.buffer.contents().y == label).sum())
    assert learner.forget(lambda stored: stored.y == label) == count > 0
    assert learner.buffer.stored == 20 - count
    assert not (learner.buffer.contents().y == label).any()
    learner.save(tmp_path / "learner")
    twin = make(kind, seed=1)
    twin.load(tmp_path / "learner")
    for x, y in stream(5, seed=1):
        assert learner.observe(x, y) == twin.observe(x, y)
    learner.forget_all()
    assert learner.buffer.stored == 0
    losses = learner.observe(*next(iter(stream(1))))
    assert losses.replay == 0
    assert learner.buffer.stored == 8


@pytest.mark.parametrize("policy", ["window", "decay", "decay:64"])
def test_the_policy_is_an_option_and_saved(policy, tmp_path):
    learner = make(buffer_policy=policy, storage=tmp_path / "folder")
    for x, y in stream(6):
        learner.observe(x, y)
    if policy == "window":
        recent = torch.cat([x for x, _ in stream(6)])[-20:]
        assert {tuple(x.flatten().tolist()) for x in learner.buffer.contents().x} == {
            tuple(x.flatten().tolist()) for x in recent
        }
    learner.save(tmp_path / "learner")
    learner.buffer.close()
    with pytest.raises(UsageError, match="has the policy"):
        make(storage=tmp_path / "folder")
    twin = make(buffer_policy=policy, storage=tmp_path / "folder")
    twin.load(tmp_path / "learner")
    assert twin.buffer.stored == 20


def test_memory_that_cannot_be_had_is_noticed_before_the_first_step():
    """With the reserve after the step, the weights would have moved."""
    learner = make(buffer_size=10**13)
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    with pytest.raises(StorageError, match="smaller buffer"):
        learner.observe(*next(iter(stream(1))))
    assert all(torch.equal(value, before[name]) for name, value in learner.model.state_dict().items())
    assert learner.buffer.stored == 0


def test_room_may_be_taken_after_the_backward_pass_and_its_lack_still_undoes_the_step():
    """A backward pass keeps a GPU busy while the host copies samples."""
    x, y = next(iter(stream(1)))
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(x[0].numel()), nn.Linear(x[0].numel(), 10)).to(x.dtype)
    learner = hf.ConsistencyReplay(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=10**13)
    before, state = deepcopy(model.state_dict()), learner.buffer.generator.get_state()
    losses = learner.losses(x, y, reserve=False)
    losses.total.backward()
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    with pytest.raises(StorageError, match="smaller buffer"):
        learner.reserve(losses)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(learner.buffer.generator.get_state(), state)
    assert learner.buffer.stored == 0
