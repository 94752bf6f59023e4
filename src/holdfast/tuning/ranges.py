"""What a study tries: a range for each number, and how drawn values get into a run."""

from collections.abc import Iterable
from dataclasses import fields
from math import isfinite, log
from typing import NamedTuple

import torch

from holdfast.benchmarks import Benchmark
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners import Parts, make_learner, make_optimizer, settings_for
from holdfast.methods import learner_of
from holdfast.registry import unknown_name
from holdfast.rng import generator
from holdfast.training import build_model
from holdfast.workload import SHAPES

__all__ = ["Range", "current_values", "rounded", "search_space", "with_values"]

DIGITS = 3
"""Significant digits of a value. Values are rounded before they are tried: a preset holds exactly those that ran."""
SPAN = 10.0
"""A range reaches from the preset divided by this to the preset times this, unless told otherwise."""


class Range(NamedTuple):
    """Values to try: of lr, alpha, beta, another number of a config, or a setting of the method."""

    name: str
    low: float
    high: float

    @property
    def logarithmic(self) -> bool:
        """Whether values are drawn evenly on a logarithmic scale: where the ends are a factor of ten apart."""
        return self.low > 0 and self.high >= SPAN * self.low

    def place(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1, on the scale that values are drawn on."""
        low, high, own = (log(x) if self.logarithmic else x for x in (self.low, self.high, value))
        return (own - low) / (high - low)

    def cramps(self, value: float) -> bool:
        """Whether a value lies so near an end that better ones may lie beyond it. Below an end of 0 there are none."""
        place = self.place(value)
        return place >= 0.9 or (place <= 0.1 and self.low != 0)


def search_space(config: RunConfig, over: Iterable[str] = (), fixed: Iterable[str] = ()) -> tuple[Range, ...]:
    """What to try: lr, and alpha and beta where the method reads them, without those `fixed`.

    `over` has texts `name=low:high`, for these or for further numbers.
    """
    given: dict[str, Range] = {}
    for found in map(_parse_range, over):
        if found.name in given:
            raise UsageError(f"--over names {found.name} twice: give one range for it.")
        given[found.name] = found
    read = learner_of(config.method).arguments(config)
    usual = ["lr", *(name for name in ("alpha", "beta") if name in read)]
    left_out = set(fixed)
    for name in left_out - set(usual):
        raise UsageError(f"{name} is not tuned anyway; tuned are {', '.join(usual)} and what --over names.")
    for name in sorted(left_out & given.keys()):
        raise UsageError(f"{name} cannot be left as it is (--fix) and be tuned (--over) at once: give one of them.")
    space = [given.get(name) or _around(config, name) for name in usual if name not in left_out]
    space += [each for name, each in given.items() if name not in usual]
    if not space:
        raise UsageError("nothing is left to tune: name something with --over name=low:high.")
    for each in space:
        for value in (each.low, each.high):
            # Raises if there is no such number, or if it cannot have the value, which is rounded before it is tried.
            _try_out(with_values(config, {each.name: rounded(value)}))
    return tuple(space)


def with_values(config: RunConfig, values: dict[str, float]) -> RunConfig:
    """The config with numbers put in by name, as `--set` names them."""
    own = settings_for(config)
    known = [field.name for field in fields(config) if field.type == "float" and field.name != "validation"]
    known += [name for name, default in own.items() if isinstance(default, float)]
    for name in values:
        if name in {*own, *(field.name for field in fields(config))}.difference(known):
            raise UsageError(f"{name} cannot be tuned; what can are {', '.join(known)}.")
        if name not in known and not name.startswith("regularizer."):
            raise unknown_name("number to tune", name, known)
    return config.parse([f"{name}={value!r}" for name, value in values.items()], own)


def current_values(config: RunConfig, space: Iterable[Range]) -> dict[str, float | None]:
    """The numbers that the config has now; None for one that is left to the method's default."""
    own = settings_for(config) | dict(config.settings) | {f"regularizer.{name}": x for name, x in config.options}
    return {each.name: own.get(each.name, getattr(config, each.name, None)) for each in space}


def rounded(value: float) -> float:
    """The value with `DIGITS` significant digits.

    >>> rounded(0.0123456)
    0.0123
    """
    return float(f"{value:.{DIGITS}g}")


def _parse_range(text: str) -> Range:
    name, _, ends = text.partition("=")
    low, _, high = ends.partition(":")
    try:
        found = Range(name.strip(), float(low), float(high))
    except ValueError:
        raise UsageError(f"'{text}' is not of the form name=low:high, for instance lr=0.01:1.") from None
    if not isfinite(found.low) or not isfinite(found.high) or found.low >= found.high:
        raise UsageError(f"'{text}': the low end must be smaller than the high one, and both must be finite.")
    return found


def _around(config: RunConfig, name: str) -> Range:
    """The range around the preset's value."""
    value = getattr(config, name)
    if not value:
        raise UsageError(f"{name} is 0 in the preset; say what to try with --over {name}=low:high, or --fix {name}.")
    return Range(name, rounded(value / SPAN), rounded(value * SPAN))


def _try_out(config: RunConfig) -> None:
    """Raise if the method refuses its settings: make its learner, around a network of the benchmark's shape."""
    if config.benchmark not in SHAPES:
        return  # one of a plugin, whose shape is known only from its data
    shape, classes = SHAPES[config.benchmark]
    model = build_model(config, Benchmark(classes, shape, ()))
    optimizer, schedule = make_optimizer(config, model, torch.device("cpu"))
    make_learner(config, Parts(model, optimizer, lambda x: x, generator(config.seed, "buffer"), scheduler=schedule))
