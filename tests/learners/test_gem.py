"""GEM against slow loops; its quadratic program against all sets of active bounds."""

import copy
import itertools
import sys

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.learners import EpisodicGem, gem
from learners.conftest import (
    CLASSES,
    assert_same_state,
    cross_entropies,
    network,
    plain_copy,
    record,
    stream,
    tiny_run,
)


def make(model, lr=0.2, **options) -> EpisodicGem:
    return EpisodicGem(model, torch.optim.SGD(model.parameters(), lr=lr), **{"buffer_size": 12, **options})


def best_weights(gram, products, margin):
    """The minimum over v >= margin: each subset of the v_k is tried at its bound, the others are free."""
    matrix, best = gram + 1e-3 * torch.eye(len(gram), dtype=torch.float64), None
    for bound in itertools.product([True, False], repeat=len(gram)):
        free = [k for k, at_bound in enumerate(bound) if not at_bound]
        v = torch.full((len(gram),), margin, dtype=torch.float64)
        if free:
            rest = [k for k in range(len(gram)) if k not in free]
            right = -products[free] - matrix[free][:, rest] @ v[rest]
            v[free] = torch.linalg.solve(matrix[free][:, free], right)
        if (v < margin - 1e-12).any():
            continue
        value = v @ matrix @ v / 2 + v @ products
        if best is None or value < best[0]:
            best = value, v
    return best[1]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_the_quadratic_program(seed, margin):
    draw = torch.Generator().manual_seed(seed)
    tasks = 1 + seed % 6
    rows = torch.randn(tasks, 8, generator=draw, dtype=torch.float64)
    gram, products = rows @ rows.T, rows @ torch.randn(8, generator=draw, dtype=torch.float64)
    got = gem._weights(gram, products, margin)
    torch.testing.assert_close(got, best_weights(gram, products, margin), rtol=1e-8, atol=1e-10)


def flat(loss, model):
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])


def move(model, gradient, lr):
    places = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * gradient[places : places + parameter.numel()].view_as(parameter)
            places += parameter.numel()


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_twelve_steps_in_three_tasks(kind, margin):
    model = network(kind)
    reference = plain_copy(kind, model)
    learner = make(model, margin=margin)
    record(learner)
    memory, shown, projected = [], [], []
    for step, (x, y) in enumerate(stream(12)):
        losses = learner.observe(x, y)
        loss = cross_entropies(reference(x), y).mean()
        torch.testing.assert_close(losses.total, loss.detach())
        rows = [flat(cross_entropies(reference(xs), ys).mean(), reference) for xs, ys in memory]
        gradient = flat(loss, reference)
        if rows:
            products = torch.stack([sum(a * b for a, b in zip(row, gradient, strict=True)) for row in rows])
            projected.append(bool((products < 0).any()))
            if projected[-1]:
                gram = torch.stack([torch.stack([(one * other).sum() for other in rows]) for one in rows])
                for weight, row in zip(best_weights(gram, products, margin), rows, strict=True):
                    gradient = gradient + weight * row
        move(reference, gradient, 0.2)
        shown.append((x, y))
        if step % 4 == 3:
            task = [torch.cat(parts) for parts in zip(*shown, strict=True)]
            learner.end_task(*task)
            share = 12 // (len(memory) + 1)
            stored = learner.buffer.contents()
            memory = [(xs[:share], ys[:share]) for xs, ys in memory]
            memory.append((stored.x[-share:].clone(), stored.y[-share:].clone()))
            check_memory(learner, memory, task)
            shown = []
    assert any(projected)
    assert kind != "mlp" or not all(projected)
    assert_same_state(model, reference, rtol=1e-8, atol=1e-10)


def check_memory(learner, memory, task):
    """All tasks have the same share, earlier ones their first samples, the last one samples of its own."""
    stored = learner.buffer.contents()
    assert torch.equal(stored.x, torch.cat([x for x, _ in memory]))
    assert torch.equal(stored.y, torch.cat([y for _, y in memory]))
    owners = [number for number, (_, y) in enumerate(memory) for _ in y]
    assert learner.tasks.tolist() == owners + [-1] * (12 - len(owners))
    places = [(task[0] == x).flatten(1).all(1).nonzero().item() for x in memory[-1][0]]
    assert len(set(places)) == len(places)
    assert torch.equal(task[1][places], memory[-1][1])


def test_a_task_of_one_sample_is_refused_by_batchnorm_without_a_trace():
    """The samples of earlier tasks are shown in the backward pass."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()
    learner = make(model, buffer_size=3, augment=lambda x: x + torch.randn(x.shape, dtype=x.dtype))
    x, y = next(stream(1))
    for _ in range(2):
        learner.observe(x, y)
        learner.end_task(x[:2], y[:2])
    before, state = copy.deepcopy(model), torch.get_rng_state()
    with pytest.raises(UsageError, match="BatchNorm cannot learn from a single sample"):
        learner.observe(x, y)
    assert_same_state(model, before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("scale", [100, 1000])
def test_large_gradients_that_are_nearly_the_same(scale):
    """Their products in float32 are rounded by more than what the program adds to the diagonal."""
    draw = torch.Generator().manual_seed(0)
    one, new = scale * torch.randn(2, 500, generator=draw)
    rows = one + 1e-5 * scale * torch.randn(6, 500, generator=draw)
    gradient = new - one
    gram = rows @ rows.T
    assert torch.linalg.eigvalsh(gram.double())[0] < -gem.RIDGE
    weights = gem._weights(gram, rows @ gradient, 0.0)
    projected = gradient + weights.float() @ rows
    cosines = rows @ projected / (rows.norm(dim=1) * projected.norm())
    assert (cosines > -1e-5).all()
    # Nothing is taken away beyond what points against the rows.
    torch.testing.assert_close(projected, gradient - (gradient @ one) / (one @ one) * one, rtol=0, atol=1e-3 * scale)


def test_it_remembers_what_sgd_forgets():
    assert tiny_run("sgd").accuracy < 25
    assert tiny_run("gem").accuracy > 70


def test_what_it_refuses(monkeypatch):
    with pytest.raises(UsageError, match="gem must be told where tasks begin and end, and mnist-360 has no such"):
        hf.run(hf.RunConfig.preset("mnist-360", "gem"), device="cpu")
    with pytest.raises(UsageError, match="margin must be a finite number of at least 0"):
        make(network("mlp"), margin=-0.1)
    learner = make(network("mlp"), buffer_size=1)
    x, y = next(stream(1))
    learner.end_task(x, y)
    with pytest.raises(UsageError, match="a buffer of 1 samples is too small for 2 tasks"):
        learner.end_task(x, y)
    steps = []
    with pytest.raises(UsageError, match="a buffer of 3 samples is too small for 5 tasks"):
        hf.run(hf.RunConfig.preset("seq-mnist", "gem", buffer_size=3), device="cpu", on_step=steps.append)
    assert not steps
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr(gem, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"GEM needs scipy: install the extra 'gem' \(pip install 'holdfast\[gem\]'\)"):
        make(network("mlp"))
