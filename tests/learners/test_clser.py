"""CLS-ER against slow loops; the network that a run tests and saves."""

from copy import deepcopy

import pytest
import torch

import holdfast as hf
from holdfast import training
from holdfast.augment import Normalize
from holdfast.benchmarks import make_benchmark
from holdfast.data import data_root
from holdfast.errors import UsageError
from holdfast.evaluation import predict
from holdfast.learners import ClsEr
from holdfast.rng import generator
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

SETTINGS = {"stable_decay": 0.75, "plastic_decay": 0.5, "stable_rate": 0.4, "plastic_rate": 0.8}


def clser(model, **options) -> ClsEr:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ClsEr(model, optimizer, **{"buffer_size": 20, "consistency": 0.5, **SETTINGS, **options})


def distance_to_the_better(now, stable, plastic, labels):
    """The mean square over all samples and outputs; each sample is compared with the average that is surer of it."""
    squares = []
    for row, slow, fast, label in zip(now, stable, plastic, labels.tolist(), strict=True):
        certainties = [(each.exp() / each.exp().sum())[label] for each in (slow, fast)]
        better = slow if certainties[0] > certainties[1] else fast
        squares += [(a - b) ** 2 for a, b in zip(row, better.detach(), strict=True)]
    return sum(squares) / len(squares)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("replay_size", [5, None])
def test_ten_steps(kind, replay_size):
    model = network(kind)
    reference, stable, plastic = (plain_copy(kind, model) for _ in range(3))
    learner = clser(model, replay_size=replay_size)
    buffer, chances, moves = record(learner), generator(0, "averages"), 0
    for step, (x, y) in enumerate(stream(10)):
        losses = learner.observe(x, y)
        assert len(buffer.draws) == step  # one draw a step, none from an empty buffer
        if step == 0:
            loss = current = cross_entropies(reference(x), y).mean()
        else:
            drawn = buffer.draws[-1]
            assert len(drawn.y) == min(replay_size or 8, 8 * step, 20)
            # Three passes over the draw alone, one of them by each average, in training mode.
            consistency = distance_to_the_better(reference(drawn.x), stable(drawn.x), plastic(drawn.x), drawn.y)
            both = reference(torch.cat([x, drawn.x]))
            current = cross_entropies(both, torch.cat([y, drawn.y])).mean()
            loss = current + 0.5 * consistency
            torch.testing.assert_close(losses.consistency, consistency.detach(), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(losses.current, current.detach(), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(losses.total, loss.detach(), rtol=1e-6, atol=1e-8)
        descend(reference, loss, 0.1)
        rolled = torch.rand(2, generator=chances).tolist()
        for average, chance, which in zip((stable, plastic), rolled, ("stable", "plastic"), strict=True):
            if chance < SETTINGS[f"{which}_rate"]:
                moves += 1
                decay = min(SETTINGS[f"{which}_decay"], 1 - 1 / (step + 2))
                with torch.no_grad():
                    for slow, fast in zip(average.parameters(), reference.parameters(), strict=True):
                        slow.copy_(decay * slow + (1 - decay) * fast)
    assert 3 < moves < 17  # some steps moved an average, some did not
    # The averages' weights come from a count on the device, in float32.
    for mine, theirs in ((model, reference), (learner.stable, stable), (learner.plastic, plastic)):
        assert_same_state(mine, theirs, rtol=1e-6, atol=1e-7)


def test_the_averages_follow_at_every_step_or_never():
    for rate in (0.0, 1.0):
        model = network("mlp")
        before = plain_copy("mlp", model)
        learner = clser(model, stable_rate=rate, stable_decay=0.0)
        for x, y in stream(3):
            learner.observe(x, y)
        assert_same_state(learner.stable, model if rate else before, rtol=0, atol=0)


def test_a_refused_step_leaves_no_trace_in_the_averages():
    learner = clser(network("batchnorm"))
    for x, y in stream(2):
        learner.observe(x, y)
    before = deepcopy(learner.stable)
    with pytest.raises(UsageError, match="labels up to"):
        learner.observe(x, y + 9)
    assert_same_state(learner.stable, before, rtol=0, atol=0)


def test_the_buffer_gets_inputs_as_they_came_without_logits():
    learner = clser(network("mlp"), augment=lambda x: 3 * x + 1)
    buffer = record(learner)
    for x, y in stream(3):
        learner.observe(x, y)
        assert torch.equal(buffer.offers[-1][0], x)
        assert torch.equal(buffer.offers[-1][1], y)
        assert buffer.offers[-1][2] is None


def test_a_run_tests_and_saves_the_stable_average(monkeypatch):
    made = []
    monkeypatch.setattr(
        training, "make_learner", lambda *given: made.append(hf.learners.make_learner(*given)) or made[-1]
    )
    config = hf.RunConfig.preset("rot-mnist", "clser", buffer_size=20, tasks=1, train_limit=300)
    result = hf.run(config, device="cpu")
    learner = made[0]
    assert learner.evaluated() is learner.stable
    for name, tensor in learner.stable.state_dict().items():
        assert torch.equal(result.weights[name], tensor)
        assert not torch.equal(tensor, learner.model.state_dict()[name])
    images = make_benchmark(config, data_root(None)).tasks[0].test.images
    assert torch.equal(result.logits["logits.0"], predict(learner.stable, images, Normalize()))


def test_it_remembers_what_sgd_forgets():
    assert tiny_run("sgd").accuracy < 25
    assert tiny_run("clser").accuracy > 55


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"consistency": -0.1}, "consistency must be a finite number of at least 0, not -0.1"),
        ({"stable_decay": 1.1}, "stable_decay must lie between 0 and 1, not at 1.1"),
        ({"plastic_rate": -1}, "plastic_rate must lie between 0 and 1, not at -1"),
        ({"plastic_rate": float("nan")}, "plastic_rate must lie between 0 and 1"),
        ({"replay_size": 0}, "replay_size must be at least 1"),
        ({"buffer_size": 0}, "buffer size must be at least 1"),
        ({"stable_frequency": 1}, "unknown option of ClsEr 'stable_frequency'"),
        ({"head": "classifier"}, "the head of ClsEr cannot grow: leave out head="),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        clser(network("mlp"), **options)
