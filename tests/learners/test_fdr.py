"""FDR against slow loops."""

import pytest
import torch

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.learners import FunctionDistance
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


def fdr(model, **options) -> FunctionDistance:
    return FunctionDistance(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"buffer_size": 20, **options})


def probabilities(row):
    return [number.exp() / row.exp().sum() for number in row]


@pytest.mark.filterwarnings("ignore:augment is random, but draws once")
@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize(("beta", "replay_size"), [(1.0, 8), (0.3, 5), (0.0, None)])
def test_twelve_steps_in_three_tasks(kind, beta, replay_size):
    model = network(kind)
    reference = plain_copy(kind, model)
    scales = []

    def augment(x):
        """Another view at each call: a distance of zero has no one gradient to compare."""
        scales.append(1 + len(scales) / 10)
        return x * scales[-1]

    learner = fdr(model, beta=beta, replay_size=replay_size, augment=augment)
    buffer, shown = record(learner), []
    for step, (x, y) in enumerate(stream(12)):
        losses = learner.observe(x, y)
        loss = current = cross_entropies(reference(x * scales[-1]), y).mean()
        assert len(buffer.draws) == max(0, step - 3)  # none in the first task
        if step > 3:
            drawn = buffer.draws[-1]
            assert len(drawn.y) == (replay_size or 8)
            distances = []
            for now, then in zip(reference(drawn.x * scales[-1]), drawn.logits, strict=True):
                pairs = zip(probabilities(now), probabilities(then), strict=True)
                distances.append(sum((p - q) ** 2 for p, q in pairs) ** 0.5)
            consistency = sum(distances) / len(distances)
            loss = current + beta * consistency
            torch.testing.assert_close(losses.consistency, consistency.detach())
        torch.testing.assert_close(losses.current, current.detach())
        torch.testing.assert_close(losses.total, loss.detach())
        descend(reference, loss, 0.1)
        shown.append((x, y))
        if step % 4 == 3:
            task = [torch.cat(parts) for parts in zip(*shown, strict=True)]
            learner.end_task(*task)
            with torch.no_grad():
                outputs = reference(task[0] * scales[-1])  # in training mode
            for mine, theirs in zip(buffer.offers[-1], (*task, outputs), strict=True):
                torch.testing.assert_close(mine, theirs)
            shown = []
    assert len(buffer.offers) == 3
    assert_same_state(model, reference, rtol=1e-9, atol=1e-11)


def test_a_long_task_is_offered_whole_and_as_it_came():
    learner = fdr(network("mlp"), augment=lambda x: 2 * x)
    buffer = record(learner)
    x, y = torch.randn(300, 1, 6, 6, dtype=torch.float64), torch.arange(300) % 5
    learner.end_task(x, y)
    offered = [torch.cat(parts) for parts in zip(*buffer.offers, strict=True)]
    assert torch.equal(offered[0], x)
    assert torch.equal(offered[1], y)
    torch.testing.assert_close(offered[2], learner.model(2 * x).detach())


def test_a_distance_of_zero_has_a_gradient():
    """Right after the end of a task, nothing has moved."""
    learner = fdr(network("mlp"), buffer_size=8)
    x, y = next(stream(1))
    learner.end_task(x, y)
    learner.observe(x, y)
    learner.check_finite()


def test_it_remembers_what_sgd_forgets():
    assert tiny_run("sgd").accuracy < 25
    assert tiny_run("fdr").accuracy > 50


def test_a_stream_without_boundaries_is_refused():
    with pytest.raises(UsageError, match="fdr must be told where tasks begin and end, and mnist-360 has no such"):
        hf.run(hf.RunConfig.preset("mnist-360", "fdr"), device="cpu")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beta": -1.0}, "beta must be a finite number of at least 0"),
        ({"replay_size": 0}, "replay_size must be at least 1"),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        fdr(network("mlp"), **options)
