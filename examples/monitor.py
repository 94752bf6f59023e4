"""Watching for forgetting: held-out digits, measured again and again while others are learned. A few seconds.

Two networks learn digits two by two, one with 10 stored samples, one with 500 and the consistency term. A monitor keeps
an eye on each pair after it was learned, and warns as soon as one is being lost.
"""

import warnings

import torch
from torch import nn

import holdfast as hf
from holdfast import data

torch.set_num_threads(1)  # products this small are not worth sharing
warnings.simplefilter("ignore", hf.ForgettingWarning)  # on_drop tells instead

train, test = data.load("mnist")[:2]


def view(images):
    return images.float() / 255


def tell(reading):
    print(f"  step {reading.step}: '{reading.slice}' has lost {reading.drop:.0f} points")


def learn(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    learner = hf.ConsistencyReplay(model, optimizer, regularizer="linf", augment=view, **options)
    monitor = hf.ForgettingMonitor(model, drop=20.0, every=25, view=view, on_drop=tell)
    for first in range(0, 10, 2):
        chosen = (train.labels // 2 == first // 2).nonzero().flatten()[:4000]
        for batch in torch.split(chosen, 32):
            learner.observe(train.images[batch], train.labels[batch])
            monitor.observe()
        held_out = test.labels // 2 == first // 2
        monitor.add(f"digits {first} and {first + 1}", test.images[held_out][:500], test.labels[held_out][:500])
    return monitor


if __name__ == "__main__":
    for name, options in (
        ("10 stored samples", {"buffer_size": 10, "beta": 0.0}),
        ("500, with consistency", {"buffer_size": 500, "beta": 0.5}),
    ):
        print(name)
        monitor = learn(**options)
        print(monitor.table())
