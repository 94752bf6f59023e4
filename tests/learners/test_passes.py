"""The passes that a learner names are those of its steps: kernels for them are compiled ahead."""

import pytest
import torch
from torch import nn

from holdfast.config import RunConfig
from holdfast.errors import TrainingError, UsageError
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


def plain(*middle):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), *middle, nn.ReLU(), nn.Linear(4, 5))


def made(model, method="consistency", **options):
    given = {"regularizer": "mse"} if method == "consistency" else {}
    return LEARNERS[method](model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=8, **given, **options)


@pytest.mark.parametrize("before", [nn.Identity, lambda: nn.BatchNorm1d(4).eval()], ids=["nothing", "frozen"])
def test_a_batchnorm_that_is_put_into_the_model_of_a_learner(before):
    """Before the first step, or after some: the same as if it had been there from the start."""
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 5
    reference, model = plain(nn.BatchNorm1d(4)), plain(before())
    expected, learner = made(reference), made(model)
    model[1] = nn.BatchNorm1d(4)
    learner.optimizer.add_param_group({"params": model[1].parameters()})
    for _ in range(3):
        assert learner.observe(x, y) == expected.observe(x, y)
    assert all(map(torch.equal, model.state_dict().values(), reference.state_dict().values()))
    group_batchnorm(model), group_batchnorm(reference)
    torch.testing.assert_close(learner.observe(x, y).total, expected.observe(x, y).total)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_a_step_that_is_refused_leaves_a_new_batchnorm_as_it_was():
    model = plain(nn.Identity())
    learner = made(model)
    learner.observe(torch.randn(6, 3), torch.arange(6) % 5)
    model[1] = nn.BatchNorm1d(4)
    with pytest.raises(TrainingError, match="not finite"):
        learner.observe(torch.full((6, 3), torch.nan), torch.arange(6) % 5)
    assert model[1].num_batches_tracked == 0
    assert model[1].running_mean.isfinite().all()


def test_a_method_with_copies_of_the_model_refuses_a_new_batchnorm():
    model = plain(nn.Identity())
    learner = made(model, "clser")
    model[1] = nn.BatchNorm1d(4)
    for _ in range(2):
        with pytest.raises(UsageError, match="ClsEr has networks of its own that do not follow"):
            learner.observe(torch.randn(6, 3), torch.arange(6) % 5)
