"""ESMER against slow loops."""

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.learners import Esmer
from holdfast.rng import generator
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

SETTINGS = {"consistency": 0.5, "decay": 0.75, "rate": 0.6, "loss_margin": 1.1, "loss_decay": 0.7, "deviations": 0.8}


def esmer(model, **options) -> Esmer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Esmer(model, optimizer, **{"buffer_size": 20, **SETTINGS, **options})


def usual_mean(errors):
    """The mean without errors that lie too many standard deviations above it."""
    mean = sum(errors) / len(errors)
    deviation = (sum((each - mean) ** 2 for each in errors) / (len(errors) - 1)) ** 0.5
    usual = [each for each in errors if each <= mean + 0.8 * deviation]
    return sum(usual) / len(usual)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize(("replay_size", "warmup"), [(5, 0), (None, 2)])
def test_twelve_steps_in_two_tasks(kind, replay_size, warmup):
    model = network(kind)
    reference, stable = (plain_copy(kind, model) for _ in range(2))
    learner = esmer(model, replay_size=replay_size, warmup=warmup)
    buffer, chances, mean, moves, offered = record(learner), generator(0, "averages"), 0.0, 0, []
    for step, (x, y) in enumerate(stream(12)):
        if step % 6 == 0:
            learner.begin_task((0, 1, 2, 3, 4))
        draws, offers = len(buffer.draws), len(buffer.offers)
        losses = learner.observe(x, y)
        with torch.no_grad():
            errors = cross_entropies(stable(x), y).tolist()
        weights = [mean / each if mean and each >= 1.1 * mean else 1.0 for each in errors]
        terms = cross_entropies(reference(x), y)
        loss = sum(weight * term for weight, term in zip(weights, terms, strict=True)) / len(y)
        torch.testing.assert_close(losses.current, loss.detach(), rtol=1e-6, atol=1e-7)
        assert len(buffer.draws) - draws == bool(sum(offered))
        if sum(offered):
            drawn = buffer.draws[-1]
            assert len(drawn.y) == min(replay_size or 8, sum(offered), 20)
            with torch.no_grad():
                target = stable(drawn.x)
            now = reference(drawn.x)
            replay = cross_entropies(now, drawn.y).mean()
            squares = [(a - b) ** 2 for a, b in zip(now.flatten(), target.flatten(), strict=True)]
            distance = sum(squares) / len(squares)
            torch.testing.assert_close(losses.replay, replay.detach(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(losses.consistency, distance.detach(), rtol=1e-6, atol=1e-7)
            loss = loss + replay + 0.5 * distance
        torch.testing.assert_close(losses.total, loss.detach(), rtol=1e-6, atol=1e-7)
        warm = step % 6 >= warmup
        small = [number for number, each in enumerate(errors) if warm and (not mean or each <= 1.1 * mean)]
        offered.append(len(small))
        assert len(buffer.offers) - offers == bool(small)
        if small:
            assert torch.equal(buffer.offers[-1][0], x[small])
            assert torch.equal(buffer.offers[-1][1], y[small])
        descend(reference, loss, 0.1)
        limit = 1 - 1 / (step + 2)
        if float(torch.rand((), generator=chances)) < 0.6:
            moves += 1
            decay = min(limit, 0.75)
            with torch.no_grad():
                for slow, fast in zip(stable.parameters(), reference.parameters(), strict=True):
                    slow.copy_(decay * slow + (1 - decay) * fast)
        if warm:
            share = min(limit, 0.7)
            mean = share * mean + (1 - share) * usual_mean(errors)
            assert float(learner.mean) == pytest.approx(mean, rel=1e-6)
    assert 2 < moves < 11
    assert any(0 < count < 8 for count in offered)  # some samples of a minibatch were stored and others were not
    assert_same_state(model, reference, rtol=1e-6, atol=1e-7)
    assert_same_state(learner.stable, stable, rtol=1e-6, atol=1e-7)
    assert learner.evaluated() is learner.stable


def test_minibatches_of_one():
    learner = esmer(network("mlp"))
    for x, y in stream(5, size=1):
        learner.observe(x, y)
    assert learner.mean > 0


def test_errors_that_are_all_the_same():
    """Rounding may put their mean below all of them."""
    learner = esmer(network("mlp", torch.float32), deviations=0.0)
    for size in range(2, 12):
        for error in torch.linspace(0.1, 3, 30):
            assert learner._usual(error.expand(size)) == pytest.approx(float(error))


def test_it_remembers_what_sgd_forgets():
    assert tiny_run("sgd").accuracy < 25
    assert tiny_run("esmer").accuracy > 45


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"consistency": -1.0}, "consistency must be a finite number of at least 0"),
        ({"loss_margin": -1.0}, "loss_margin must be a finite number of at least 0"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0, not -1"),
        ({"warmup": 1.5}, "warmup must be a whole number of at least 0, not 1.5"),
        ({"decay": 1.5}, "decay must lie between 0 and 1, not at 1.5"),
        ({"rate": -0.1}, "rate must lie between 0 and 1, not at -0.1"),
        ({"loss_decay": float("nan")}, "loss_decay must lie between 0 and 1, not at nan"),
        ({"replay_size": 0}, "replay_size must be at least 1"),
        ({"class_weights": [1.0] * CLASSES}, "ESMER weighs cross-entropy by itself"),
        ({"head": "classifier"}, "the head of Esmer cannot grow"),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        esmer(network("mlp"), **options)


def test_one_stored_sample_does_not_stop_it():
    """BatchNorm refuses a draw of one; whatever passes the limit after `forget_all`, steps go on."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = network("batchnorm")
        learner = Esmer(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20, loss_margin=0.7)
        for x, y in stream(10, seed=seed):
            learner.observe(x, y)
        learner.forget_all()
        for x, y in stream(10, seed=seed + 50):
            learner.observe(x, y)
