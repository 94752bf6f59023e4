"""DER against slow loops."""

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.learners import DarkReplay
from learners.conftest import (
    assert_same_state,
    cross_entropies,
    descend,
    network,
    plain_copy,
    record,
    stream,
    tiny_run,
)


def der(model, **options) -> DarkReplay:
    return DarkReplay(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"buffer_size": 20, **options})


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize(("beta", "replay_size"), [(0.5, 8), (2.0, 5), (0.0, None)])
def test_ten_steps(kind, beta, replay_size):
    model = network(kind)
    reference = plain_copy(kind, model)
    learner = der(model, beta=beta, replay_size=replay_size)
    buffer = record(learner)
    for step, (x, y) in enumerate(stream(10)):
        losses = learner.observe(x, y)
        assert len(buffer.draws) == step  # one draw a step, none from an empty buffer
        outputs = reference(x)
        loss = current = cross_entropies(outputs, y).mean()
        if step:
            drawn = buffer.draws[-1]
            assert len(drawn.y) == min(replay_size or 8, 8 * step, 20)
            pairs = zip(reference(drawn.x).flatten(), drawn.logits.flatten(), strict=True)
            squares = [(now - then) ** 2 for now, then in pairs]
            consistency = sum(squares) / len(squares)
            loss = current + beta * consistency
            torch.testing.assert_close(losses.consistency, consistency.detach())
        torch.testing.assert_close(losses.total, loss.detach())
        torch.testing.assert_close(losses.current, current.detach())
        assert losses.replay == 0
        torch.testing.assert_close(buffer.offers[-1][2], outputs.detach())  # before the update
        descend(reference, loss, 0.1)
    assert_same_state(model, reference, rtol=1e-9, atol=1e-11)


def test_stored_labels_make_no_difference():
    models = [network("mlp"), network("mlp")]
    for model, wrong in zip(models, (0, 1), strict=True):
        learner = der(model)
        for x, y in stream(6):
            learner.observe(x, y)
            if wrong:
                learner.buffer.contents().y.zero_()
    assert_same_state(*models, rtol=0, atol=0)


def test_it_remembers_what_sgd_forgets():
    assert tiny_run("sgd").accuracy < 25
    assert tiny_run("der").accuracy > 55


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beta": -1.0}, "beta must be a finite number of at least 0"),
        ({"replay_size": 0}, "replay_size must be at least 1"),
        ({"alpha": 1.0}, "unknown option of DarkReplay 'alpha'"),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        der(network("mlp"), **options)
