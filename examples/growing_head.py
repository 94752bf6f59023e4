"""A head that grows with new classes, on a backbone that stays as it is. A few seconds.

The backbone has learned, without labels, by how many quarter turns digits are turned. It is then frozen, and digits
arrive two by two. Nobody says how many there will be: the head begins with two outputs and grows as labels come.
"""

import torch
from torch import nn
from torch.nn import functional as F

import holdfast as hf
from holdfast import data

torch.set_num_threads(1)  # products this small are not worth sharing

train, test = data.load("mnist")[:2]


def view(images):
    return images.float() / 255


def pretrained():
    torch.manual_seed(0)
    backbone = nn.Sequential(
        *(nn.Conv2d(1, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Flatten(),
    )
    turns = nn.Linear(784, 4)
    optimizer = torch.optim.Adam([*backbone.parameters(), *turns.parameters()], lr=2e-3)
    for _ in range(150):
        parts = view(train.images[torch.randint(len(train.labels), (64,))]).chunk(4)
        turned = torch.cat([part.rot90(quarters, (2, 3)) for quarters, part in enumerate(parts)])
        optimizer.zero_grad()
        F.cross_entropy(turns(backbone(turned)), torch.arange(4).repeat_interleave(16)).backward()
        optimizer.step()
    return backbone.eval().requires_grad_(False)


def learn(backbone, outputs, **options):
    torch.manual_seed(1)
    model = nn.Sequential()
    model.add_module("backbone", backbone)
    model.add_module("classifier", nn.Linear(784, outputs))
    optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.01)
    learner = hf.ConsistencyReplay(
        model, optimizer, buffer_size=500, regularizer="linf", alpha=2.0, beta=0.5, augment=view, **options
    )
    widths = [model.classifier.out_features]
    for first in range(0, 10, 2):
        chosen = (train.labels // 2 == first // 2).nonzero().flatten()[:4000]
        for batch in torch.split(chosen, 32):
            learner.observe(train.images[batch], train.labels[batch])
        widths.append(model.classifier.out_features)
    return model, widths


@torch.no_grad()
def accuracy(model):
    return 100 * (model(view(test.images)).argmax(dim=1) == test.labels).float().mean().item()


if __name__ == "__main__":
    backbone = pretrained()
    fixed, _ = learn(backbone, outputs=10)
    growing, widths = learn(backbone, outputs=2, head="classifier")
    print(f"ten outputs from the start: {accuracy(fixed):.1f} %")
    print(f"a head that grew:           {accuracy(growing):.1f} %, with outputs", *widths)
