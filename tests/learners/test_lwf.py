"""Learning without forgetting against slow loops; streams without boundaries are refused."""

import sys

import pytest
import torch

import holdfast as hf
from holdfast.cli import main
from holdfast.errors import UsageError
from holdfast.learners import WithoutForgetting
from learners.conftest import (
    assert_same_state,
    descend,
    network,
    plain_copy,
    stream,
    tiny_run,
)


def lwf(model, **options) -> WithoutForgetting:
    return WithoutForgetting(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def probabilities(row, classes, temperature=1.0):
    """The softmax over these classes alone, by class."""
    powers = {each: torch.exp(row[each] / temperature) for each in classes}
    return {each: power / sum(powers.values()) for each, power in powers.items()}


def mean_cross_entropy(outputs, labels, classes):
    rows = [-probabilities(row, classes)[label].log() for row, label in zip(outputs, labels.tolist(), strict=True)]
    return sum(rows) / len(rows)


def mean_distillation(outputs, teacher, classes, temperature):
    terms = []
    for row, target in zip(outputs, teacher, strict=True):
        now, then = probabilities(row, classes, temperature), probabilities(target, classes, temperature)
        terms.append(-sum(then[each].detach() * now[each].log() for each in classes))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize(("distillation", "temperature"), [(1.0, 2.0), (0.3, 1.5), (0.0, 2.0)])
def test_ten_steps_in_two_tasks(kind, distillation, temperature):
    model = network(kind)
    reference, teacher = plain_copy(kind, model), plain_copy(kind, model).eval()
    learner = lwf(model, distillation=distillation, temperature=temperature)
    learner.begin_task((0, 1, 2))
    seen, old = [0, 1, 2], []
    for step, (x, y) in enumerate(stream(10)):
        if step == 6:  # the labels of the second task: 2, 3, 4
            learner.end_task(x, y)
            learner.begin_task((2, 3, 4))
            teacher.load_state_dict(reference.state_dict())
            seen, old = [0, 1, 2, 3, 4], [0, 1, 2]
        losses = learner.observe(x, y)
        outputs = reference(x)
        loss = mean_cross_entropy(outputs, y, seen)
        torch.testing.assert_close(losses.current, loss.detach())
        if old:
            term = mean_distillation(outputs, teacher(x), old, temperature)
            torch.testing.assert_close(losses.distillation, term.detach())
            loss = loss + distillation * term
        else:
            assert losses.distillation == 0
        torch.testing.assert_close(losses.total, loss.detach())
        descend(reference, loss, 0.1)
    assert_same_state(model, reference, rtol=1e-10, atol=1e-12)
    assert_same_state(learner.teacher, teacher, rtol=1e-10, atol=1e-12)
    assert not learner.teacher.training
    assert learner.evaluated() is model


def test_the_first_task_is_plain_training():
    """Without an old class, distillation has no gradient, however large its weight."""
    models = [network("mlp"), network("mlp")]
    for model, weight in zip(models, (0.0, 1e6), strict=True):
        learner = lwf(model, distillation=weight)
        learner.begin_task((0, 1, 2, 3, 4))
        for x, y in stream(4):
            learner.observe(x, y)
    assert_same_state(*models, rtol=0, atol=0)


def test_it_remembers_within_tasks_what_sgd_forgets():
    """Over all classes it does not: its last task's classes win, as published."""
    assert tiny_run("sgd").task_il_accuracy < 88
    assert tiny_run("lwf").task_il_accuracy > 92


def test_labels_of_no_task_are_refused():
    model = network("mlp")
    learner = lwf(model)
    learner.begin_task((0, 1))
    before = plain_copy("mlp", model)
    x, _ = next(stream(1))
    with pytest.raises(UsageError, match=r"belongs to no task so far: call begin_task\(classes\)"):
        learner.observe(x, torch.full((8,), 2))
    assert_same_state(model, before, rtol=0, atol=0)


REFUSAL = "lwf must be told where tasks begin and end, and mnist-360 has no such boundaries; choose a method"


def test_a_stream_without_boundaries_is_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(UsageError, match=REFUSAL):
        hf.run(hf.RunConfig.preset("mnist-360", "lwf"), device="cpu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["holdfast", "run", "mnist-360", "lwf"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert REFUSAL in " ".join(err.split())
    assert not out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"distillation": -1.0}, "distillation must be a finite number of at least 0, not -1.0"),
        ({"temperature": 0.0}, "temperature must be above 0, not 0.0"),
        ({"temperature": float("nan")}, "temperature must be above 0, not nan"),
        ({"buffer_size": 5}, "unknown option of WithoutForgetting 'buffer_size'"),
        ({"head": "classifier"}, "the head of WithoutForgetting cannot grow: leave out head="),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        lwf(network("mlp"), **options)
