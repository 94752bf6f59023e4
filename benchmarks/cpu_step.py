"""What a step of rot-mnist mse costs on one CPU thread, and what ideas to make it cheaper would save.

    python benchmarks/cpu_step.py --rounds 100 --out docs/bench-cpu-step.json

A round times a few steps of each case, in an order that is drawn anew, in CPU seconds, which other programs disturb
little. A case is compared with its base in the same round. The ratio is the median over rounds, its interval (95 %)
comes from 10,000 resamplings of the rounds.

floor: the bare matrix products of a step. network: one forward and backward pass of the network alone. by-hand: a step
written in plain PyTorch with the same draws, losses and update, and nothing else. holdfast: a step of a run, once the
reservoir takes few samples. no-log: the same without the record of losses. late-log: with losses recorded every 50
steps. no-add: without the offer to the buffer. add-few: the buffer writes only the rows that it stores. compiled: the
step by hand, its view, network and losses compiled; `ready_seconds` is what its first step took, compiler included.
compiled-parts: a step of a run with its losses and the buffer's placement compiled. onednn: the bare products by oneDNN
in place of PyTorch's choice, rounded otherwise. evaluation: the logits of 10,000 test images. transposed: the same with
the samples as columns of each layer's product, not as rows. small-resnet-N: forward and backward pass of a ResNet-18 of
width N on three minibatches of 32 images. channels-last-N: the same with the channels last in memory, which rounds
otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from both_versions import compare
from torch import Tensor
from torch.nn import functional as F

from holdfast import pure
from holdfast.augment import Normalize
from holdfast.bench import bare_products, made_up
from holdfast.buffer import Reservoir
from holdfast.buffer.memory import Memory
from holdfast.config import RunConfig
from holdfast.engine import LossLog
from holdfast.engine.eager import prepare_cpu
from holdfast.evaluation import predict
from holdfast.models import MLP, GroupedForward, ResNet18, group_batchnorm
from holdfast.training import train

ROWS, STEPS = 384, 20
BASES = dict.fromkeys(("floor", "network", "by-hand", "holdfast", "onednn"), "floor")
BASES |= {"compiled": "by-hand", "evaluation": "evaluation", "transposed": "evaluation"}
Case = tuple[Callable[[], object], AbstractContextManager[Any], int]
"""What a step calls, what is changed meanwhile, and how many steps a round has."""


def descend(parameters: list[torch.nn.Parameter], loss: Tensor, lr: float = 0.0) -> None:
    for each in parameters:
        each.grad = None
    loss.backward()
    if lr:
        with torch.no_grad():
            torch._foreach_add_(parameters, [each.grad for each in parameters], alpha=-lr)


def network() -> Case:
    model, x = MLP((1, 28, 28), 10), torch.rand(ROWS, 784)
    parameters = list(model.parameters())
    return lambda: descend(parameters, model(x).sum()), nullcontext(), STEPS


def by_hand(prepare: Callable[[Any], Any] = lambda function: function) -> Case:
    model, third = MLP((1, 28, 28), 10), ROWS // 3
    parameters, draw = list(model.parameters()), torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8, generator=draw)
    labels, logits = torch.randint(0, 10, (60_000,), generator=draw), torch.randn(200, 10, generator=draw)
    order = torch.randperm(60_000, generator=draw)

    @prepare
    def loss(inputs: list[Tensor], y: Tensor, stored: Tensor, labels: Tensor) -> Tensor:
        current, first, second = torch.split(model(torch.cat(inputs).float().div_(255)), third)
        return F.cross_entropy(current, y) + F.cross_entropy(second, labels) + F.mse_loss(first, stored)

    def step() -> None:
        now, one, two = order[:third], *(torch.randperm(200, generator=draw)[:third] for _ in range(2))
        inputs = [images.index_select(0, rows) for rows in (now, one, two)]
        targets = labels.index_select(0, now), logits.index_select(0, one), labels.index_select(0, two)
        descend(parameters, loss(inputs, *targets), lr=0.01)

    return step, nullcontext(), STEPS


def evaluation(change: AbstractContextManager[Any]) -> Case:
    model, view = MLP((1, 28, 28), 10), Normalize()
    images = torch.randint(0, 256, (10_000, 1, 28, 28), dtype=torch.uint8)
    return lambda: predict(model, images, view), change, 1


def onednn(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


def transposed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias[:, None], weight, x.t()).t()


def training() -> Iterator[object]:
    """A run whose buffer has seen one epoch of 60,000 samples."""
    config = RunConfig.preset("rot-mnist", "mse", buffer_size=200).change(epochs=10_000, tasks=1)
    steps = train(config, made_up(config, samples=60_000), torch.device("cpu"))
    for _ in range(470):
        next(steps)
    return steps


def add_few(self: Memory, slots: Tensor, parts: list[Tensor], write: Any = Memory.write) -> None:
    rows = (slots < self.capacity).nonzero().squeeze(1)
    if len(rows):
        write(self, slots.index_select(0, rows), [part.index_select(0, rows) for part in parts])


def late_log(self: LossLog, losses: Any) -> None:
    pending = vars(self).setdefault("pending", [])
    pending.append(losses.as_dict())
    if len(pending) == self.interval:
        self._rows = torch.stack([torch.stack([each.get(name, self._zero) for name in self.names]) for each in pending])
        pending.clear()


def small_resnet(width: int, memory_format: torch.memory_format) -> Case:
    model = group_batchnorm(ResNet18((3, 32, 32), 10, width=width)).to(memory_format=memory_format)
    forward, x = GroupedForward(model), torch.rand(96, 3, 32, 32).to(memory_format=memory_format)
    parameters = list(model.parameters())
    return lambda: descend(parameters, torch.cat(forward(x, [32] * 3)).logsumexp(1).sum()), nullcontext(), 1


def cases() -> dict[str, Case]:
    found = {"floor": (bare_products(ROWS), nullcontext(), STEPS), "network": network(), "by-hand": by_hand()}
    found["onednn"] = (bare_products(ROWS), patch.object(torch, "mm", onednn), STEPS)
    found["compiled"] = by_hand(torch.compile)
    found["evaluation"] = evaluation(nullcontext())
    found["transposed"] = evaluation(patch.object(F, "linear", transposed))
    changes: dict[str, AbstractContextManager[Any]] = {
        "holdfast": nullcontext(),
        "holdfast-again": nullcontext(),
        "no-log": patch.object(LossLog, "record", lambda *_: None),
        "late-log": patch.object(LossLog, "record", late_log),
        "no-add": patch.object(Reservoir, "add", lambda *_: None),
        "add-few": patch.object(Memory, "write", add_few),
        "compiled-parts": patch.object(pure, "_compiling", SimpleNamespace(get=lambda: True)),
    }
    for name, change in changes.items():
        found[name] = (training().__next__, change, STEPS)
    for width in (8, 16):
        found[f"small-resnet-{width}"] = small_resnet(width, torch.contiguous_format)
        found[f"channels-last-{width}"] = small_resnet(width, torch.channels_last)
    return found


def time_case(act: Callable[[], object], change: AbstractContextManager[Any], steps: int) -> float:
    """CPU seconds of a step."""
    with change:
        act()
        began = time.process_time()
        for _ in range(steps):
            act()
        return (time.process_time() - began) / steps


def seconds_until_ready(act: Callable[[], object]) -> float:
    """Seconds of the first step, with nothing compiled before."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        began = time.perf_counter()
        act()
        return time.perf_counter() - began


def base_of(name: str) -> str:
    return name.replace("channels-last", "small-resnet") if name[-1].isdigit() else BASES.get(name, "holdfast")


def take_turns(known: dict[str, Case], rounds: int, base_of: Callable[[str], str]) -> dict[str, Any]:
    """The cases' times, and their ratios to those of their bases; printed as well."""
    readings: dict[str, list[float]] = {name: [] for name in known}
    load, order = [], random.Random(0)
    for number in range(rounds):
        load.append(os.getloadavg()[0])
        for name in order.sample(list(known), len(known)):
            readings[name].append(time_case(*known[name]))
        print(f"\rround {number + 1}", end="", file=sys.stderr)
    print(file=sys.stderr)
    found: dict[str, dict[str, Any]] = {}
    for name, each in readings.items():
        compared = compare(readings[base_of(name)], each)
        found[name] = {"milliseconds": 1e3 * statistics.median(each), "base": base_of(name)}
        found[name] |= {key: compared[key] for key in ("ratio", "interval95")}
        low, high = compared["interval95"]
        ratio = f"{compared['ratio']:.3f} ({low:.3f} to {high:.3f}) times {base_of(name)}"
        print(f"{name:18} {found[name]['milliseconds']:8.3f} ms  {ratio}")
    return {
        "cases": found,
        "rounds": rounds,
        "load": {"mean": statistics.mean(load), "cores": os.cpu_count()},
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepare_cpu()
    known = cases()
    ready = seconds_until_ready(known["compiled"][0])
    report = take_turns(known, options.rounds, base_of) | {"ready_seconds": ready}
    print(f"compiled{ready:13.1f} s until the first step")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
