"""Experience replay against a slow reference: one pass over minibatch and draw, common statistics."""

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.learners import ExperienceReplay
from learners.conftest import (
    CLASSES,
    accuracies,
    assert_same_state,
    blobs,
    cross_entropies,
    descend,
    network,
    plain_copy,
    record,
    stream,
)


def er(model, lr=0.1, **options) -> ExperienceReplay:
    return ExperienceReplay(model, torch.optim.SGD(model.parameters(), lr=lr), **options)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("alpha", [1.0, 2.0, 0.0])
@pytest.mark.parametrize("replay_size", [8, 5, None])
def test_ten_steps(kind, alpha, replay_size):
    model = network(kind)
    reference = plain_copy(kind, model)
    learner = er(model, buffer_size=20, alpha=alpha, replay_size=replay_size)
    buffer = record(learner)
    for step, (x, y) in enumerate(stream(10)):
        losses = learner.observe(x, y)
        assert len(buffer.draws) == step  # one draw a step, none from an empty buffer
        if step == 0:
            terms = cross_entropies(reference(x), y)
            loss = terms.mean()
            assert losses.replay == 0
        else:
            drawn = buffer.draws[-1]
            assert len(drawn.y) == min(replay_size or 8, 8 * step, 20)
            # One pass over both together, so that they share BatchNorm statistics.
            terms = cross_entropies(reference(torch.cat([x, drawn.x])), torch.cat([y, drawn.y]))
            weights = torch.tensor([1.0] * len(y) + [alpha] * len(drawn.y), dtype=torch.float64)
            loss = (weights * terms).sum() / len(terms)
            torch.testing.assert_close(losses.replay, terms[len(y) :].mean().detach())
        torch.testing.assert_close(losses.total, loss.detach())
        torch.testing.assert_close(losses.current, terms[: len(y)].mean().detach())
        assert losses.consistency == 0
        descend(reference, loss, 0.1)
    assert_same_state(model, reference, rtol=1e-9, atol=1e-11)


def test_alpha_one_is_the_mean_over_the_concatenation():
    model = network("mlp")
    learner = er(model, buffer_size=20)
    buffer = record(learner)
    for x, y in stream(3):
        before = plain_copy("mlp", model)
        total = learner.observe(x, y).total
    drawn = buffer.draws[-1]
    expected = nn.CrossEntropyLoss()(before(torch.cat([x, drawn.x])), torch.cat([y, drawn.y]))
    torch.testing.assert_close(total, expected.detach())


def test_the_buffer_is_offered_inputs_as_they_came_and_keeps_no_logits():
    model = network("mlp")
    learner = er(model, buffer_size=20, augment=lambda x: 3 * x + 1)
    buffer = record(learner)
    for x, y in stream(4):
        learner.observe(x, y)
        offered = buffer.offers[-1]
        assert torch.equal(offered[0], x)
        assert torch.equal(offered[1], y)
        assert offered[2] is None
    assert buffer.draws[-1].logits is None


def test_minibatch_and_draw_are_augmented_anew_every_step():
    shown = []
    model = network("mlp")
    learner = er(model, buffer_size=20, augment=lambda x: shown.append(x.clone()) or x * 2)
    buffer = record(learner)
    for step, (x, y) in enumerate(stream(4)):
        shown.clear()
        learner.observe(x, y)
        wanted = torch.cat([x, buffer.draws[-1].x]) if step else x
        assert torch.equal(shown[-1], wanted)


def test_buffer_smaller_than_the_minibatch():
    learner = er(network("batchnorm"), buffer_size=3, replay_size=8)
    buffer = record(learner)
    for x, y in stream(5):
        assert torch.isfinite(learner.observe(x, y).total)
    assert {len(drawn.y) for drawn in buffer.draws} == {3}
    assert buffer.stored == 3


def test_seeds_decide_the_draws():
    def draws(seed):
        learner = er(network("mlp"), buffer_size=10, seed=seed)
        buffer = record(learner)
        for x, y in stream(5):
            learner.observe(x, y)
        return torch.cat([drawn.x for drawn in buffer.draws])

    assert torch.equal(draws(0), draws(0))
    assert not torch.equal(draws(0), draws(1))


def test_er_keeps_the_first_blob(linear):
    training, x, y = blobs()
    learner = er(linear, lr=0.3, buffer_size=20)
    for batch in training:
        learner.observe(*batch)
    assert min(accuracies(linear, x, y)) > 90


def test_errors():
    with pytest.raises(UsageError, match="buffer size must be at least 1, not 0"):
        er(network("mlp"), buffer_size=0)
    learner = er(network("mlp"), buffer_size=5)
    x = torch.zeros(4, 1, 6, 6, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"label.*outputs.*0\.\.4"):
        learner.observe(x, torch.tensor([0, 1, 2, CLASSES]))
    assert learner.buffer.stored == 0  # nothing wrong is remembered
    with pytest.raises(UsageError, match="4 inputs need as many labels"):
        learner.observe(x, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(UsageError, match="at least one sample"):
        learner.observe(x[:0], torch.zeros(0, dtype=torch.int64))
