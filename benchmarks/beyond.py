"""Candidates for a method past the published ones, each beside the others on a validation split.

    python benchmarks/beyond.py --list
    python benchmarks/beyond.py --seconds 540 --out beyond --summary beyond.json

One learner holds all ideas as settings, so that each can be tried alone and together with others. Runs are short
(--epochs) and are tested on a tenth of the training samples, never on the test set. Runs whose results are there are
passed over, so a second call continues the first. The summary has one row per candidate: settings, n, mean, spread.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from holdfast.buffer import Draw
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments import condensed, load_results
from holdfast.learners import ReplayLearner, settings_for
from holdfast.learners.clser import follow
from holdfast.learners.losses import Losses
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions
from holdfast.methods import LEARNERS, REGULARIZERS
from holdfast.models import count_outputs
from holdfast.nested import Nested, rows

sys.path.insert(0, str(Path(__file__).resolve().parent))
from work_off import work_off

VALIDATION = 0.1


@LEARNERS.register("beyond", "replay with any of the ideas of benchmarks/beyond.py")
class Beyond(ReplayLearner):
    """Replay and consistency, with ideas that can be switched on one by one.

    loss = CE(minibatch) + alpha * CE(draw 2) + beta * regularizer(outputs now, target; draw 1)

    Options of this learner:

    alpha, beta: weights of the terms.
    regularizer: name of the regularizer.
    target: "stored" for the outputs that were stored, "average" for those of the averaged network on the same view.
    decay: how slowly the averaged network follows, 0 to 1. The averaged network is evaluated. 0: there is none.
    statistics: "own" for the average's BatchNorm statistics from the draws it sees; "buffer" to estimate them anew from
        all stored samples before each evaluation.
    asymmetric: whether the minibatch leaves classes alone that were seen before and are absent from it, as in ER-ACE.
    """

    grows = False
    stores_outputs = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        regularizer: str = "mse",
        target: str = "stored",
        decay: float = 0.0,
        statistics: str = "own",
        asymmetric: bool = False,
        consistency_size: int | None = None,
        **shared: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(model, optimizer, **shared)
        if target == "average" and not decay:
            raise UsageError('target="average" needs an averaged network: give decay=0.999 or so.')
        self.alpha, self.beta, self.regularizer = alpha, beta, REGULARIZERS[regularizer]
        self.target, self.decay, self.statistics, self.asymmetric = target, decay, statistics, asymmetric
        self.consistency_size = consistency_size
        self.average = deepcopy(self.model).requires_grad_(False)
        self.updates = torch.zeros((), dtype=torch.int64, device=self.device)
        self.seen = torch.zeros(count_outputs(self.model), dtype=torch.bool, device=self.device)

    @classmethod
    def arguments(cls, config: RunConfig) -> dict[str, Any]:
        """Draw 1 has the size of a run's replay batch, draw 2 that of its minibatches, as in the paper."""
        sizes = {"consistency_size": config.replay_size, "replay_size": config.batch_size}
        return {"alpha": config.alpha, "beta": config.beta} | sizes

    def compute_losses(self, x: Nested, y: Tensor) -> Losses:
        """The three terms of consistency replay, with the ideas that are switched on."""
        if not self.buffer.stored:
            return self.losses_alone(x, y)
        draw1 = self.buffer.sample(self.consistency_size or rows(y))
        draw2 = self.draw(y)
        outputs, now, replayed, then = self._passes(x, draw1, draw2.x)
        self.check_labels(y, outputs)
        offer = self.offer(x, y, outputs)
        if self.asymmetric:
            outputs = outputs.masked_fill(self.seen.index_fill(0, y, False), -1e9)
        current, replay = self.criterion(outputs, y), self.criterion(replayed, draw2.y)
        consistency = self.regularizer(now, then)
        total = current + self.alpha * replay + self.beta * consistency
        return Losses(total, current=current, replay=replay, consistency=consistency, offer=offer)

    def _passes(self, x: Nested, first: Draw, second: Nested) -> tuple[Tensor, ...]:
        """The outputs for the minibatch and both draws, and the target on draw 1."""
        if not self.decay:
            return *self.forward_groups(x, first.x, second), first.logits
        view = self.view(first.x)  # drawn once: the averaged network sees draw 1 in the same view
        with torch.no_grad():
            averaged = self.forward(view, self.average)
        now = self.forward(view)
        outputs, replayed = self.forward_groups(x, second)
        return outputs, now, replayed, averaged if self.target == "average" else first.logits

    def commit(self, losses: Losses) -> None:
        """Offer the minibatch to the buffer, remember its classes, and let the average follow the network."""
        super().commit(losses)
        if losses.offer is not None:
            self.seen.index_fill_(0, losses.offer.y, True)
        self.updates += 1
        if self.decay:
            limit = (1 - 1 / (self.updates + 1)).clamp(max=self.decay)
            follow(self.average, self.model, 1 - limit)

    def evaluated(self) -> nn.Module:
        """The averaged network, if there is one; with statistics of the stored samples, if wanted."""
        if not self.decay:
            return self.model
        if self.statistics == "buffer" and self.buffer.stored:
            estimate_statistics(self.average, self.view(self.buffer.contents().x))
        return self.average

    def extra_state(self) -> dict[str, nn.Module | Tensor | torch.Generator]:
        """The average, how many steps it has seen, and which classes."""
        return {"average": self.average, "updates": self.updates, "seen": self.seen}


@torch.no_grad()
def estimate_statistics(network: nn.Module, view: Tensor, size: int = 64) -> None:
    """Set the running statistics of all BatchNorms to those of these inputs: the mean over minibatches of `size`."""
    norms = [each for each in network.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    before = [each.momentum for each in norms]
    parts = [part for part in view.split(size) if len(part) > 1]
    for number, part in enumerate(parts):
        for norm in norms:
            norm.momentum = 1 / (number + 1)  # a running mean over the minibatches
        network(part)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum


AVERAGED = {"decay": 0.999}
CANDIDATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "averaged": AVERAGED,
    "averaged, statistics of the buffer": AVERAGED | {"statistics": "buffer"},
    "averaged, as target": AVERAGED | {"target": "average"},
    "asymmetric": {"asymmetric": True},
    "balanced": {"balanced": True},
    "averaged, asymmetric": AVERAGED | {"asymmetric": True},
    "averaged, balanced": AVERAGED | {"balanced": True},
    "averaged, as target, asymmetric": AVERAGED | {"target": "average", "asymmetric": True},
    "averaged, as target, asymmetric, balanced": AVERAGED | {"target": "average", "asymmetric": True, "balanced": True},
    "averaged, as target, l2": AVERAGED | {"target": "average", "regularizer": "l2"},
    "averaged, as target, linf": AVERAGED | {"target": "average", "regularizer": "linf"},
    "averaged, learning rate 0.1": AVERAGED | {"lr": 0.1},
}


def config_of(settings: dict[str, Any], *, benchmark: str, buffer_size: int, epochs: int, seed: int) -> RunConfig:
    """The run of a candidate. Weights and learning rate are those of mse, unless the candidate says otherwise."""
    config = RunConfig.preset(benchmark, "mse", buffer_size=buffer_size, seed=seed)
    config = config.change(method="beyond", epochs=epochs, validation=VALIDATION)
    return config.parse([f"{name}={value}" for name, value in settings.items()], settings_for(config))


def summary(runs: dict[str, list[RunConfig]], out: Path) -> list[dict[str, Any]]:
    """One row per candidate that has results, the best first."""
    found, lines = load_results(out), []
    for name, configs in runs.items():
        stored = [each for each in map(found.get, configs) if each is not None]
        values = [condensed(each)["accuracy"] for each in stored]
        if values:
            spread = stdev(values) if len(values) > 1 else None
            lines.append({"candidate": name, "n": len(values), "mean": fmean(values), "spread": spread})
            lines[-1] |= {"accuracies": values, "settings": CANDIDATES[name], "epochs": configs[0].epochs}
    return sorted(lines, key=lambda line: -line["mean"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", default="seq-cifar10")
    parser.add_argument("--buffer-size", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", action="append", choices=CANDIDATES, help="a candidate; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("beyond"), help="results, and states of runs in flight")
    parser.add_argument("--summary", type=Path, help="JSON file for the table")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--list", action="store_true", help="name the candidates and run nothing")
    options = parser.parse_args(arguments)
    chosen = {name: CANDIDATES[name] for name in options.only or CANDIDATES}
    if options.list:
        print("\n".join(f"{name}: {settings}" for name, settings in chosen.items()))
        return 0
    common = {"benchmark": options.benchmark, "buffer_size": options.buffer_size, "epochs": options.epochs}
    runs = {
        name: [config_of(settings, **common, seed=seed) for seed in range(options.seeds)]
        for name, settings in chosen.items()
    }
    known = load_results(options.out)
    # All candidates once before any of them twice.
    missing = [config for seed in zip(*runs.values(), strict=True) for config in seed if config not in known]
    if missing:
        work_off(missing, options.out, seconds=options.seconds, device=options.device, data=options.data)
    table = summary(runs, options.out)
    for line in table:
        spread = "" if line["spread"] is None else f" +- {line['spread']:.2f}"
        print(f"{line['mean']:6.2f}{spread} ({line['n']})  {line['candidate']}")
    if options.summary:
        options.summary.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HoldfastError as error:
        sys.exit(f"error: {error}")
