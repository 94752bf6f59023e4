"""The names that a run consists of: its benchmark and its method, a learner or a regularizer of one name space."""

from typing import Any

from holdfast.registry import Registry

__all__ = ["ALIASES", "BENCHMARKS", "LEARNERS", "REGULARIZERS", "canonical", "is_registered", "method_names"]
__all__ += ["needs_buffer"]

BENCHMARKS: Registry[Any] = Registry("benchmark")
"""Functions (config, data root) -> Benchmark by name."""

LEARNERS: Registry[Any] = Registry("method")
"""Subclasses of `holdfast.Learner` by name."""

REGULARIZERS: Registry[Any] = Registry("regularizer", beside=LEARNERS)
"""Functions (current, stored) -> consistency term, by name; each is a method by itself."""

ALIASES = {"derpp": "mse"}
"""Other names of methods: DER++ is consistency replay with mse."""


def is_registered(method: str) -> bool:
    """Whether a method is known. One of a plugin is from when its module is imported."""
    return method in LEARNERS or method in REGULARIZERS


def canonical(method: str) -> str:
    """The name under which a method is registered. Names that nobody knows stay as they are."""
    return method if is_registered(method) else ALIASES.get(method, method)


def method_names() -> list[str]:
    """All methods a run can name: the learners, and every regularizer as consistency replay."""
    return [name for name in LEARNERS if name != "consistency"] + list(REGULARIZERS)


def needs_buffer(method: str) -> bool:
    """Whether a method stores samples. One that is not registered yet is taken to."""
    learner = LEARNERS.get(method)
    return True if learner is None else bool(learner.needs_buffer)
