"""Synaptic intelligence against slow loops over the parameters."""

import pytest
import torch

import holdfast as hf
from holdfast.engine import BfloatTwin, accelerate
from holdfast.errors import UsageError
from holdfast.learners import LEARNERS, PlainSgd, SynapticIntelligence
from learners.conftest import (
    assert_same_state,
    cross_entropies,
    network,
    plain_copy,
    stream,
    tiny_run,
)


def si(model, optimizer=None, **options) -> SynapticIntelligence:
    return SynapticIntelligence(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize(("strength", "damping"), [(1.0, 1.0), (3.0, 0.1)])
def test_twelve_steps_in_three_tasks(kind, strength, damping):
    """With plain SGD, - gradient * change is lr * gradient^2."""
    model = network(kind)
    reference = plain_copy(kind, model)
    learner = si(model, strength=strength, damping=damping)
    numbers = list(reference.parameters())
    anchors = [each.detach().clone() for each in numbers]
    held, paths = ([torch.zeros_like(each) for each in anchors] for _ in range(2))
    limited = 0
    for step, (x, y) in enumerate(stream(12)):
        x = 3 * x  # for gradients above 1
        losses = learner.observe(x, y)
        current = cross_entropies(reference(x), y).mean()
        penalty = 0
        for importance, now, then in zip(held, numbers, anchors, strict=True):
            penalty = penalty + (importance * (now - then) ** 2).sum()
        torch.testing.assert_close(losses.current, current.detach())
        torch.testing.assert_close(losses.penalty, penalty.detach())
        torch.testing.assert_close(losses.total, (current + strength * penalty).detach())
        gradients = torch.autograd.grad(current + strength * penalty, numbers)
        with torch.no_grad():
            for now, path, gradient in zip(numbers, paths, gradients, strict=True):
                limited += int((gradient.abs() > 1).sum())
                gradient = gradient.clip(-1, 1)
                now -= 0.1 * gradient
                path += 0.1 * gradient**2
            if step % 4 == 3:
                learner.end_task(x, y)
                for now, path, importance, anchor in zip(numbers, paths, held, anchors, strict=True):
                    importance += path / ((now - anchor) ** 2 + damping)
                    path.zero_()
                    anchor.copy_(now)
    assert limited or kind != "mlp"
    for mine, theirs in zip(learner.importances.values(), held, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    assert_same_state(model, reference, rtol=1e-9, atol=1e-11)


def test_with_momentum_a_path_is_what_each_step_gained():
    model = network("mlp")
    learner = si(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    paths = [torch.zeros_like(each) for each in model.parameters()]
    for x, y in stream(5):
        before = [each.detach().clone() for each in model.parameters()]
        learner.observe(x, y)
        for path, now, then in zip(paths, model.parameters(), before, strict=True):
            path -= now.grad * (now.detach() - then)
    for mine, theirs in zip(learner.paths.values(), paths, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_in_16_bits_small_steps_count_after_many():
    model = network("mlp", torch.bfloat16)
    learner = si(model)
    path, weight = 0.0, model.classifier.weight
    for x, y in stream(600, dtype=torch.bfloat16):
        before = weight.detach().double()
        learner.observe(x, y)
        path = path - weight.grad.double() * (weight.detach().double() - before)
    torch.testing.assert_close(learner.paths["classifier.weight"].double(), path, rtol=1e-3, atol=0)


def test_it_remembers_within_tasks_what_sgd_forgets():
    assert tiny_run("sgd").task_il_accuracy < 88
    assert tiny_run("si", strength=10.0, damping=0.1).task_il_accuracy > 91


def test_a_stream_without_boundaries_is_refused():
    with pytest.raises(UsageError, match="si must be told where tasks begin and end, and mnist-360 has no such"):
        hf.run(hf.RunConfig.preset("mnist-360", "si"), device="cpu")


def test_engines_train_the_parameters_that_the_penalty_is_about():
    """A twin in bfloat16 would have gradients of its own, and the penalty would be lost."""
    assert {name for name, learner in LEARNERS.items() if learner.uses_parameters} >= {"si", "ewc"}
    model, device = network("batchnorm", torch.float32), torch.device("cuda")
    optimizer = PlainSgd(model.parameters(), 0.1)
    assert isinstance(accelerate(model, optimizer, "bfloat16", device)[1], BfloatTwin)
    assert accelerate(model, optimizer, "bfloat16", device, twin=False)[1] is optimizer


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strength": float("inf")}, "strength must be a finite number of at least 0"),
        ({"damping": 0.0}, "damping must be above 0, not 0.0"),
        ({"head": "classifier"}, "the head of SynapticIntelligence cannot grow"),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        si(network("mlp"), **options)
