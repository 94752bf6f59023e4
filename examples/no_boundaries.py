"""A stream without boundaries: digits that turn a little further with every minibatch. A few seconds.

There are no tasks. At the end the network is asked about digits at every angle it has seen on the way.
"""

import torch
from torch import nn

import holdfast as hf
from holdfast import data
from holdfast.benchmarks.rotation import rotate

torch.set_num_threads(1)  # products this small are not worth sharing

STEPS, TURN = 450, 180  # minibatches, degrees in all

train, test = data.load("mnist")[:2]


def view(images):
    return images.float() / 255


def stream():
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(0))
    for step, batch in enumerate(torch.split(order, 64)[:STEPS]):
        yield rotate(train.images[batch], TURN * step / STEPS), train.labels[batch]


def train_model(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = hf.ConsistencyReplay(model, optimizer, augment=view, regularizer="mse", **options)
    for x, y in stream():
        learner.observe(x, y)
    return model


@torch.no_grad()
def accuracy(model, angle):
    answers = model(view(rotate(test.images[:2000], angle))).argmax(dim=1)
    return 100 * (answers == test.labels[:2000]).float().mean().item()


if __name__ == "__main__":
    angles = range(0, TURN, 30)
    print("accuracy by angle, oldest first, in percent")
    print(" " * 18, *(f"{angle:4}°" for angle in angles))
    runs = {
        "forgets": {"buffer_size": 1, "alpha": 0.0, "beta": 0.0},
        "replay": {"buffer_size": 300, "alpha": 0.5, "beta": 0.0},
        "and consistency": {"buffer_size": 300, "alpha": 0.5, "beta": 1.0},
    }
    for name, options in runs.items():
        model = train_model(**options)
        print(f"{name:>18}", *(f"{accuracy(model, angle):5.1f}" for angle in angles))
