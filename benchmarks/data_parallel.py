"""What becomes of accuracy if BatchNorm sees a minibatch in parts, as on several GPUs under torch.nn.DataParallel.

    python benchmarks/data_parallel.py --seconds 540 --out parallel --summary parallel.jsonl

The authors' code wraps the network in DataParallel wherever a machine has more than one GPU. Each GPU then gets a part
of every minibatch and normalises it by itself, and only the first one's running statistics are kept. For replay that
is more than a detail: er shows its network the minibatch and the draw together, and with two GPUs the first gets all of
the minibatch and the second all of the draw. The paper does not say how many GPUs there were.

Here one GPU computes the same, for one GPU, two and four: S-CIFAR-10, short runs (--epochs) or complete ones (--epochs
50), each method, buffer and seed. Runs whose results are under --out are passed over. The summary has a line of JSON
per method, buffer and number of GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.experiments import condensed, load_results
from holdfast.models import MODELS, GroupedBatchNorm, ResNet18, group_batchnorm
from holdfast.models.batchnorm import fused

sys.path.insert(0, str(Path(__file__).resolve().parent))
from work_off import work_off

GPUS = (1, 2, 4)


class PartedBatchNorm(GroupedBatchNorm):
    """Normalises each part of each minibatch by itself; the first part of each updates the running statistics."""

    parts = 1

    def sizes(self, input: Tensor) -> list[list[int]]:
        """For each minibatch, the samples of its parts, as DataParallel deals them out."""
        minibatches = self.groups.sizes or (input.shape[0],)
        return [[len(part) for part in torch.empty(size).chunk(self.parts)] for size in minibatches]

    def forward(self, input: Tensor) -> Tensor:
        """The normalised input, of the same shape."""
        if not self.training:
            return super().forward(input)
        if self.has_kernels(input):
            return self.with_kernels(input)
        sizes, made = self.sizes(input), []
        for minibatch, dealt in zip(input.split(list(map(sum, sizes))), sizes, strict=True):
            running: tuple[Tensor | None, ...] = (self.running_mean, self.running_var)
            for part in minibatch.split(dealt):
                made.append(F.batch_norm(part, *running, self.weight, self.bias, True, self.momentum, self.eps))
                running = (None, None)
        return torch.cat(made)

    def has_kernels(self, input: Tensor) -> bool:
        """Whether all parts have one size, as the kernels need it."""
        sizes = {size for dealt in self.sizes(input) for size in dealt}
        whole = len(sizes) == 1 and input.shape[0] == min(sizes) * self.parts * max(1, len(self.groups.sizes))
        return super().has_kernels(input) and whole and min(sizes) * input[0, 0].numel() > 1

    def with_kernels(self, input: Tensor, shortcut: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """The same on a GPU."""
        made, statistics = fused.batchnorm(
            input, self.weight, self.bias, groups=self.parts * max(1, len(self.groups.sizes)), eps=self.eps, relu=relu,
            shortcut=shortcut,
        )  # fmt: skip
        count = input.numel() // statistics[0].numel()
        running = (self.running_mean, self.running_var, self.num_batches_tracked)
        first = statistics[:, :: self.parts].contiguous()
        fused.update_running(first, *running, self.momentum, count / (count - 1))
        return made


def network(parts: int, width: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-18 as on so many GPUs."""
    made = group_batchnorm(ResNet18(shape, classes, width))
    for module in made.modules():
        if isinstance(module, GroupedBatchNorm):
            module.__class__, module.parts = PartedBatchNorm, parts
    return made


def name_of(gpus: int, width: int = 64) -> str:
    """The name under which the network is registered; one GPU is the ordinary one."""
    return ("resnet18" if width == 64 else f"resnet18-{width}") + (f"-{gpus}-gpus" if gpus > 1 else "")


for gpus, width in product(GPUS, (64, 8)):
    if name_of(gpus, width) != "resnet18":
        MODELS.register(name_of(gpus, width), f"as on {gpus} GPUs")(partial(network, gpus, width))


def configs(options: argparse.Namespace) -> list[RunConfig]:
    """All runs, every cell once before any of them twice."""
    made = []
    cells = product(range(options.seeds), options.buffer_size, options.method, options.gpus)
    for seed, size, method, gpus in cells:
        config = RunConfig.preset("seq-cifar10", method, buffer_size=size, seed=seed)
        config = config.change(epochs=options.epochs, model=name_of(gpus, options.width))
        made.append(config.parse(options.set))
    return made


def summary(wanted: Sequence[RunConfig], out: Path) -> list[dict[str, Any]]:
    """A line per cell that has results."""
    found, cells = load_results(out), {}
    for config in wanted:
        if (stored := found.get(config)) is not None:
            cell = (config.method, config.buffer_size, config.model, config.epochs)
            cells.setdefault(cell, []).append(condensed(stored))
    lines = []
    for (method, size, model, epochs), runs in cells.items():
        values = [run["accuracy"] for run in runs]
        line = {"method": method, "buffer_size": size, "model": model, "epochs": epochs, "accuracies": values}
        line |= {"seeds": [run["seed"] for run in runs], "task_il": [run["task_il_accuracy"] for run in runs]}
        line |= {"fingerprints": [run["fingerprint"] for run in runs]}
        lines.append(line | {name: runs[0]["environment"][name] for name in ("device", "commit")})
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=["er", "linf", "mse"])
    parser.add_argument("--buffer-size", nargs="+", type=int, default=[200, 500])
    parser.add_argument("--gpus", nargs="+", type=int, choices=GPUS, default=GPUS)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--width", type=int, choices=(64, 8), default=64, help="channels; 8 for CPUs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--out", type=Path, default=Path("parallel"), help="results, and states of runs in flight")
    parser.add_argument("--summary", type=Path, help="file for the table, a line of JSON for each cell")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--reserve", type=float, default=40, help="of these, for saving states")
    parser.add_argument("--fleet", type=int, default=4, help="runs at a time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path)
    options = parser.parse_args(arguments)
    wanted, there = configs(options), load_results(options.out)
    if missing := [config for config in wanted if config not in there]:
        given = {name: getattr(options, name) for name in ("seconds", "reserve", "fleet", "device", "data")}
        work_off(missing, options.out, **given)
    table = summary(wanted, options.out)
    for line in table:
        values = line["accuracies"]
        spread = f" +- {stdev(values):.2f}" if len(values) > 1 else ""
        print(f"{line['method']} {line['buffer_size']} {line['model']}: {fmean(values):.2f}{spread} ({len(values)})")
    if options.summary:
        options.summary.write_text("".join(json.dumps(line) + "\n" for line in table), "utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HoldfastError as error:
        sys.exit(f"error: {error}")
