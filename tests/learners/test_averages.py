"""Averaged networks are in the mode of the network that is trained, whatever was done to them, and move."""

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.learners import AsymmetricReplay, Ballast, ClsEr, Esmer
from learners.conftest import Convolutions, stream


@pytest.mark.parametrize("kind", [Ballast, ClsEr, Esmer])
def test_averages_keep_learning_after_a_test(kind):
    """Their BatchNorm statistics come from draws in training mode."""
    states = []
    for case in ("usual", "made in evaluation mode", "tested by hand"):
        torch.manual_seed(0)
        model = Convolutions().double()
        model.train(case != "made in evaluation mode")
        learner = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20, seed=1)
        model.train()
        for step, (x, y) in enumerate(stream(6)):
            if step == 3 and case == "tested by hand":
                learner.evaluated().eval()
            learner.observe(x, y)
        states.append(learner.evaluated().state_dict())
    assert states[0]["norm.num_batches_tracked"] > 3
    for other in states[1:]:
        assert all(torch.equal(each, states[0][name]) for name, each in other.items())


def test_frozen_parts_stay_frozen():
    model = Convolutions().double()
    learner = Ballast(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20)
    model.norm.eval()
    for x, y in stream(4):
        learner.observe(x, y)
    assert not learner.average.norm.training
    assert learner.average.norm.num_batches_tracked == 0


@pytest.mark.parametrize("kind", [Ballast, ClsEr, Esmer])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_an_average_would_stand_still(kind, dtype):
    model = Convolutions().to(dtype)
    with pytest.raises(UsageError, match='keep the model in float32, and give precision="bfloat16"'):
        kind(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20)
    kind(
        model,
        torch.optim.SGD(model.requires_grad_(False).classifier.float().requires_grad_().parameters()),
        buffer_size=20,
    )


class Quantized(nn.Module):
    """Has frozen weights, one of them of whole numbers."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Parameter(torch.randint(-3, 4, (36, 36), dtype=torch.int8), requires_grad=False)
        self.first, self.last = nn.Linear(36, 36).requires_grad_(False), nn.Linear(36, 6)

    def forward(self, x):
        return self.last(self.first(x.flatten(1)) @ self.mixed.float())


@pytest.mark.parametrize(("kind", "options"), [(Ballast, {}), (ClsEr, {"stable_rate": 1.0}), (Esmer, {"rate": 1.0})])
def test_frozen_weights_of_any_type_stay_the_same_to_the_last_bit(kind, options):
    model = Quantized()
    learner = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20, **options)
    for x, y in stream(6, dtype=torch.float32):
        learner.observe(x, y)
    assert torch.equal(learner.evaluated().mixed, model.mixed)
    assert torch.equal(learner.evaluated().first.weight, model.first.weight)
    assert not torch.equal(learner.evaluated().last.weight, model.last.weight)


def test_a_weight_that_is_frozen_later_is_reached_in_the_end():
    model = Convolutions().double()
    learner = Ballast(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20, decay=0.5)
    for step, (x, y) in enumerate(stream(40)):
        learner.observe(x, y)
        if step == 3:
            model.conv.requires_grad_(False)
            assert not torch.allclose(learner.average.conv.weight, model.conv.weight)
    torch.testing.assert_close(learner.average.conv.weight, model.conv.weight, rtol=1e-9, atol=1e-12)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.last(self.first(x[..., None]).relu().mean(1))


def test_classes_that_will_not_be_stored_are_seen_as_well():
    """With padding, only samples that will be stored are made ready for the buffer."""
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = AsymmetricReplay(model, optimizer, buffer_size=2, padding={"x": 0.0})
    learner.observe(torch.rand(12, 5) + 0.1, torch.arange(12) % 6)
    assert learner.seen.all()
