"""What a run is: a complete, frozen description with a fingerprint. presets.toml -> RunConfig."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import isfinite
from typing import Any

from holdfast.errors import UsageError
from holdfast.methods import BENCHMARKS, canonical, is_registered, method_names, needs_buffer
from holdfast.registry import unknown_name

__all__ = ["PRECISIONS", "PROTOCOL", "RunConfig", "Setting"]

PROTOCOL = 1
"""Raised whenever the same config would mean another computation, so that old results are never mixed with new."""

LARGEST = 3.4028234663852886e38  # the largest number of float32, in which networks compute
PRECISIONS = ("float32", "bfloat16")
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "linear")

TYPO = 0.85
"""A name that is at least as similar to a known one (difflib's ratio) is taken to be that one, mistyped."""

Setting = float | int | bool | str
"""A value of a method's own setting."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines the numbers of one run. Names are the paper's where it has them."""

    benchmark: str
    method: str
    buffer_size: int | None
    """Slots of the reservoir (M); None for methods without one."""
    seed: int = 0
    model: str = "mlp"
    tasks: int | None = None
    """Number of tasks; None for the benchmark's own."""
    epochs: int = 1
    batch_size: int = 32
    """Samples of the stream a step, and of the replayed draw with labels (draw 2)."""
    replay_size: int = 32
    """Samples of the consistency draw (draw 1); for er, of its only draw."""
    lr: float = 0.03
    alpha: float = 1.0
    """Weight of the replayed cross-entropy."""
    beta: float = 1.0
    """Weight of the consistency term."""
    precision: str = "float32"
    """Arithmetic of the network's forward and backward pass: float32, or bfloat16 by autocast.

    On GPUs that have it, convolutions of float32 numbers are in TF32, as PyTorch does by default.
    """
    train_limit: int | None = None
    """Use only the first so many training samples of each task; None for all."""
    options: tuple[tuple[str, float], ...] = ()
    """Hyper-parameters of the regularizer that differ from its defaults, by name."""
    validation: float = 0.0
    """Share of each task's training samples to test on in place of its test set, for tuning; 0 for the test set."""
    optimizer: str = "sgd"
    momentum: float = 0.0
    """Of sgd."""
    weight_decay: float = 0.0
    schedule: str = "constant"
    """Learning rate within each task: constant, or falling to 0 along half a cosine or a line (linear)."""
    settings: tuple[tuple[str, Setting], ...] = ()
    """The method's own settings that differ from its defaults, by name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", canonical(self.method))  # one fingerprint for all names of a method
        for name in ("tasks", "epochs", "batch_size", "replay_size", "train_limit", "buffer_size"):
            value, spoken = getattr(self, name), name.replace("_", " ")
            optional = name in ("tasks", "train_limit", "buffer_size")
            if not (optional and value is None) and not (_is_whole(value) and 1 <= value < 2**63):
                raise UsageError(f"{spoken} must be a whole number of at least 1 and below 2**63, not {value!r}.")
        if not _is_whole(self.seed) or abs(self.seed) >= 2**63:  # a result with a larger one could not be read
            raise UsageError(f"seed must be a whole number between -2**63 and 2**63, not {self.seed!r}.")
        if not needs_buffer(self.method):
            object.__setattr__(self, "buffer_size", None)
        elif self.buffer_size is None and is_registered(self.method):  # a result may be of a plugin that is not here
            raise UsageError(f"method '{self.method}' needs a buffer size, for instance 200.")
        for name in ("lr", "alpha", "beta", "validation", "momentum", "weight_decay"):
            value = getattr(self, name)
            if not _is_finite(value) or not 0 <= value <= LARGEST:
                raise UsageError(f"{name} must be a finite number of at least 0 that float32 has, not {value!r}.")
            # One spelling of each number (1 and 1.0, 0.0 and -0.0): equal configs share a fingerprint.
            object.__setattr__(self, name, abs(float(value)))
        if self.validation >= 1:
            raise UsageError(f"validation must be a share of less than 1, for instance 0.1, not {self.validation}.")
        if self.momentum >= 1:
            raise UsageError(f"momentum must be less than 1, for instance 0.9, not {self.momentum}.")
        if self.momentum and self.optimizer != "sgd":
            raise UsageError(f"momentum belongs to sgd; {self.optimizer} has its own.")
        object.__setattr__(self, "options", _sorted_pairs(self.options, "regularizer."))
        object.__setattr__(self, "settings", _sorted_pairs(self.settings, ""))
        for name, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), list(known))

    @classmethod
    def preset(
        cls, benchmark: str, method: str, *, buffer_size: int | None = 200, seed: int = 0, **changes: Any
    ) -> RunConfig:
        """The published hyper-parameters for a benchmark, method and buffer size, with any `changes` on top.

        A benchmark of one's own, which `run` is given, may have a name that is not registered.

        >>> RunConfig.preset("rot-mnist", "linf", buffer_size=500).lr
        0.2
        """
        method = canonical(method)
        if method not in method_names():
            raise unknown_name("method", method, method_names())
        if benchmark not in BENCHMARKS and get_close_matches(benchmark, BENCHMARKS, 1, TYPO):
            raise unknown_name("benchmark", benchmark, list(BENCHMARKS))
        if not needs_buffer(method):
            buffer_size = None
        values = _preset(benchmark, method, buffer_size)
        return cls(benchmark=benchmark, method=method, buffer_size=buffer_size, seed=seed, **values).change(**changes)

    def change(self, **changes: Any) -> RunConfig:
        """This config with some values replaced; an unknown name raises an error."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise unknown_name("setting", name, known)
        return replace(self, **changes)

    def parse(self, assignments: Iterable[str], settings: Mapping[str, Any] | None = None) -> RunConfig:
        """This config with `key=value` texts applied, as typed at a command line.

        `regularizer.temperature=0.1` sets a hyper-parameter of the regularizer. `settings` are the method's own, by
        name, each with its default. A text is converted to the type of the default. Where that is None, the text itself
        decides: `3` is a whole number, `true` a truth value.
        """
        changes: dict[str, Any] = {}
        options, own, known = dict(self.options), dict(self.settings), dict(settings or {})
        defaults = {field.name: field.default for field in fields(self) if field.name not in ("options", "settings")}
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals:
                raise UsageError(f"'{assignment}' is not of the form key=value.")
            if key in ("benchmark", "method", "buffer_size"):
                place = "with --buffer-size 200" if key == "buffer_size" else "as an argument, before the options"
                raise UsageError(f"{key} decides the preset, so it cannot be set on top of one: give it {place}.")
            if key.startswith("regularizer."):
                options[key.removeprefix("regularizer.")] = _number(key, text)
            elif key in known:
                value = _setting(known[key], key, text)
                if value is None:
                    own.pop(key, None)
                elif own.get(key, known[key]) != value:  # a value that is in force already changes no fingerprint
                    own[key] = value
            elif key in defaults:
                changes[key] = _like(defaults[key], key, text)
            else:
                raise unknown_name("setting", key, [*defaults, *known, "regularizer.NAME"])
        if "tasks" in changes and changes["tasks"] is None:  # the number itself, as one run has one fingerprint
            changes["tasks"] = _preset(self.benchmark, self.method, self.buffer_size).get("tasks")
        return self.change(**changes, options=tuple(options.items()), settings=tuple(own.items()))

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values; `from_dict` reverses it.

        Fields after `options` came later. They are left out where they have their default, so that a new field never
        changes the fingerprint of an old config.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"options": dict(self.options), "settings": dict(self.settings)}
        later = fields(self)[list(values).index("options") + 1 :]
        for field in later:
            if getattr(self, field.name) == field.default:
                del values[field.name]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """The config that `to_dict` described."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise UsageError(f"not settings of a run: {', '.join(sorted(unknown))}. A newer version may know them.")
        return cls(**values)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name this computation: equal configs under one protocol, and only those, share it."""
        text = json.dumps({"protocol": PROTOCOL, **self.to_dict()}, sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """A short name for people."""
        buffer = "" if self.buffer_size is None else f", buffer {self.buffer_size}"
        return f"{self.benchmark} {self.method}{buffer}, seed {self.seed}"


def _sorted_pairs(given: Any, prefix: str) -> tuple[tuple[str, Any], ...]:
    """Pairs sorted by name, each number in one spelling; a number that is not finite raises.

    Options of a regularizer, which have a `prefix`, are floats; settings of a method, which have none, may be words.
    """
    values = dict(given)
    for name, value in values.items():
        if isinstance(value, bool) or (isinstance(value, str) and not prefix):
            continue
        if not _is_finite(value) or (_is_whole(value) and abs(value) >= 2**63):
            raise UsageError(f"{prefix}{name} must be a finite number, a whole one below 2**63, not {value!r}.")
        values[name] = float(value) + 0.0 if prefix or isinstance(value, float) else value
    return tuple(sorted(values.items()))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{key} must be a number, not '{text}'.") from None


def _setting(default: object, key: str, text: str) -> Setting | None:
    """`text` as a value of a method's own setting, whose default may be anything."""
    if isinstance(default, Setting):
        value: Setting = _like(default, key, text)
        return value
    if default is not None:
        raise UsageError(f"{key} is {default!r} by default, and a run can set numbers, words, true and false only.")
    if text.lower() in ("none", ""):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _like(default: object, key: str, text: str) -> Any:
    """`text` as a value of the type of `default`; a default of None stands for a whole number or none."""
    if isinstance(default, str):
        return text
    if default is None and text.lower() in ("none", ""):
        return None
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise UsageError(f"{key} must be true or false, not '{text}'.")
        return text.lower() == "true"
    if isinstance(default, float):
        return _number(key, text)
    try:
        return int(text)  # exact, however large
    except ValueError:
        number = _number(key, text)  # `1e3` is a whole number as well
    if not number.is_integer():
        raise UsageError(f"{key} must be a whole number, not '{text}'.")
    return int(number)


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(files("holdfast").joinpath("presets.toml").read_text("utf-8"))


def _preset(benchmark: str, method: str, buffer_size: int | None) -> dict[str, Any]:
    """The values presets.toml gives, from the most general table to the most specific."""
    tables = _tables()
    table = tables["benchmarks"].get(benchmark, tables["default"])
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    family = table.get(method)
    values |= _column(family if isinstance(family, dict) else table.get("consistency", {}), buffer_size)
    if method in tables["beta"]:
        values["beta"] = tables["beta"][method]
    values |= _column(table.get("tuned", {}).get(method, {}), buffer_size)
    # Names that are no field of a config are settings of the method.
    own = {key: values.pop(key) for key in set(values) - {field.name for field in fields(RunConfig)}}
    return values | {"settings": tuple(own.items())}


def _column(family: dict[str, Any], buffer_size: int | None) -> dict[str, Any]:
    """What a table says of every buffer size, and then of this one."""
    values = {key: value for key, value in family.items() if not isinstance(value, dict)}
    columns = {int(size): column for size, column in family.items() if isinstance(column, dict)}
    if columns and buffer_size is not None:
        # The column of the next smaller published buffer; smaller ones than all published use the smallest.
        below = [size for size in columns if size <= buffer_size]
        values |= columns[max(below) if below else min(columns)]
    return values
