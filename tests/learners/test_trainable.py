"""Checkpoints without frozen weights, as for LoRA: small, exact, and refused by another model."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.learners.saving import without_frozen
from learners.conftest import assert_same_state, network, stream


def learner_on(model, **options):
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    return hf.ConsistencyReplay(model, optimizer, buffer_size=20, regularizer="kl", **options)


def partly_frozen(kind="batchnorm", layers=1):
    model = network(kind)
    for layer in list(model.children())[:layers]:
        layer.requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", ["mlp", "batchnorm"])
def test_a_learner_goes_on_exactly_from_its_trainable_weights(kind, tmp_path):
    learner, other = learner_on(partly_frozen(kind)), learner_on(partly_frozen(kind))
    batches = list(stream(8))
    for x, y in batches[:4]:
        learner.observe(x, y)
    learner.save(tmp_path / "part", {"step": 4}, trainable_only=True)
    learner.save(tmp_path / "whole")
    assert (tmp_path / "part").stat().st_size < (tmp_path / "whole").stat().st_size
    assert other.load(tmp_path / "part") == {"step": 4}
    assert_same_state(learner.model, other.model, rtol=0, atol=0)  # BatchNorm's statistics among it
    for x, y in batches[4:]:
        assert learner.observe(x, y) == other.observe(x, y)


def test_frozen_weights_are_not_in_the_state():
    learner = learner_on(partly_frozen())
    state = without_frozen(learner, learner.state_dict())
    frozen = {name for name, each in learner.model.named_parameters() if not each.requires_grad}
    assert frozen
    assert state["frozen"].keys() == frozen
    assert state["model"].keys() == learner.model.state_dict().keys() - frozen


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: model.requires_grad_(True), r"weights: 0.weight is \(4, 1, 3, 3\) in the file and missing here"),
        (lambda model: model[3].requires_grad_(False), r"3.weight is missing in the file and \(6, 4, 3, 3\) here"),
        (
            lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(4, 1, 5, 5), requires_grad=False)),
            r"frozen weights: 0.weight is \(4, 1, 3, 3\) in the file and \(4, 1, 5, 5\) here",
        ),
        (lambda model: setattr(model, "7", nn.Linear(54, 9).double()), r"7.bias is \(5,\) .* in the file and \(9,\)"),
    ],
)
def test_another_model_is_refused_and_stays_as_it_is(change, says, tmp_path):
    learner_on(partly_frozen()).save(tmp_path / "file", trainable_only=True)
    model = partly_frozen()
    change(model)
    learner = learner_on(model)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(UsageError, match=says):
        learner.load(tmp_path / "file")
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_tied_weights_that_are_frozen(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
            self.head.weight = self.embed.weight
            self.embed.requires_grad_(False)

        def forward(self, x):
            return self.head(self.body(self.embed(x)))

    torch.manual_seed(0)
    learner = learner_on(Tied(), class_dim=-1)
    x = torch.randint(7, (4, 5))
    learner.observe(x, hf.next_tokens(x))
    learner.save(tmp_path / "file", trainable_only=True)
    other = learner_on(Tied(), class_dim=-1)
    other.model.embed.weight.copy_(learner.model.embed.weight)
    other.load(tmp_path / "file")
    assert learner.observe(x, hf.next_tokens(x)) == other.observe(x, hf.next_tokens(x))
    assert set(without_frozen(learner, learner.state_dict())["frozen"]) == {"embed.weight", "head.weight"}


COPIES = {
    "lwf": ["teacher"],
    "icarl": ["teacher", "nearest"],
    "ballast": ["average"],
    "clser": ["stable", "plastic"],
    "esmer": ["stable"],
}


@pytest.mark.parametrize(("name", "copies"), COPIES.items())
def test_copies_of_the_model_come_back_without_its_frozen_weights(name, copies, tmp_path):

    def made():
        model = partly_frozen("mlp")
        options = {"buffer_size": 20} if hf.LEARNERS[name].needs_buffer else {}
        return hf.LEARNERS[name](model, torch.optim.Adam(model.parameters(), lr=0.01), **options)

    learner, other = made(), made()
    batches = list(stream(8))
    learner.begin_task(range(5))
    for x, y in batches[:4]:
        learner.observe(x, y)
    learner.end_task(x, y)
    state = without_frozen(learner, learner.state_dict())
    assert all("hidden1.weight" not in state["extra"][each] for each in copies)
    learner.save(tmp_path / "file", trainable_only=True)
    other.load(tmp_path / "file")
    for each in copies:
        assert_same_state(getattr(learner, each), getattr(other, each), rtol=0, atol=0)
    for x, y in batches[4:]:
        assert learner.observe(x, y) == other.observe(x, y)


def test_a_copy_whose_frozen_weights_are_its_own_keeps_them(tmp_path):
    """The nearest mean of exemplars is the answer of iCaRL, whatever the last layer of its model is."""

    def made():
        model = network("mlp")
        model.classifier.requires_grad_(False)
        return hf.LEARNERS["icarl"](model, torch.optim.Adam(model.parameters(), lr=0.01), buffer_size=20)

    learner, other = made(), made()
    x, y = next(stream(1))
    learner.begin_task(range(5))
    learner.observe(x, y)
    learner.end_task(x, y)
    learner.save(tmp_path / "file", trainable_only=True)
    other.load(tmp_path / "file")
    assert_same_state(learner.nearest, other.nearest, rtol=0, atol=0)
