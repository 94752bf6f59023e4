"""How much a run has to compute, and about how long that takes on machines like those that were measured."""

import json
from functools import cache
from math import ceil
from pathlib import Path

import torch

from holdfast.config import RunConfig
from holdfast.methods import REGULARIZERS, needs_buffer
from holdfast.models import MODELS

__all__ = ["SHAPES", "expected_seconds", "step_operations", "steps_of"]

_SIZES = {
    "seq-mnist": ((1, 28, 28), 10, 60_000),
    "rot-mnist": ((1, 28, 28), 10, 60_000),
    "perm-mnist": ((1, 28, 28), 10, 60_000),
    "mnist-360": ((1, 28, 28), 10, 54_000),
    "seq-cifar10": ((3, 32, 32), 10, 50_000),
    "seq-cifar100": ((3, 32, 32), 100, 50_000),
    "seq-tinyimagenet": ((3, 64, 64), 200, 100_000),
}
"""Input shape, classes and training samples of each benchmark, known without its data."""

SHAPES = {name: (shape, classes) for name, (shape, classes, _) in _SIZES.items()}

REPEATED = ("rot-mnist", "perm-mnist")
"""Each task of these has all training samples; the tasks of the others share them."""


def steps_of(config: RunConfig) -> int | None:
    """The steps of a run, give or take one per task and epoch; None for a benchmark of somebody else's."""
    if config.benchmark not in _SIZES:
        return None
    tasks = config.tasks or 1
    samples = _SIZES[config.benchmark][2] / (1 if config.benchmark in REPEATED else tasks)
    return tasks * config.epochs * ceil(min(samples, config.train_limit or samples) / config.batch_size)


def step_operations(config: RunConfig) -> float:
    """Floating-point operations of one step; the backward pass counts as two forward passes."""
    replayed = config.replay_size if needs_buffer(config.method) else 0
    compared = config.batch_size if config.method in REGULARIZERS else 0
    return 3.0 * _forward_operations(config.model, config.benchmark) * (config.batch_size + replayed + compared)


@cache
def _forward_operations(model: str, benchmark: str) -> float:
    """Floating-point operations of a forward pass on one sample."""
    from torch.utils.flop_counter import FlopCounterMode  # slow to import, as it imports Triton

    shape, classes = SHAPES[benchmark]
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        MODELS[model](shape, classes).eval()(torch.zeros(1, *shape))
    return float(counter.get_total_flops())


def expected_seconds(config: RunConfig, device_type: str) -> float | None:
    """About how long a run takes where none like it was measured yet; None if there is nothing to go by.

    The time of a step is taken to be a constant plus its operations at a constant rate. speeds.json has both numbers
    for one core and for one GPU, fitted to what `holdfast bench` measured there (scripts/speeds.py).
    """
    speeds = json.loads((Path(__file__).parent / "speeds.json").read_text("utf-8"))
    steps = steps_of(config)
    if steps is None or device_type not in speeds:
        return None
    speed: dict[str, float] = speeds[device_type]
    return speed["start"] + steps * (speed["step"] + speed["operation"] * step_operations(config))
