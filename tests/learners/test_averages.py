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


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.last(self.first(x[..., None]).relu().mean(1))


@pytest.mark.parametrize(("kind", "options"), [(AsymmetricReplay, {}), (Ballast, {"asymmetric": True})])
def test_classes_that_will_not_be_stored_are_seen_as_well(kind, options):
    """With padding, only samples that will be stored are made ready for the buffer."""
    model = Mean()
    learner = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=2, padding={"x": 0.0}, **options)
    learner.observe(torch.rand(12, 5) + 0.1, torch.arange(12) % 6)
    assert learner.seen.all()
