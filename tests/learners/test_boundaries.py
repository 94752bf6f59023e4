"""What is told at the beginning and end of a task: any input that a step takes, checked as in a step."""

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.learners import EpisodicGem, FunctionDistance, Icarl, OnlineEwc, WithoutForgetting
from learners.conftest import CLASSES, Convolutions, network, stream


class Named(Convolutions):
    """A network whose input has a name."""

    def features(self, x):
        return super().features(x["image"])


def made(kind, model, **options):
    given = {"buffer_size": 20} if kind.needs_buffer else {}
    learner = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), **given, **options)
    learner.begin_task(tuple(range(CLASSES)))
    return learner


@pytest.mark.parametrize("kind", [OnlineEwc, FunctionDistance, EpisodicGem, Icarl, WithoutForgetting])
def test_inputs_with_names_and_labels_of_any_whole_type(kind):
    weights = []
    for named in (False, True):
        torch.manual_seed(0)
        learner = made(kind, (Named if named else Convolutions)().double())
        for step, (x, y) in enumerate(stream(4)):
            given = {"image": x} if named else x
            learner.observe(given, y)
            if step == 1:
                learner.end_task(given, y.to(torch.uint8) if named else y)
        weights.append(list(learner.model.parameters()))
    for plain, with_names in zip(*weights, strict=True):
        assert torch.equal(plain, with_names)


@pytest.mark.parametrize("kind", [OnlineEwc, FunctionDistance, EpisodicGem, Icarl])
def test_samples_of_a_task_are_checked(kind):
    learner = made(kind, Convolutions().double())
    x, y = next(stream(1))
    with pytest.raises(UsageError, match="8 inputs need as many labels"):
        learner.end_task(x, y[:5])


def test_fdr_shows_batchnorm_no_single_sample():
    learner = made(FunctionDistance, Convolutions().double())
    x, y = next(stream(1, size=129))
    learner.end_task(x, y)
    assert learner.buffer.offered == 129


@pytest.mark.parametrize("kind", [WithoutForgetting, Icarl])
def test_classes_must_name_outputs(kind):
    learner = made(kind, Convolutions().double())
    learner.begin_task(torch.tensor([0, 1]))
    for wrong in ((CLASSES,), (-1,)):
        with pytest.raises(UsageError, match=f"none for {wrong[0]}"):
            learner.begin_task(wrong)


def test_icarl_wants_a_beginning_and_its_last_layer():
    x, y = next(stream(1))
    model = Convolutions().double()
    learner = Icarl(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20)
    with pytest.raises(UsageError, match="no task has begun"):
        learner.end_task(x, y)
    model = Convolutions().double()
    model.rotation = nn.Linear(16, CLASSES, dtype=torch.float64)
    learner = made(Icarl, model)
    learner.observe(x, y)
    with pytest.raises(UsageError, match="must return its last nn"):
        learner.end_task(x, y)


class Recurrent(nn.Module):
    """Its layer cannot be computed for many sets of weights at once."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(6, 7, batch_first=True), nn.Linear(7, CLASSES)

    def forward(self, x):
        return {"scores": self.head(self.layer(x.squeeze(1))[0][:, -1])}


def test_ewc_of_a_recurrent_network_with_named_outputs():
    torch.manual_seed(0)
    model = Recurrent().double()
    learner = made(OnlineEwc, model, outputs=lambda returned: returned["scores"])
    x, y = next(stream(1))
    learner.end_task(x, y)
    wanted = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for one, label in zip(x, y, strict=True):
        log = model(one[None])["scores"].log_softmax(1)[0, label]
        for (name, _), slope in zip(
            model.named_parameters(), torch.autograd.grad(log, list(model.parameters())), strict=True
        ):
            wanted[name] += log.detach().exp() * slope**2 / len(y)
    for name, each in learner.importances.items():
        torch.testing.assert_close(each, wanted[name])


def test_gem_forgets_samples_and_keeps_the_tasks_of_others():
    learner = made(EpisodicGem, network("mlp"))
    seen = {}
    for task, (x, y) in enumerate(stream(3)):
        learner.observe(x, y)
        learner.end_task(x, y)
        seen |= {each.numpy().tobytes(): task for each in x}
    marked = learner.buffer.contents().y == 1
    assert learner.forget(marked) == int(marked.sum()) > 0
    stored = learner.buffer.contents().x
    assert learner.tasks[: len(stored)].tolist() == [seen[each.numpy().tobytes()] for each in stored]
    assert set(learner.tasks[len(stored) :].tolist()) == {-1}
    learner.observe(x, y)
    learner.forget_all()
    assert learner.forget(lambda stored: stored.y == 0) == 0
    learner.end_task(x, y)
    assert set(learner.tasks.tolist()) == {0, -1}
    learner.observe(x, y)
