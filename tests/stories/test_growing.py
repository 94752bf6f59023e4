"""A user's story: features from a frozen network, and a head that learns of digits as they appear."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdfast as hf
from stories.digits import accuracy, digits, pairs, scaled

SEEDS = 3


@pytest.fixture(scope="module")
def extractor() -> nn.Module:
    """A small convolutional network that has learned, without labels, by how many quarter turns images are turned."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(
            *(nn.Conv2d(1, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
            nn.Flatten(),
        )
        turns = nn.Linear(784, 4)
        optimizer = torch.optim.Adam([*body.parameters(), *turns.parameters()], lr=2e-3)
        for _ in range(150):
            images, k = scaled(digits().train.images[torch.randint(60_000, (64,))]), torch.randint(0, 4, (64,))
            turned = torch.stack(
                [image.rot90(int(quarters), (1, 2)) for image, quarters in zip(images, k, strict=True)]
            )
            optimizer.zero_grad()
            F.cross_entropy(turns(body(turned)), k).backward()
            optimizer.step()
    return body.eval().requires_grad_(False)


def learn(extractor: nn.Module, outputs: int, seed: int, **options) -> tuple[float, hf.ConsistencyReplay]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential()
        model.add_module("features", extractor)
        model.add_module("classifier", nn.Linear(784, outputs))
    optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.01)
    learner = hf.ConsistencyReplay(
        model, optimizer, buffer_size=500, regularizer="linf", alpha=2.0, beta=0.5, augment=scaled, seed=seed, **options
    )
    for x, y in pairs(2000, seed):
        learner.observe(x, y)
    return accuracy(model), learner


def test_a_growing_head_ends_where_a_fixed_one_does(extractor):
    before = {name: value.clone() for name, value in extractor.state_dict().items()}
    fixed, growing = [], []
    for seed in range(SEEDS):
        fixed.append(learn(extractor, 10, seed)[0])
        percent, learner = learn(extractor, 2, seed, head="classifier")
        growing.append(percent)
        assert learner.model.classifier.weight.shape == (10, 784)
        assert learner.buffer.contents().logits.shape == (500, 10)
    assert min(fixed + growing) > 80
    assert abs(sum(growing) - sum(fixed)) / SEEDS < 1, (fixed, growing)
    assert all(torch.equal(before[name], value) for name, value in extractor.state_dict().items())
