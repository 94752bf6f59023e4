"""benchmarks/lwf_teachers.py: each variant of LwF changes what it says, and nothing else."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.augment import CropFlip, Normalize
from holdfast.bench import made_up
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.methods import LEARNERS
from holdfast.models import MODELS, ResNet18
from holdfast.rng import generator

CLASSES, LR = 4, 0.1
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
CONFIG = RunConfig.preset("seq-cifar10", "lwf", seed=3).change(epochs=3, batch_size=8, lr=LR)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module("lwf_teachers")
    del MODELS._entries["narrow"], LEARNERS._entries["lwf-variant"]
    del sys.modules["lwf_teachers"], sys.modules["long_runs"]


def samples(classes, count=20):
    draw = torch.Generator().manual_seed(sum(classes))
    images = torch.randint(256, (count, 3, 8, 8), generator=draw, dtype=torch.uint8)
    return ImageSet(images, torch.tensor(classes)[torch.arange(count) % len(classes)])


def learner_of(script, augment=None, **settings):
    """A learner before its first task of two."""
    torch.manual_seed(0)
    model = ResNet18((3, 8, 8), CLASSES, width=2)
    view = augment or CropFlip(Normalize(MEAN, STD), torch.Generator().manual_seed(1))
    learner = script.Variant(model, torch.optim.SGD(model.parameters(), lr=LR), augment=view, **settings)
    learner.config, learner.images_of = CONFIG, {classes: lambda c=classes: samples(c) for classes in ((0, 1), (2, 3))}
    return learner


def after_one_task(learner):
    """The learner when the second task is about to begin."""
    x, y = samples((0, 1))
    learner.begin_task((0, 1))
    for _ in range(3):
        learner.observe(x, y)
    learner.end_task(x, y)
    return learner


def state_of(learner):
    return {name: value.clone() for name, value in learner.model.state_dict().items()}


@pytest.mark.parametrize(("asked", "mean", "std"), [("image", MEAN, STD), ("pixels", (0, 0, 0), (1, 1, 1))])
def test_the_teacher_answers_as_if_it_were_noted_once(script, asked, mean, std):
    """The distillation of each step, from answers noted before the task to the images as they are."""
    learner = after_one_task(learner_of(script, asked=asked))
    x, y = samples((2, 3))
    learner.begin_task((2, 3))
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (mean, std))
    with torch.no_grad():
        noted = learner.teacher((x / 255 - mean) / std)
    seen = []
    learner.model.register_forward_hook(lambda model, given, answer: seen.append((given[0], answer.detach())))
    for step in range(4):
        batch = torch.arange(5) + 5 * step
        found = learner.observe(x[batch], y[batch])
        view, answer = seen.pop()
        target, now = (each[:, :2].div(2).softmax(1) for each in (noted[batch], answer))
        torch.testing.assert_close(found.distillation, -(target * now.log()).sum(1).mean(), rtol=1e-4, atol=1e-6)
        assert not torch.allclose(view, (x[batch] / 255 - mean) / std), "the network still sees a view"
    assert not learner.teacher.training


def test_ours_asks_about_the_view_that_the_network_sees(script):
    learner = after_one_task(learner_of(script))
    shown = {}
    for name in ("model", "teacher"):
        getattr(learner, name).register_forward_pre_hook(lambda _, given, name=name: shown.update({name: given[0]}))
    learner.begin_task((2, 3))
    learner.observe(*samples((2, 3)))
    assert torch.equal(shown["model"], shown["teacher"])


def test_the_warm_up_by_hand(script):
    """Plain gradient descent on the rows of the new classes; what is left of the network stays as it is, to the bit."""
    learner = after_one_task(learner_of(script, augment=Normalize(MEAN, STD), warmed=True))
    before = state_of(learner)
    x, y = samples((2, 3))
    learner.model.eval()
    with torch.no_grad():
        found = learner.model.features(Normalize(MEAN, STD)(x))
    learner.model.train()
    weight, bias = (before[f"classifier.{name}"][2:].double() for name in ("weight", "bias"))
    order = generator(CONFIG.seed, "warm-up [2, 3]", torch.device("cpu"))
    for _ in range(CONFIG.epochs):
        for batch in torch.randperm(len(y), generator=order).split(CONFIG.batch_size):
            wrong = (found[batch].double() @ weight.T + bias).softmax(1)
            wrong[torch.arange(len(batch)), y[batch] - 2] -= 1
            weight = weight - LR * wrong.T @ found[batch].double() / len(batch)
            bias = bias - LR * wrong.mean(0)
    learner.begin_task((2, 3))
    after = state_of(learner)
    torch.testing.assert_close(after["classifier.weight"][2:].double(), weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after["classifier.bias"][2:].double(), bias, rtol=1e-4, atol=1e-6)
    assert not torch.equal(after["classifier.weight"][2:], before["classifier.weight"][2:])
    for name, value in before.items():
        rows = 2 if name.startswith("classifier") else None
        assert torch.equal(after[name][:rows] if rows else after[name], value[:rows] if rows else value), name
    assert all(module.training for module in learner.model.modules())


@pytest.mark.parametrize("warmed", [True, False])
def test_the_first_task_has_no_warm_up_and_only_warmed_ones_have(script, warmed):
    learner = learner_of(script, warmed=warmed)
    before = state_of(learner)
    learner.begin_task((0, 1))
    assert all(torch.equal(value, before[name]) for name, value in state_of(learner).items())
    before = state_of(after_one_task(learner))
    learner.begin_task((2, 3))
    assert all(torch.equal(value, before[name]) for name, value in state_of(learner).items()) != warmed


@pytest.fixture
def tiny(script, monkeypatch):
    """Short runs on made-up images."""
    for name, value in {"tasks": 2, "epochs": 2, "batch_size": 8, "train_limit": 20}.items():
        monkeypatch.setitem(script.SMALL, name, value)
    made = made_up(script.config_of("seq-cifar10", "ours", 0), samples=20)
    monkeypatch.setattr(script, "make_benchmark", lambda config, root, device: made)
    monkeypatch.setattr(script, "TESTED", 30)
    return made


def test_each_variant_is_another_run_and_the_learner_as_it_is_is_ours(script, tiny):
    benchmark, found = script.small(tiny), {}
    assert {len(task.test.labels) for task in benchmark.tasks} == {30}
    for variant in script.VARIANTS:
        config = script.config_of("seq-cifar10", variant, 0)
        assert (config.lr, config.weight_decay) == (0.01, 0.001), "LwF's settings"
        assert config.method == {"ours": "lwf", "uncalled": "sgd"}.get(variant, "lwf-variant")
        found[variant] = script.teach(config, benchmark)
        if variant not in ("ours", "uncalled", "untaught"):
            assert dict(config.settings)["distillation"] == 3
    assert len({each["fingerprint"] for each in found.values()}) == len(found)
    plain = script.config_of("seq-cifar10", "ours", 0).change(method="lwf-variant")
    assert without_names(script.teach(plain, benchmark)) == without_names(found["ours"])


def without_names(found):
    return {name: value for name, value in found.items() if name not in ("fingerprint", "seconds")}


def test_what_the_runs_without_a_teacher_descend(script):
    """untaught: cross-entropy of the classes seen; uncalled is sgd: of all classes, from the first task on."""
    x, y = samples((0, 1))
    learner = learner_of(script, augment=Normalize(MEAN, STD), distillation=0.0)
    learner.begin_task((0, 1))
    outputs = learner.model(Normalize(MEAN, STD)(x)).detach()
    seen = learner.observe(x, y)
    chances = outputs[:, :2].softmax(1)[torch.arange(len(y)), y]
    torch.testing.assert_close(seen.total, -chances.log().mean())
    assert script.config_of("seq-mnist", "uncalled", 1) == replace(
        RunConfig.preset("seq-mnist", "sgd", seed=1), lr=0.03, batch_size=10, weight_decay=0.001
    )


def test_the_committed_runs_are_of_these_settings(script):
    file = Path(__file__).parents[1] / "results" / "second-opinion" / "lwf.jsonl"
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    runs = [line for line in lines if line["code"] == "holdfast"]
    assert {run["benchmark"] for run in runs} == {"seq-cifar10", "seq-mnist"}
    for run in runs:
        config = script.config_of(run["benchmark"], run["variant"], run["seed"])
        assert (config.fingerprint, config.epochs) == (run["fingerprint"], run["epochs"])
        assert run["task_il_accuracy"] == pytest.approx(sum(run["task_il"]) / 5, abs=0.01)
    assert script.config_of("seq-cifar10", "ours", 0, 5).epochs == 5


def test_a_line_for_each_run(script, tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lwf_teachers.py", "--variant", "together", "ours", "--seeds", "4", "5"])
    script.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["variant"], line["seed"]) for line in lines] == [
        (variant, seed) for seed in (4, 5) for variant in ("together", "ours")
    ]
    for line in lines:
        assert line["task_il_accuracy"] == pytest.approx(sum(line["task_il"]) / 2, abs=0.01)
