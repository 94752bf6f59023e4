"""What `observe` costs beside the step that one would write by hand: the same networks, draws, losses and optimiser.

    python benchmarks/observe_overhead.py

Prints, for each network and method, the median CPU time of both and their ratio. The two take turns, a few steps at a
time, so that whatever else the machine does falls on both; the ratio is the median over all turns. By hand means
vectorised and without any check of what comes in; `observe` checks it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import holdfast as hf

BATCH, BUFFER, ALPHA, BETA, LR = 32, 500, 0.5, 0.2, 0.03
Step = Callable[[Tensor, Tensor], object]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def convnet() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(32 * 49, 10))


class Memory:
    """A reservoir as one would write it: rows that are not kept are left out, later ones overwrite earlier ones."""

    def __init__(self) -> None:
        self.x, self.y = torch.zeros(BUFFER, 1, 28, 28), torch.zeros(BUFFER, dtype=torch.int64)
        self.logits, self.seen = torch.zeros(BUFFER, 10), 0

    def draw(self, n: int) -> Tensor:
        return torch.randperm(min(self.seen, BUFFER))[:n]

    def add(self, x: Tensor, y: Tensor, logits: Tensor | None = None) -> None:
        order = self.seen + torch.arange(len(x))
        slots = torch.where(order < BUFFER, order, (torch.rand(len(x), dtype=torch.float64) * (order + 1)).long())
        kept = slots < BUFFER
        slots = slots[kept]
        self.x[slots], self.y[slots] = x[kept], y[kept]
        if logits is not None:
            self.logits[slots] = logits[kept]
        self.seen += len(x)


def er_by_hand(model: nn.Module) -> Step:
    optimizer, memory = torch.optim.SGD(model.parameters(), lr=LR), Memory()

    def step(x: Tensor, y: Tensor) -> Tensor:
        inputs, labels = x, y
        if memory.seen:
            chosen = memory.draw(BATCH)
            inputs, labels = torch.cat([x, memory.x[chosen]]), torch.cat([y, memory.y[chosen]])
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.add(x, y)
        return loss.detach()

    return step


def consistency_by_hand(model: nn.Module) -> Step:
    optimizer, memory = torch.optim.SGD(model.parameters(), lr=LR), Memory()
    separate = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())

    def passes(*inputs: Tensor) -> list[Tensor]:
        return [model(each) for each in inputs] if separate else list(model(torch.cat(inputs)).split(BATCH))

    def step(x: Tensor, y: Tensor) -> Tensor:
        if memory.seen:
            first, second = memory.draw(BATCH), memory.draw(BATCH)
            logits, answers, replayed = passes(x, memory.x[first], memory.x[second])
            loss = F.cross_entropy(logits, y) + ALPHA * F.cross_entropy(replayed, memory.y[second])
            loss = loss + BETA * F.mse_loss(answers, memory.logits[first])
        else:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.add(x, y, logits.detach())
        return loss.detach()

    return step


def er(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return hf.ExperienceReplay(model, optimizer, buffer_size=BUFFER).observe


def consistency(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return hf.ConsistencyReplay(model, optimizer, buffer_size=BUFFER, regularizer="mse", alpha=ALPHA, beta=BETA).observe


def compare(ours: Step, by_hand: Step, turns: int, steps: int = 10) -> tuple[float, float, float]:
    """Median milliseconds of a step of each, and the median over the turns of their ratio."""
    draw = torch.Generator().manual_seed(0)
    batches = [
        (torch.rand(BATCH, 1, 28, 28, generator=draw), torch.randint(0, 10, (BATCH,), generator=draw))
        for _ in range(steps)
    ]

    def turn(step: Step) -> float:
        start = time.process_time()
        for x, y in batches:
            step(x, y)
        return 1000 * (time.process_time() - start) / steps

    for _ in range(2 + BUFFER // (BATCH * steps)):  # until the memory is full
        turn(ours), turn(by_hand)
    times = []
    for number in range(turns):
        order = (ours, by_hand) if number % 2 else (by_hand, ours)
        taken = {step: turn(step) for step in order}
        times.append((taken[ours], taken[by_hand]))
    mine, theirs = zip(*times, strict=True)
    return statistics.median(mine), statistics.median(theirs), statistics.median(a / b for a, b in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'network':10} {'method':12} {'observe':>9} {'by hand':>9} {'ratio':>7}")
    for network in (mlp, convnet):
        for ours, by_hand in ((er, er_by_hand), (consistency, consistency_by_hand)):
            torch.manual_seed(0)
            mine, theirs, ratio = compare(ours(network()), by_hand(network()), options.turns)
            print(f"{network.__name__:10} {ours.__name__:12} {mine:6.3f} ms {theirs:6.3f} ms {ratio:7.3f}")


if __name__ == "__main__":
    main()
