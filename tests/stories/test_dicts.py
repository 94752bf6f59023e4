"""A user's story: samples of several tensors. Two cameras see one half of each digit."""

import pytest
import torch
from torch import nn

import holdfast as hf
from stories.digits import accuracy, pairs, scaled


class Cameras(nn.Module):
    """A network for what two cameras see."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(torch.cat([x["left"], x["right"]], dim=3))


def halves(images):
    return {"left": images[..., :14], "right": images[..., 14:]}


def scaled_halves(x):
    return {side: scaled(x[side]) for side in x}


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def make(kind, model, view):
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=500, augment=view, replay_size=32)


@pytest.mark.parametrize("kind", [hf.ExperienceReplay, hf.ConsistencyReplay])
def test_two_cameras_teach_what_one_does(kind, tmp_path):
    whole, model = network(), Cameras(network())
    learner, cameras = make(kind, whole, scaled), make(kind, model, scaled_halves)
    for number, (x, y) in enumerate(pairs(1000, seed=0)):
        learner.observe(x, y)
        cameras.observe(halves(x), y)
        if number == 70:  # a new process goes on with what was saved
            cameras.save(tmp_path / "learner")
            model = Cameras(network())
            cameras = make(kind, model, scaled_halves)
            cameras.load(tmp_path / "learner")
    assert all(map(torch.equal, whole.parameters(), model.parameters()))
    assert accuracy(model, lambda images: scaled_halves(halves(images))) == accuracy(whole) > 75
