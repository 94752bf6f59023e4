"""The passes that a learner names are those of its steps: kernels for them are compiled ahead."""

import pytest
import torch
from torch import nn

from holdfast.config import RunConfig
from holdfast.learners import LEARNERS, Parts, make_learner
from holdfast.models import GroupedBatchNorm, ResNet18, group_batchnorm
from holdfast.rng import generator


@pytest.mark.parametrize("method", [*(name for name in LEARNERS if name != "consistency"), "mse", "simclr"])
def test_every_pass_is_named(method):
    config = RunConfig.preset("seq-cifar10", method, buffer_size=16).change(batch_size=8, replay_size=8)
    model = group_batchnorm(ResNet18((3, 8, 8), 10, width=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    learner = make_learner(config, Parts(model, optimizer, lambda x: x, generator(0, "buffer")))
    found = set()

    def note(norm, inputs):
        if norm.training:  # kernels of our own are for training
            found.add((len(inputs[0]) // 8, len(norm.groups.sizes) or 1))

    networks = [learner.model, *(each for each in learner.extra_state().values() if isinstance(each, nn.Module))]
    for norm in [each for network in networks for each in network.modules() if isinstance(each, GroupedBatchNorm)]:
        norm.register_forward_pre_hook(note)
    for task in range(2):
        learner.begin_task((2 * task, 2 * task + 1))
        for _ in range(3):
            x, y = torch.randn(8, 3, 8, 8), torch.randint(2 * task, 2 * task + 2, (8,))
            learner.observe(x, y)
        learner.end_task(x, y)
    slow_draws = {(2, 1)} if method == "dualnet" else set()  # of a size of their own
    assert found == set(learner.passes) | slow_draws
