"""A step taken apart: methods that change gradients insist on doing so."""

import copy
import pickle

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.learners import LEARNERS, ExperienceReplay, Losses
from learners.conftest import CLASSES, network, stream

CHANGE = ["agem", "gem", "si"]


def made(name):
    model, kind = network("mlp"), LEARNERS[name]
    given = {"buffer_size": 20} if kind.needs_buffer else {}
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


@pytest.mark.parametrize("name", CHANGE)
def test_their_own_backward_pass_is_needed(name):
    learner, alike, by_hand = made(name), made(name), made(name)
    for step, (x, y) in enumerate(stream(6)):
        learner.observe(x, y)
        losses = alike.losses(x, y)
        alike.descend(losses)
        alike.commit(losses)
        if step == 2 and learner.needs_boundaries:
            for each in (learner, alike):
                each.end_task(x, y)
    for mine, theirs in zip(learner.model.parameters(), alike.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    losses = by_hand.losses(x, y)
    losses.total.backward()
    by_hand.optimizer.step()
    with pytest.raises(UsageError, match="changes gradients: use observe"):
        by_hand.commit(losses)


@pytest.mark.parametrize("name", [name for name in LEARNERS if name not in CHANGE and name != "dualnet"])
def test_all_others_take_any_backward_pass(name):
    learner, by_hand = made(name), made(name)
    assert type(learner).backward is type(by_hand).backward
    for each in (learner, by_hand):
        each.begin_task(tuple(range(CLASSES)))
    for x, y in stream(5):
        learner.observe(x, y)
        losses = by_hand.losses(x, y)
        by_hand.optimizer.zero_grad()
        losses.total.backward()
        by_hand.optimizer.step()
        by_hand.commit(losses)
    for mine, theirs in zip(learner.model.parameters(), by_hand.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_accumulation_over_a_head_that_grows():
    """The first minibatch's gradient is kept, and its logits are stored as wide as the others."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = LEARNERS["consistency"](model, optimizer, buffer_size=40, regularizer="mse", head="2")
    draw = torch.Generator().manual_seed(0)

    def minibatch(first):
        x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
        return x, first + torch.randint(0, 2, (8,), generator=draw)

    learner.observe(*minibatch(0))
    optimizer.zero_grad()
    pending = [learner.losses(*minibatch(0))]
    pending[0].total.backward()
    first = model[2].weight.grad.clone()
    pending.append(learner.losses(*minibatch(2)))
    assert torch.equal(model[2].weight.grad, torch.cat([first, torch.zeros(2, 8, dtype=torch.float64)]))
    pending[1].total.backward()
    optimizer.step()
    lowest = pending[0].offer.logits.amin(1)
    for losses in pending:
        learner.commit(losses)
    stored = learner.buffer.contents().logits
    assert stored.shape == (24, 4)
    torch.testing.assert_close(stored[8:16, 2:], (lowest - 1)[:, None].expand(-1, 2))


@pytest.mark.parametrize("bias", [True, False])
def test_losses_whose_backward_pass_comes_after_the_head_has_grown(bias):
    """Several times in between: the gradient is that of backward passes in between."""
    draw = torch.Generator().manual_seed(0)
    minibatches = [(torch.randn(8, 6, generator=draw, dtype=torch.float64), torch.arange(8) % n) for n in (2, 4, 5, 5)]
    gradients = []
    for together in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2, bias)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        learner = LEARNERS["er"](model, optimizer, buffer_size=40, head="2")
        pending = []
        for minibatch in minibatches:
            pending.append(learner.losses(*minibatch))
            if not together:
                pending[-1].total.backward()
        if together:
            sum(losses.total for losses in pending).backward()
        assert model[2].out_features == 5
        gradients.append([each.grad for each in model.parameters()])
    for apart, together in zip(*gradients, strict=True):
        torch.testing.assert_close(together, apart)


def test_a_frozen_head_grows_without_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    model[2].requires_grad_(False)
    learner = LEARNERS["er"](model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=40, head="2")
    pending = [learner.losses(torch.randn(8, 6), torch.arange(8) % n) for n in (2, 4)]
    sum(losses.total for losses in pending).backward()
    assert model[2].weight.grad is None
    assert model[0].weight.grad is not None


def test_losses_can_be_copied():
    losses = Losses(torch.tensor(3.0), replay=torch.tensor(1.0))
    for made_again in (copy.copy(losses), copy.deepcopy(losses), pickle.loads(pickle.dumps(losses))):
        assert made_again == losses
        assert made_again.current == 0


def test_a_scheduler_of_another_optimiser_is_refused():
    model = network("mlp")
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(UsageError, match="made for another optimiser"):
        ExperienceReplay(model, mine, buffer_size=9, scheduler=torch.optim.lr_scheduler.StepLR(other, 1))
