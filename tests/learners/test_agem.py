"""A-GEM against slow loops over the parameters."""

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.learners import AveragedGem, EpisodicGem
from learners.conftest import (
    assert_same_state,
    cross_entropies,
    network,
    plain_copy,
    record,
    stream,
    tiny_run,
)


def agem(model, lr=0.1, **options) -> AveragedGem:
    return AveragedGem(model, torch.optim.SGD(model.parameters(), lr=lr), **options)


def flat(loss, model):
    """The gradient as a list of numbers."""
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [number for gradient in gradients for number in gradient.flatten().tolist()]


def move(model, gradient, lr):
    numbers = iter(gradient)
    with torch.no_grad():
        for parameter in model.parameters():
            values = [next(numbers) for _ in range(parameter.numel())]
            parameter -= lr * torch.tensor(values, dtype=parameter.dtype).view_as(parameter)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("replay_size", [5, None])
def test_ten_steps(kind, replay_size):
    model = network(kind)
    reference = plain_copy(kind, model)
    learner = agem(model, lr=0.5, buffer_size=20, replay_size=replay_size)
    buffer, against = record(learner), []
    for step, (x, y) in enumerate(stream(10)):
        losses = learner.observe(x, y)
        assert len(buffer.draws) == step  # one draw a step, none from an empty buffer
        loss = cross_entropies(reference(x), y).mean()
        gradient = flat(loss, reference)
        if step:
            drawn = buffer.draws[-1]
            assert len(drawn.y) == min(replay_size or 8, 8 * step, 20)
            replay = cross_entropies(reference(drawn.x), drawn.y).mean()
            stored = flat(replay, reference)
            product = sum(g * r for g, r in zip(gradient, stored, strict=True))
            against.append(product < 0)
            if product < 0:
                scale = product / sum(r * r for r in stored)
                gradient = [g - scale * r for g, r in zip(gradient, stored, strict=True)]
                assert abs(sum(g * r for g, r in zip(gradient, stored, strict=True))) < 1e-9
            torch.testing.assert_close(losses.replay, replay.detach())
        torch.testing.assert_close(losses.total, loss.detach())  # the draw is a limit, not a part of the loss
        torch.testing.assert_close(losses.current, loss.detach())
        move(reference, gradient, 0.5)
    assert any(against)
    assert not all(against)
    assert_same_state(model, reference, rtol=1e-9, atol=1e-11)


def test_frozen_layers_stay_as_they_are():
    model = network("batchnorm")
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    learner = agem(model, lr=0.5, buffer_size=20)
    for x, y in stream(6):
        learner.observe(x, y)
    assert torch.equal(model[0].weight, before)


def test_the_buffer_gets_inputs_as_they_came_without_logits():
    learner = agem(network("mlp"), buffer_size=20, augment=lambda x: 3 * x + 1)
    buffer = record(learner)
    for x, y in stream(3):
        learner.observe(x, y)
        assert torch.equal(buffer.offers[-1][0], x)
        assert torch.equal(buffer.offers[-1][1], y)
        assert buffer.offers[-1][2] is None
    assert learner.evaluated() is learner.model


def test_it_remembers_within_tasks_what_sgd_forgets():
    """Over all classes it remembers little, as published."""
    assert tiny_run("sgd").task_il_accuracy < 88
    assert tiny_run("agem").task_il_accuracy > 92


@pytest.mark.parametrize("kind", [AveragedGem, EpisodicGem])
@pytest.mark.parametrize("seed", range(8))
def test_gradients_of_different_parts_of_the_network(kind, seed):
    """A head for each domain: the minibatch uses one, stored samples the other."""
    torch.manual_seed(seed)
    model = Domains()
    learner = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=16)
    learner.observe(*of_domain(0))
    if kind is EpisodicGem:
        learner.end_task(*of_domain(0))
    (x, y), stored = of_domain(1), learner.buffer.contents()  # a draw has all of them, in some order
    parameters = list(model.parameters())

    def slopes(x, y):
        loss = cross_entropies(model(x), y).mean()
        return torch.cat(
            [
                each.flatten()
                for each in torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            ]
        )

    mine, theirs = slopes(x, y), slopes(stored.x, stored.y)
    product, square = float(mine @ theirs), float(theirs @ theirs)
    if product < 0 and kind is AveragedGem:
        mine = mine - product / square * theirs
    elif product < 0:
        mine = mine + max(0.5, -product / (square + 1e-3)) * theirs
    wanted = torch.cat([each.detach().flatten() for each in parameters]) - 0.1 * mine
    learner.observe(x, y)
    torch.testing.assert_close(torch.cat([each.detach().flatten() for each in parameters]), wanted)


class Domains(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(8, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        return self.heads[int(x[0, 6])](self.body(x[:, :6]).relu())


def of_domain(number, count=16):
    x = torch.randn(count, 6, dtype=torch.float64)
    return torch.cat([x, torch.full((count, 1), number, dtype=torch.float64)], 1), torch.randint(0, 3, (count,))


@pytest.mark.parametrize("options", [{"replay_size": 0}, {"replay_size": -3}])
def test_settings_out_of_range(options):
    with pytest.raises(UsageError, match="replay_size must be at least 1"):
        agem(network("mlp"), buffer_size=5, **options)
