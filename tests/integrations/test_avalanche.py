"""The Avalanche recipe, executed against a stand-in with the interface and the order of calls of Avalanche 0.6.

Avalanche itself needs torchvision, whose wheels do not load beside every torch.
"""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import holdfast as hf

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "avalanche.md"


class SupervisedPlugin:
    """Every callback does nothing unless a plugin says otherwise."""

    def __getattr__(self, name):
        if re.fullmatch("(before|after)_[a-z_]+", name):
            return lambda strategy, *args, **kwargs: None
        raise AttributeError(name)


class Naive:
    """Avalanche's loop for one experience: what it calls when, and what a plugin finds on the strategy."""

    def __init__(self, *, model, optimizer, criterion, train_mb_size=1, train_epochs=1, plugins=None, device="cpu"):
        self.model, self.optimizer, self._criterion = model, optimizer, criterion
        self.train_mb_size, self.train_epochs, self.plugins, self.device = train_mb_size, train_epochs, plugins, device

    mb_x = property(lambda self: self.mbatch[0])
    mb_y = property(lambda self: self.mbatch[1])

    def call(self, *names):
        for name in names:
            for plugin in self.plugins:
                getattr(plugin, name)(self)

    def train(self, experience):
        self.model.train()
        self.call("before_training", "before_training_exp")
        for _ in range(self.train_epochs):
            self.call("before_training_epoch")
            for batch in experience.batches(self.train_mb_size):
                self.mbatch = batch
                self.call("before_training_iteration")
                self.optimizer.zero_grad()
                self.loss = torch.zeros(1)
                self.call("before_forward")
                self.mb_output = self.model(self.mb_x)
                self.call("after_forward")
                self.loss += self._criterion(self.mb_output, self.mb_y)
                self.call("before_backward")
                self.loss.backward()
                self.call("after_backward", "before_update")
                self.optimizer.step()
                self.call("after_update", "after_training_iteration")
            self.call("after_training_epoch")
        self.call("after_training_exp", "after_training")


@pytest.fixture
def avalanche(monkeypatch):
    """`import avalanche` finds the stand-in."""
    modules = {name: ModuleType(name) for name in ("avalanche", "avalanche.training", "avalanche.training.plugins")}
    modules["avalanche.training"].Naive = Naive
    modules["avalanche.training.plugins"].SupervisedPlugin = SupervisedPlugin
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def experience(seed):
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(96, 6, generator=draw), torch.randint(0, 10, (96,), generator=draw)
    return SimpleNamespace(batches=lambda size: list(zip(x.split(size), y.split(size), strict=True)))


def test_the_recipe_does_what_the_learner_does(avalanche):
    stream = [experience(seed) for seed in range(3)]
    scope = {"model": network(), "benchmark": SimpleNamespace(train_stream=stream)}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, scope)

    model = network()
    learner = hf.ConsistencyReplay(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        buffer_size=500,
        regularizer="linf",
        alpha=0.5,
        beta=0.2,
        generator=torch.Generator(),
    )
    for part in stream:
        for x, y in part.batches(32):
            learner.observe(x, y)
    (plugin,) = scope["strategy"].plugins
    assert plugin.buffer.offered == 3 * 96
    assert torch.equal(plugin.buffer.contents().x, learner.buffer.contents().x)
    for name, value in scope["model"].state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-5), name
