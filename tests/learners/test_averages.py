"""Averaged networks that are evaluated are in the mode of the network that is trained, whatever was done to them."""

import pytest
import torch

from holdfast.learners import Ballast, ClsEr, Esmer
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
