"""Where a step of a small ResNet goes on one CPU thread, and what ideas to make it cheaper would save.

    python benchmarks/cpu_resnet.py --rounds 20 --out docs/bench-cpu-resnet-step.json

ResNet-18 of width 8 and 16, float32 and channels last if a case does not say otherwise, images made up. Rounds, ratios
and intervals are those of cpu_step.py; the base of each case is `network` of the same width.

convolutions: the bare convolutions of a step, 96 images forward and backward: the floor. network: one forward and
backward pass of three minibatches of 32. linf, er: a step of a run; er shows the network 64 images. passes: three
passes of plain PyTorch. mkldnn: the same in oneDNN's own layouts from end to end. channels-first: the network with
channels first. bfloat16: the network under autocast. test-N: the logits of 1,000 test images, N at once, with test-260,
which runs use, as its base.

What a processor without AVX-512 would do:

    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/cpu_resnet.py --only network bfloat16
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cpu_step import Case, descend, take_turns
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast import evaluation
from holdfast.augment import Normalize
from holdfast.bench import made_up
from holdfast.config import RunConfig
from holdfast.engine.eager import prepare_cpu
from holdfast.models import MODELS, GroupedForward, ResNet18, group_batchnorm
from holdfast.training import train

SHAPE, ROWS, GROUPS = (3, 32, 32), 96, 3
TESTS = (64, 128, 260, 1000)
ABOUT = (
    "A step of a small ResNet on one CPU thread, by benchmarks/cpu_resnet.py: CPU milliseconds, medians over rounds in "
    "which all cases took turns, and ratios to the base of the same round."
)


def images(rows: int, layout: torch.memory_format) -> Tensor:
    return torch.rand(rows, *SHAPE).to(memory_format=layout)


def convolutions(width: int, layout: torch.memory_format = torch.channels_last) -> Callable[[], object]:
    """Every convolution of the network, forward and backward, with inputs and gradients of the right shapes."""
    model, seen = ResNet18(SHAPE, 10, width=width), []
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda layer, given, out: seen.append((layer, given[0].shape, out.shape)))
    model(torch.rand(ROWS, *SHAPE))
    made = []
    for number, (layer, before, after) in enumerate(seen):
        tensors = [torch.rand(size).to(memory_format=layout) for size in (after, before, layer.weight.shape)]
        made.append((tensors, layer.stride, layer.padding, [number > 0, True, False]))

    def act() -> None:
        for (_, x, weight), stride, padding, _ in made:
            torch.conv2d(x, weight, None, stride, padding)
        for tensors, stride, padding, wanted in made:
            given = (*tensors, None, stride, padding, (1, 1), False, (0, 0), 1, wanted)
            torch.ops.aten.convolution_backward(*given)

    return act


def network(width: int, layout: torch.memory_format = torch.channels_last) -> Callable[[], object]:
    model = group_batchnorm(ResNet18(SHAPE, 10, width=width)).to(memory_format=layout)
    forward, x, parameters = GroupedForward(model), images(ROWS, layout), list(model.parameters())
    return lambda: descend(parameters, torch.cat(forward(x, [ROWS // GROUPS] * GROUPS)).logsumexp(1).sum())


def passes(width: int, *, own_layouts: bool) -> Callable[[], object]:
    """Three passes without anything of Holdfast."""
    model: Any = ResNet18(SHAPE, 10, width=width)
    if not own_layouts:
        model = model.to(memory_format=torch.channels_last)
    x, parameters = images(ROWS // GROUPS, torch.channels_last), list(model.parameters())
    x = x.contiguous().to_mkldnn() if own_layouts else x

    def loss() -> Tensor:
        maps = F.relu(model.bn(model.conv(x)))
        for block in model.blocks:
            inner = block.conv2(F.relu(block.bn1(block.conv1(maps))))
            maps = F.relu(block.bn2(inner) + block.shortcut(maps))
        maps = maps.to_dense() if own_layouts else maps
        total: Tensor = model.classifier(maps.mean((2, 3))).logsumexp(1).sum()
        return total

    def act() -> None:
        for _ in range(GROUPS):
            descend(parameters, loss())

    return act


def training(width: int, method: str) -> Callable[[], object]:
    name = f"small-{width}"
    if name not in MODELS:
        MODELS.register(name, "a ResNet-18 with few channels")(partial(ResNet18, width=width))
    config = RunConfig.preset("seq-cifar10", method, buffer_size=200, model=name, precision="float32")
    config = config.change(epochs=10_000, tasks=1)
    steps = train(config, made_up(config, samples=960), torch.device("cpu"))
    for _ in range(30):
        next(steps)
    return steps.__next__


def test(width: int, rows: int) -> Case:
    model = group_batchnorm(ResNet18(SHAPE, 10, width=width)).to(memory_format=torch.channels_last)
    shown = torch.randint(0, 256, (1000, *SHAPE), dtype=torch.uint8)
    size = patch.object(evaluation, "CPU_BATCH_ELEMENTS", rows * shown[0].numel())
    return lambda: evaluation.predict(model, shown, Normalize()), size, 1


def cases(width: int) -> dict[str, Case]:
    usual = network(width)
    found: dict[str, Callable[[], object] | tuple[Callable[[], object], AbstractContextManager[Any]]] = {
        "network": usual,
        "convolutions": convolutions(width),
        "linf": training(width, "linf"),
        "er": training(width, "er"),
        "passes": passes(width, own_layouts=False),
        "mkldnn": passes(width, own_layouts=True),
        "channels-first": network(width, torch.contiguous_format),
        "bfloat16": (usual, torch.autocast("cpu", torch.bfloat16)),
    }
    known: dict[str, Case] = {}
    for name, each in found.items():
        act, change = each if isinstance(each, tuple) else (each, nullcontext())
        known[f"{name}-{width}"] = (act, change, 1)
    known |= {f"test-{rows}-{width}": test(width, rows) for rows in TESTS}
    return known


def base_of(name: str) -> str:
    kind, _, width = name.rpartition("-")
    return f"test-260-{width}" if kind.startswith("test-") else f"network-{width}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--only", nargs="+", help="these cases, network among them")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepare_cpu()
    known = {name: case for width in options.widths for name, case in cases(width).items()}
    if options.only:
        known = {name: case for name, case in known.items() if name.rpartition("-")[0] in options.only}
    capability = torch.backends.cpu.get_cpu_capability()
    report = {"about": ABOUT, "capability": capability, **take_turns(known, options.rounds, base_of)}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
