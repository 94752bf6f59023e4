"""Online EWC against slow loops over samples and parameters."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.learners import OnlineEwc
from learners.conftest import (
    CLASSES,
    assert_same_state,
    cross_entropies,
    descend,
    network,
    plain_copy,
    stream,
    tiny_run,
)


def ewc(model, **options) -> OnlineEwc:
    return OnlineEwc(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def importances(model, x, y):
    """For each parameter the mean over samples of p * (d log p / d w)^2, p being the probability of the label."""
    model.eval()
    sums = [torch.zeros_like(each) for each in model.parameters()]
    for one, label in zip(x, y.tolist(), strict=True):
        row = model(one[None])[0]
        log = torch.log(row[label].exp() / row.exp().sum())
        for total, slope in zip(sums, torch.autograd.grad(log, list(model.parameters())), strict=True):
            total += log.detach().exp() * slope**2
    model.train()
    return [each / len(x) for each in sums]


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize(("strength", "decay"), [(1.0, 1.0), (0.3, 0.5)])
def test_twelve_steps_in_three_tasks(kind, strength, decay):
    model = network(kind)
    reference = plain_copy(kind, model)
    learner = ewc(model, strength=strength, decay=decay)
    anchors = [each.detach().clone() for each in reference.parameters()]
    held = [torch.zeros_like(each) for each in anchors]
    shown = []
    for step, (x, y) in enumerate(stream(12)):
        losses = learner.observe(x, y)
        current = cross_entropies(reference(x), y).mean()
        penalty = 0
        for importance, now, then in zip(held, reference.parameters(), anchors, strict=True):
            penalty = penalty + (importance * (now - then) ** 2).sum()
        torch.testing.assert_close(losses.current, current.detach())
        torch.testing.assert_close(losses.penalty, penalty.detach())
        torch.testing.assert_close(losses.total, (current + strength * penalty).detach())
        assert (losses.penalty > 0) == (
            step > 4 and step % 4 > 0
        )  # the first step of a task begins where it is to stay
        descend(reference, current + strength * penalty, 0.1)
        shown.append((x, y))
        if step % 4 == 3:
            task = [torch.cat(parts) for parts in zip(*shown, strict=True)]
            learner.end_task(*task)
            fresh = importances(reference, *task)
            held = [decay * old + new for old, new in zip(held, fresh, strict=True)]
            anchors = [each.detach().clone() for each in reference.parameters()]
            shown = []
    for name, mine, theirs in zip(learner.parameters, learner.importances.values(), held, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
    assert_same_state(model, reference, rtol=1e-9, atol=1e-11)


def test_it_is_estimated_from_so_many_samples():
    shown = []
    learner = ewc(network("mlp"), samples=20, augment=lambda x: shown.append(x) or x)
    x = torch.arange(50, dtype=torch.float64).view(50, 1, 1, 1).expand(50, 1, 6, 6) / 50
    learner.end_task(x, torch.zeros(50, dtype=torch.int64))
    chosen = torch.cat(shown)[:, 0, 0, 0].tolist()
    assert len(chosen) == len(set(chosen)) == 20
    assert learner.model.training


def test_frozen_layers_are_left_out():
    model = network("mlp")
    model.hidden1.requires_grad_(False)
    learner = ewc(model)
    for x, y in stream(2):
        learner.observe(x, y)
        learner.end_task(x, y)
    assert "hidden1.weight" not in learner.importances
    assert "hidden2.weight" in learner.importances


class Looking(nn.Module):
    """Looks at values, which vmap refuses, after it has worked in place or not on what it is given."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place, self.layer = in_place, nn.Linear(36, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        x = x.sub_(0.5) if self.in_place else x - 0.5
        return self.layer(x.clone() if x.sum() < 1e9 else x)


def test_samples_are_shown_one_by_one_as_they_are():
    found = []
    for in_place in (False, True):
        torch.manual_seed(0)
        learner = ewc(Looking(in_place).double())
        learner.end_task(*next(stream(1)))
        found.append(learner.importances["layer.weight"])
    assert torch.equal(*found)


def test_it_remembers_within_tasks_what_sgd_forgets():
    assert tiny_run("sgd").task_il_accuracy < 88
    assert tiny_run("ewc", strength=200.0, samples=200).task_il_accuracy > 90


def test_a_stream_without_boundaries_is_refused():
    with pytest.raises(UsageError, match="ewc must be told where tasks begin and end, and mnist-360 has no such"):
        hf.run(hf.RunConfig.preset("mnist-360", "ewc"), device="cpu")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strength": -1.0}, "strength must be a finite number of at least 0"),
        ({"decay": 1.5}, "decay must lie between 0 and 1, not at 1.5"),
        ({"samples": 0}, "samples must be a whole number of at least 1, not 0"),
        ({"samples": 10.5}, "samples must be a whole number of at least 1, not 10.5"),
        ({"head": "classifier"}, "the head of OnlineEwc cannot grow"),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        ewc(network("mlp"), **options)
