"""Your own model and your own stream: sensor readings whose meaning keeps changing.

A model in production classifies readings of 20 sensors. Machines of new kinds arrive one pair after the other; nobody
announces them, and old readings cannot be kept, except for 100. About ten seconds.
"""

import torch
from torch import nn

import holdfast as hf

torch.set_num_threads(1)  # products this small are not worth sharing

KINDS, SENSORS, STEPS = 8, 20, 250

torch.manual_seed(0)
centres = torch.randn(KINDS, SENSORS)


def readings(kinds, count):
    y = torch.tensor(kinds)[torch.randint(len(kinds), (count,))]
    return centres[y] + 0.8 * torch.randn(count, SENSORS), y


def stream():
    for first in range(0, KINDS, 2):
        for _ in range(STEPS):
            yield readings([first, first + 1], 32)


def train(make_learner):
    """The accuracy on each pair of kinds after the whole stream, in percent."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(SENSORS, 64), nn.ReLU(), nn.Linear(64, KINDS))
    step = make_learner(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for x, y in stream():
        step(x, y)
    x, y = readings(list(range(KINDS)), 4000)
    right = (model(x).argmax(dim=1) == y).float()
    return [100 * right[y // 2 == pair].mean().item() for pair in range(KINDS // 2)]


def plain(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def with_holdfast(model, optimizer):
    learner = hf.ConsistencyReplay(model, optimizer, buffer_size=100, regularizer="linf", beta=0.5)
    return learner.observe


if __name__ == "__main__":
    print("accuracy on each pair of kinds after the last, in percent")
    for name, make in (("plain", plain), ("holdfast", with_holdfast)):
        print(f"{name:>9}", *(f"{value:6.1f}" for value in train(make)))
