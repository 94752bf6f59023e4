"""ER-ACE against slow loops."""

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.learners import AsymmetricReplay
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


def er_ace(model, **options) -> AsymmetricReplay:
    return AsymmetricReplay(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"buffer_size": 20, **options})


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("replay_size", [5, None])
def test_ten_steps(kind, replay_size):
    model = network(kind)
    reference = plain_copy(kind, model)
    learner = er_ace(model, replay_size=replay_size)
    buffer, seen, shortened = record(learner), set(), 0
    for step, (x, y) in enumerate(stream(10)):
        losses = learner.observe(x, y)
        assert len(buffer.draws) == step  # one draw a step, none from an empty buffer
        outputs, present = reference(x), set(y.tolist())
        classes = [each for each in range(CLASSES) if each in present or each not in seen]
        shortened += len(classes) < CLASSES
        terms = []
        for row, label in zip(outputs, y.tolist(), strict=True):
            terms.append(-torch.log(row[label].exp() / sum(row[each].exp() for each in classes)))
        loss = current = sum(terms) / len(terms)
        if step:
            drawn = buffer.draws[-1]
            assert len(drawn.y) == min(replay_size or 8, 8 * step, 20)
            replay = cross_entropies(reference(drawn.x), drawn.y).mean()
            loss = current + replay
            torch.testing.assert_close(losses.replay, replay.detach())
        torch.testing.assert_close(losses.total, loss.detach())
        torch.testing.assert_close(losses.current, current.detach())
        seen |= present
        descend(reference, loss, 0.1)
    assert shortened > 4
    assert {each for each in range(CLASSES) if learner.seen[each]} == seen
    assert_same_state(model, reference, rtol=1e-9, atol=1e-11)


def test_the_minibatch_leaves_absent_classes_alone():
    """No gradient reaches the output of a class that was seen before and is absent, except through the draw."""
    learner = er_ace(network("mlp"))
    x, y = next(stream(1))
    learner.observe(x, torch.full_like(y, 3))
    learner.optimizer.zero_grad()
    learner.losses(x, y).current.backward()
    gradient = learner.model.classifier.bias.grad
    assert gradient[3] == 0
    assert all(gradient[label] != 0 for label in (0, 1, 2, 4))


def test_it_remembers_what_sgd_forgets():
    assert tiny_run("sgd").accuracy < 25
    assert tiny_run("er-ace").accuracy > 65


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"replay_size": 0}, "replay_size must be at least 1"),
        ({"head": "classifier"}, "the head of AsymmetricReplay cannot grow: leave out head="),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        er_ace(network("mlp"), **options)
