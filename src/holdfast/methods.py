"""The names that a run consists of: its benchmark and its method.

A method is a learner or a regularizer, and no name means both. A regularizer is carried out by consistency replay.
"""

from typing import Any

from holdfast.registry import Registry

__all__ = ["ALIASES", "BENCHMARKS", "LEARNERS", "REGULARIZERS", "canonical", "is_registered", "learner_of"]
__all__ += ["method_names", "needs_buffer"]

BENCHMARKS: Registry[Any] = Registry("benchmark")
"""Functions (config, data root) -> Benchmark by name."""

LEARNERS: Registry[Any] = Registry("method")
"""Subclasses of `holdfast.Learner` by name."""

REGULARIZERS: Registry[Any] = Registry("regularizer", beside=LEARNERS)
"""Functions (current, stored) -> consistency term, by name; each is a method by itself."""

ALIASES = {"derpp": "mse"}
"""Other names of methods: DER++ is consistency replay with mse."""


def is_registered(method: str) -> bool:
    """Whether a method is known. One of a plugin is known once its module is imported."""
    return method in LEARNERS or method in REGULARIZERS


def canonical(method: str) -> str:
    """The name under which a method is registered. Names that nobody knows stay as they are."""
    return method if is_registered(method) else ALIASES.get(method, method)


def method_names() -> list[str]:
    """All methods a run can name: the learners, and every regularizer as consistency replay."""
    return [name for name in LEARNERS if name != "consistency"] + list(REGULARIZERS)


def learner_of(method: str) -> Any:
    """The subclass of `holdfast.Learner` that carries out a registered method."""
    return LEARNERS.get(method, LEARNERS.get("consistency"))


def needs_buffer(method: str) -> bool:
    """Whether a method stores samples. One that is not registered yet is taken to."""
    return method not in LEARNERS or bool(LEARNERS[method].needs_buffer)
