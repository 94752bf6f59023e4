"""Whether the answers of a model can be believed: analyses on the logits of any model. About ten seconds.

The model here is a plain network on digits that it learned two by two, once with replay alone and once with the
consistency term. Yours may come from anywhere: the functions take logits and labels. Each number is explained where it
is printed.
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
    right = 100 * (logits.argmax(dim=1) == test.labels).float().mean()
    print(f"{name}: {right:.1f} % right")

    # Does it know how sure it may be? Confidence is the probability of the class it names.
    found = analysis.calibration(logits, test.labels)
    sure = 100 * sum(c * n for c, n in zip(found.confidence, found.count, strict=True)) / len(logits)
    verdict = (
        "as sure as it may be" if abs(sure - right) < 3 else "too sure" if sure > right else "less sure than it may be"
    )
    print(f"  says it is {sure:.1f} % sure, so it is {verdict}; calibration error {found.ece:.1f} %")

    # Does it prefer what it learned last? The test set has equally many digits of each task.
    shares = analysis.recency(logits, TASKS).task_probabilities
    print("  belief by task    ", *(f"{share:.2f}" for share in shares), "(0.20 each is fair)")
    print(f"  the last task gets {shares[-1] / min(shares):.1f} times the belief of the task it believes in least")

    # Does it still work when images get worse? Severity 1 is slight, 5 is strong.
    few = slice(0, 1000)
    robust = analysis.robustness(
        lambda images: model(view(images)),
        test.images[few],
        test.labels[few],
        ["gaussian_noise", "contrast"],
        [1, 3, 5],
    )
    for corruption, values in robust.accuracy.items():
        print(f"  under {corruption:<14}", *(f"{value:.0f} %" for value in values), "right at severity 1, 3, 5")


if __name__ == "__main__":
    report("replay alone", train_model(beta=0.0))
    report("with consistency", train_model(beta=0.5))
    print("""
What this says: the consistency term makes the network right more often, spreads its belief more evenly over old and new
digits, and makes it sturdier. Its probabilities are too low: it is right more often than it claims, because it is held
near answers that it gave when it had seen little and was less sure. Where probabilities matter, rescale them with a
temperature that is found on held-out samples.""")
