"""Ballast against slow loops."""

import math
from copy import deepcopy

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.learners import Ballast
from learners.conftest import (
    CLASSES,
    assert_same_state,
    cross_entropies,
    descend,
    network,
    plain_copy,
    record,
    stream,
    tiny_run,
)

IDEAS = [{}, {"asymmetric": True}, {"adjusted": True}, {"adjusted": True, "strength": 2.5}, {"target": "stored"}]


def ballast(model, **options) -> Ballast:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Ballast(model, optimizer, **{"buffer_size": 20, "alpha": 0.7, "beta": 0.5, "decay": 0.75, **options})


def adjustment(*labels):
    """For each class, the logarithm of 1 + how often it is among the labels."""
    every = [label for each in labels for label in each.tolist()]
    return torch.tensor([math.log(1 + every.count(number)) for number in range(CLASSES)], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("replay_size", [5, None])
@pytest.mark.parametrize("ideas", IDEAS, ids=str)
def test_ten_steps(kind, replay_size, ideas):
    model = network(kind)
    reference, average = (plain_copy(kind, model) for _ in range(2))
    learner = ballast(model, replay_size=replay_size, **ideas)
    buffer, seen, left_alone = record(learner), set(), 0
    for step, (x, y) in enumerate(stream(10)):
        y = y % 2 if step > 3 else y  # so that classes are absent which were seen before
        losses = learner.observe(x, y)
        assert len(buffer.draws) == step  # one draw a step, none from an empty buffer
        outputs = reference(x)
        if step == 0:
            loss = current = cross_entropies(outputs, y).mean()
        else:
            drawn = buffer.draws[-1]
            assert len(drawn.y) == min(replay_size or 8, 8 * step, 20)
            now, steady = reference(drawn.x), average(drawn.x).detach()
            target = drawn.logits if "target" in ideas else steady
            squares = [(a - b) ** 2 for a, b in zip(now.flatten(), target.flatten(), strict=True)]
            consistency = sum(squares) / len(squares)
            if "asymmetric" in ideas:
                absent = sorted(seen - set(y.tolist()))
                left_alone += len(absent)
                outputs = outputs.index_fill(1, torch.tensor(absent, dtype=torch.int64), -1e9)
            added = ideas.get("strength", 1.0) * adjustment(y, drawn.y) if "adjusted" in ideas else 0.0
            current = cross_entropies(outputs + added, y).mean()
            replay = cross_entropies(now + added, drawn.y).mean()
            loss = current + 0.7 * replay + 0.5 * consistency
            torch.testing.assert_close(losses.replay, replay.detach(), rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(losses.consistency, consistency.detach(), rtol=1e-6, atol=1e-8)
        seen |= set(y.tolist())
        torch.testing.assert_close(losses.current, current.detach(), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(losses.total, loss.detach(), rtol=1e-6, atol=1e-8)
        descend(reference, loss, 0.1)
        decay = min(0.75, 1 - 1 / (step + 2))
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), reference.parameters(), strict=True):
                slow.copy_(decay * slow + (1 - decay) * fast)
    assert bool(left_alone) == ("asymmetric" in ideas)
    # The average's weight comes from a count on the device, in float32.
    for mine, theirs in ((model, reference), (learner.average, average)):
        assert_same_state(mine, theirs, rtol=1e-6, atol=1e-7)


def test_the_average_is_evaluated_and_follows():
    learner = ballast(network("mlp"), decay=0.0)
    for x, y in stream(3):
        learner.observe(x, y)
    assert learner.evaluated() is learner.average
    assert_same_state(learner.average, learner.model, rtol=0, atol=0)


def test_a_refused_step_leaves_no_trace():
    learner = ballast(network("batchnorm"))
    for x, y in stream(2):
        learner.observe(x, y)
    average, seen = deepcopy(learner.average), learner.seen.clone()
    with pytest.raises(UsageError, match="labels up to"):
        learner.observe(x, y + 9)
    assert_same_state(learner.average, average, rtol=0, atol=0)
    assert torch.equal(learner.seen, seen)


@pytest.mark.parametrize("ideas", IDEAS, ids=str)
def test_it_remembers_what_sgd_forgets(ideas):
    assert tiny_run("sgd").accuracy < 25
    assert tiny_run("ballast", decay=0.95, **ideas).accuracy > 55


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beta": -0.1}, "beta must be a finite number of at least 0, not -0.1"),
        ({"alpha": float("inf")}, "alpha must be a finite number"),
        ({"strength": -1.0}, "strength must be a finite number of at least 0"),
        ({"target": "mean"}, "unknown target 'mean'"),
        ({"decay": 1.1}, "decay must lie between 0 and 1, not at 1.1"),
        ({"loss": torch.nn.functional.mse_loss}, "leave out loss="),
        ({"replay_size": 0}, "replay_size must be at least 1"),
        ({"decays": 1}, "unknown option of Ballast 'decays'"),
        ({"head": "classifier"}, "the head of Ballast cannot grow: leave out head="),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        ballast(network("mlp"), **options)
