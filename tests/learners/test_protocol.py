"""Twenty-four steps beside the paper's protocol written a second time, in plain PyTorch and without Holdfast.

Each minibatch has a forward pass of its own. BatchNorm, cross-entropy and SGD are PyTorch's, and the logits of earlier
samples are remembered apart from the buffer. Both programs begin with the same weights. The second one is told which
samples were drawn and what the network was shown of them, because it cannot draw the same ones.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from holdfast.augment import CropFlip, Normalize
from holdfast.config import RunConfig
from holdfast.learners import ConsistencyReplay, ExperienceReplay, Parts, Sgd, make_learner, make_optimizer
from holdfast.models import group_batchnorm
from learners.conftest import record

CLASSES, BATCH, SHORT = 6, 16, 12
LR, ALPHA, BETA, BUFFER = 0.05, 0.5, 0.2, 50


def network() -> nn.Module:
    """Convolutions with BatchNorm, always with the same weights; inputs are (B, 3, 8, 8)."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, CLASSES),
        )


def minibatches():
    """Twenty-four of new images each, of two tasks; every fifth is a short one, as at the end of an epoch."""
    draw = torch.Generator().manual_seed(0)
    for step in range(24):
        size = SHORT if step % 5 == 4 else BATCH
        images = torch.randint(0, 256, (size, 3, 8, 8), generator=draw, dtype=torch.uint8)
        yield images, torch.randint(0, 3, (size,), generator=draw) + 3 * (step // 12)


# --- the terms as protocol.md states them: c are the logits now, s those that were stored ----------------------------


def unit(rows):
    return F.normalize(rows, dim=1)


def information(c, s):
    """Minus the mutual information of the two answers."""
    p = (c.softmax(1).unsqueeze(2) * s.softmax(1).unsqueeze(1)).sum(0)
    p = (p + p.t()) / 2
    p = p / p.sum()
    p = p.clamp(min=torch.finfo(p.dtype).eps)
    rows, columns = p.sum(1).view(-1, 1).expand_as(p), p.sum(0).view(1, -1).expand_as(p)
    return -(p * (p.log() - rows.log() - columns.log())).sum()


def nt_xent(c, s):
    """-log(exp(positive) / sum of exp(all others)), for each of the 2B rows."""
    rows = torch.cat([unit(c), unit(s)])
    similarity = torch.exp(rows @ rows.t() / 0.5)
    others = similarity.sum(1) - similarity.diagonal()
    positive = torch.exp((unit(c) * unit(s)).sum(1) / 0.5)
    return -torch.log(torch.cat([positive, positive]) / others).mean()


def twins(c, s):
    """Half the squared distance of the diagonal from 1, and a twentieth of the squares beside it."""
    x = unit(c).t() @ unit(s) / len(c)
    beside = ~torch.eye(len(x), dtype=torch.bool)
    return 0.5 * (x.diagonal() - 1).pow(2).sum() + 0.05 * x[beside].pow(2).sum()


TERMS = {
    "l1": lambda c, s: (c - s).abs().sum(1).mean(),
    "l2": lambda c, s: torch.norm(c - s, p=2, dim=1).mean(),
    "linf": lambda c, s: torch.norm(c - s, p=float("inf"), dim=1).mean(),
    "mse": lambda c, s: F.mse_loss(c, s),
    "kl": lambda c, s: (s.softmax(1) * (s.log_softmax(1) - c.log_softmax(1))).sum() / c.numel(),
    "mi": information,
    "simclr": nt_xent,
    "byol": lambda c, s: (2 - 2 * (unit(c) * unit(s)).sum(1)).mean(),
    "dino": lambda c, s: -((unit(s) / 0.06).softmax(1) * (unit(c) / 0.1).log_softmax(1)).sum(1).mean(),
    "barlow": twins,
    "simsiam": lambda c, s: -(unit(c) * unit(s)).sum(1).mean(),
}


METHODS = ("sgd", "er", *TERMS)
ROUNDED = ("kl", "mi", "simclr")
"""Methods whose term the two programs compute by different operations."""


class Protocol:
    """The protocol, one step after another."""

    def __init__(self, model, method):
        self.model, self.method = model, method
        self.sgd = torch.optim.SGD(model.parameters(), lr=LR)
        self.logits = {}  # by image: no image comes twice

    def step(self, images, labels, draws, views):
        """The loss; `views` are what the network is shown of the minibatch and of each draw."""
        if self.method == "er" and draws:
            outputs = self.model(torch.cat(views))
            loss = F.cross_entropy(outputs, torch.cat([labels, draws[0].y]))
        else:
            outputs = self.model(views[0])
            loss = F.cross_entropy(outputs, labels)
            if draws:
                first, second = draws
                consistency = TERMS[self.method](
                    self.model(views[1]), torch.stack([self.logits[i] for i in keys(first.x)])
                )
                loss = loss + ALPHA * F.cross_entropy(self.model(views[2]), second.y) + BETA * consistency
        self.sgd.zero_grad()
        loss.backward()
        self.sgd.step()
        self.logits.update(zip(keys(images), outputs.detach(), strict=False))
        return loss.detach()


def keys(images):
    return [image.numpy().tobytes() for image in images]


def learner_alone(model, method, view):
    """As in a program of one's own: three passes a step, and PyTorch's SGD."""
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    if method == "sgd":
        return Sgd(model, sgd, augment=view)
    if method == "er":
        return ExperienceReplay(model, sgd, augment=view, buffer_size=BUFFER, replay_size=BATCH)
    sizes = {"consistency_size": BATCH, "replay_size": BATCH, "buffer_size": BUFFER}
    return ConsistencyReplay(model, sgd, augment=view, regularizer=method, alpha=ALPHA, beta=BETA, **sizes)


def learner_of_a_run(model, method, view):
    """As `holdfast run` makes it: one pass with grouped statistics, and SGD of its own."""
    given = {} if method == "sgd" else {"buffer_size": BUFFER, "replay_size": BATCH}
    given |= {"alpha": ALPHA, "beta": BETA} if method in TERMS else {}
    config = RunConfig.preset("seq-cifar10", method, lr=LR, batch_size=BATCH, precision="float32", **given)
    model = group_batchnorm(model)
    optimizer, _ = make_optimizer(config, model, torch.device("cpu"))
    return make_learner(config, Parts(model, optimizer, view, torch.Generator().manual_seed(0)))


def learn(make, method, dtype):
    """(loss, state of the network) of both programs, after each of the steps."""
    model = network().to(dtype)
    plain = Protocol(deepcopy(model), method)
    crop, shown = CropFlip(Normalize((0.5,) * 3, (0.25,) * 3), torch.Generator().manual_seed(1), padding=1), []

    def view(images):
        shown.append(crop(images).to(dtype))
        return shown[-1].clone()

    learner = make(model, method, view)
    draws = [] if method == "sgd" else record(learner).draws
    for images, labels in minibatches():
        draws.clear()
        loss = learner.observe(images, labels).total
        sizes = [len(labels), *(len(drawn.y) for drawn in draws)]
        expected = plain.step(images, labels, draws, shown[-1].split(sizes))
        yield (loss, model.state_dict()), (expected, plain.model.state_dict())


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ROUNDED])
def test_equal_in_every_bit(method):
    steps = 0
    for (loss, state), (expected, wanted) in learn(learner_alone, method, torch.float32):
        steps += 1
        torch.testing.assert_close(loss, expected)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted), f"step {steps}"
    assert steps == 24


@pytest.mark.parametrize(
    ("method", "make"),
    [(method, learner_of_a_run) for method in METHODS] + [(method, learner_alone) for method in ROUNDED],
)
def test_equal_but_for_rounding(method, make):
    """In double precision, where rounding is too small to switch a ReLU on or off, which would be no small change."""
    for (loss, state), (expected, wanted) in learn(make, method, torch.float64):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(dict(state), dict(wanted), rtol=1e-9, atol=1e-11)
