"""What the learners' tests share: small networks, a buffer that keeps a record, and a slow cross-entropy."""

from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from holdfast.buffer import Draw, Reservoir
from holdfast.config import RunConfig
from holdfast.models import MLP, group_batchnorm
from holdfast.results import RunResult
from holdfast.training import run

CLASSES = 5


class RecordingBuffer(Reservoir):
    """A reservoir that remembers every draw and everything it was offered."""

    def __init__(self, original: Reservoir) -> None:
        super().__init__(original.capacity, generator=original.generator)
        self.draws: list[Draw] = []
        self.offers: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def sample(self, n: int) -> Draw:
        self.draws.append(super().sample(n))
        return self.draws[-1]

    def add(self, x: Tensor, y: Tensor, logits: Tensor | None = None) -> None:
        self.offers.append((x.clone(), y.clone(), None if logits is None else logits.clone()))
        super().add(x, y, logits)


def record(learner) -> RecordingBuffer:
    learner.buffer = RecordingBuffer(learner.buffer)
    return learner.buffer


class Convolutions(nn.Module):
    """A network with BatchNorm, features, and a linear layer at its end."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4)
        self.classifier = nn.Linear(16, CLASSES)

    def features(self, x):
        return self.norm(self.conv(x)).relu().flatten(1)

    def forward(self, x):
        return self.classifier(self.features(x))


def network(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small network of the given kind, always with the same weights; inputs are (B, 1, 6, 6)."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if kind == "mlp":
            return MLP((1, 6, 6), CLASSES, width=12).to(dtype)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(54, CLASSES),
            nn.BatchNorm1d(CLASSES),
        ).to(dtype)
    return group_batchnorm(model) if kind == "grouped" else model


def plain_copy(kind: str, model: nn.Module) -> nn.Module:
    """A network with the same weights and ordinary BatchNorm."""
    copy = network("batchnorm" if kind == "grouped" else kind, next(model.parameters()).dtype)
    copy.load_state_dict(deepcopy(model.state_dict()))
    return copy


def stream(steps: int, size: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0):
    """Minibatches whose labels drift, so that old and new samples differ."""
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        labels = torch.randint(0, 2, (size,), generator=draw) + 3 * step // max(1, steps - 1)
        centre = labels.view(-1, 1, 1, 1).to(dtype)
        yield torch.randn(size, 1, 6, 6, generator=draw, dtype=dtype) + centre, labels


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """-log of the softmax probability of the label, one row at a time."""
    rows = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        rows.append(torch.log(torch.exp(row - row.max()).sum()) + row.max() - row[label])
    return torch.stack(rows)


def descend(model: nn.Module, loss: Tensor, lr: float) -> None:
    """Plain SGD: p -= lr * gradient."""
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= lr * gradient


def assert_same_state(model: nn.Module, other: nn.Module, rtol: float, atol: float) -> None:
    """Equal parameters, running statistics and counters of passes."""
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def blobs(steps: int = 200, size: int = 16):
    """Two Gaussian blobs in the plane: first all minibatches of one, then all of the other; and a test set."""
    draw = torch.Generator().manual_seed(0)

    def points(label: int, count: int):
        centre = torch.tensor([[1.0, 1.0], [3.0, 1.0]])[label]
        return centre + 0.3 * torch.randn(count, 2, generator=draw), torch.full((count,), label)

    training = [points(label, size) for label in (0, 1) for _ in range(steps)]
    x, y = (torch.cat(parts) for parts in zip(points(0, 200), points(1, 200), strict=True))
    return training, x, y


def accuracies(model: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Accuracy on each blob, in percent."""
    with torch.no_grad():
        hit = (model(x).argmax(1) == y).double()
    return [100 * float(hit[y == label].mean()) for label in (0, 1)]


@pytest.fixture
def linear():
    """A network for points in the plane."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(2, 2)


@cache
def tiny_run(method: str, **settings: float) -> RunResult:
    """A run of a second or two: five tasks of 400 digits. SGD forgets all classes but the last two."""
    sizes = {"train_limit": 400, "epochs": 5, "batch_size": 32, "replay_size": 32}
    config = RunConfig.preset("seq-mnist", method, buffer_size=200, lr=0.1, **sizes)
    config = config.change(settings=tuple({**dict(config.settings), **settings}.items()))
    return run(config, device="cpu", threads=1)
