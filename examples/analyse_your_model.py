"""Whether the answers of a model can be believed: analyses on the logits of any model. About ten seconds.

The model here is a plain network on digits that learned two by two. Yours may come from anywhere: the functions take
logits and labels.
"""

import torch
from torch import nn

import holdfast as hf
from holdfast import analysis, data

torch.set_num_threads(1)  # products this small are not worth sharing

TASKS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]

train, test = data.load("mnist")[:2]


def view(images):
    return images.float() / 255


def train_model(beta):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    learner = hf.ConsistencyReplay(model, optimizer, buffer_size=200, regularizer="linf", beta=beta, augment=view)
    for classes in TASKS:
        chosen = torch.isin(train.labels, torch.tensor(classes)).nonzero().flatten()[:3000]
        for batch in torch.split(chosen, 32):
            learner.observe(train.images[batch], train.labels[batch])
    return model


@torch.no_grad()
def report(name, model):
    logits = model(view(test.images))
    calibration = analysis.calibration(logits, test.labels)
    recency = analysis.recency(logits, TASKS)
    few = slice(0, 1000)
    robust = analysis.robustness(
        lambda images: model(view(images)),
        test.images[few],
        test.labels[few],
        ["gaussian_noise", "contrast"],
        [1, 3, 5],
    )
    right = (logits.argmax(dim=1) == test.labels).float().mean()
    print(f"{name}: {100 * right:.1f} % right")
    sure = sum(c * n for c, n in zip(calibration.confidence, calibration.count, strict=True)) / len(logits)
    print(f"  confidence {100 * sure:.1f} %, calibration error {calibration.ece:.1f} %")
    print("  belief by task    ", *(f"{share:.2f}" for share in recency.task_probabilities), "(0.2 each is fair)")
    for corruption, values in robust.accuracy.items():
        print(f"  under {corruption:<13}", *(f"{value:.0f} %" for value in values), "at severity 1, 3, 5")


if __name__ == "__main__":
    report("replay alone", train_model(beta=0.0))
    report("with consistency", train_model(beta=0.5))
