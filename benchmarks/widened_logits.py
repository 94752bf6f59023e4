"""What stored logits should say of classes that were unknown when they were stored: final accuracies of the choices.

    python benchmarks/widened_logits.py

Digits of MNIST, two classes at a time, 2,000 images each, through `ConsistencyReplay` with 200 slots: once with ten
outputs from the start, and with a head that grows from two, whose stored logits are then filled in several ways. The
network learns as a whole, or only the head over frozen random features.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.data import load

Fill = Callable[[nn.Module, Tensor, Tensor, int], Tensor]
"""(model, stored inputs as it sees them, stored logits, new outputs) -> their logits."""


def lowest(margin: float) -> Fill:
    return lambda model, x, old, more: (old.amin(1, keepdim=True) - margin).expand(-1, more)


def asked(model: nn.Module, x: Tensor, old: Tensor, more: int) -> Tensor:
    with torch.no_grad():
        return model(x)[:, -more:]


FILLS: dict[str, Fill | None] = {
    "fixed head": None,
    "left out": lambda model, x, old, more: old.new_full((len(old), more), torch.nan),
    "asked now": asked,
    "zero": lambda model, x, old, more: old.new_zeros(len(old), more),
    "lowest": lowest(0),
    "lowest - 1": lowest(1),
    "lowest - 2": lowest(2),
    "lowest - 4": lowest(4),
}
SETTINGS = {
    "mse": ("mse", 0.5, 0.2),
    "strong mse": ("mse", 1.0, 1.0),
    "linf": ("linf", 0.5, 0.2),
    "l1": ("l1", 0.5, 0.05),
    "kl": ("kl", 0.5, 1.0),
}
"""Regularizer, alpha and beta."""


class Filled(hf.ConsistencyReplay):
    """A learner whose head grows and whose stored logits are filled as told."""

    fill: Fill

    def grow(self, outputs: int) -> None:
        assert self.head is not None
        before = self.head.outputs
        super().grow(outputs)
        if self.buffer.stored and outputs > before:
            kept = self.buffer.contents()
            assert kept.logits is not None
            view = self.augment(kept.x)
            kept.logits[:, before:] = self.fill(self.model, view, kept.logits[:, :before], outputs - before)


def network(outputs: int, frozen: bool) -> nn.Module:
    width = 512 if frozen else 100
    hidden = [] if frozen else [nn.Linear(width, width), nn.ReLU()]
    body = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), *hidden).requires_grad_(not frozen)
    model = nn.Sequential()
    model.add_module("body", body)
    model.add_module("head", nn.Linear(width, outputs))
    return model


def run(name: str, setting: str, frozen: bool, seed: int) -> float:
    """Accuracy on all ten digits at the end, in percent."""
    digits, fill = load("mnist"), FILLS[name]
    torch.manual_seed(seed)
    model = network(2 if fill else 10, frozen)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    regularizer, alpha, beta = SETTINGS[setting]
    regularize = hf.REGULARIZERS[regularizer]

    def known(current: Tensor, stored: Tensor) -> Tensor:
        """What was left out is where it is."""
        return regularize(current, torch.where(stored.isnan(), current.detach(), stored))

    learner = Filled(
        model, optimizer, buffer_size=200, regularizer=known, alpha=alpha, beta=beta,
        head="head" if fill else None, augment=lambda x: x.float() / 255, seed=seed,
    )  # fmt: skip
    if fill:
        learner.fill = fill
    for first in range(0, 10, 2):
        (own,) = torch.where(digits.train.labels // 2 == first // 2)
        for chosen in own[torch.randperm(len(own))[:2000]].split(32):
            learner.observe(digits.train.images[chosen], digits.train.labels[chosen])
    with torch.no_grad():
        answers = model(digits.test.images.float() / 255).argmax(1)
    return 100 * float((answers == digits.test.labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    columns = [(frozen, name) for frozen in (False, True) for name in SETTINGS]
    print(f"{'':12}" + "".join(f"{('head ' if frozen else 'whole ') + name:>17}" for frozen, name in columns))
    for fill in FILLS:
        cells = []
        for frozen, name in columns:
            found = [run(fill, name, frozen, seed) for seed in seeds]
            cells.append(f"{statistics.mean(found):8.1f} ± {statistics.stdev(found):4.1f}")
        print(f"{fill:12}" + "".join(f"{cell:>17}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
