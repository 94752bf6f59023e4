"""The learner that a run's config names, and the settings that it has."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.augment import View
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners.base import Learner
from holdfast.learners.optimizers import Optimizer, Scheduler
from holdfast.learners.replay import ReplayLearner
from holdfast.methods import is_registered, learner_of, method_names
from holdfast.registry import unknown_name

__all__ = ["Parts", "make_learner", "settings_for", "settings_of"]


@dataclass(frozen=True)
class Parts:
    """What a run hands to the learner it makes."""

    model: nn.Module
    optimizer: Optimizer
    view: View
    generator: torch.Generator
    """On the device of the run; decides what the buffer stores and draws."""
    network: Callable[[Any], Tensor] | None = None
    """What computes the model's outputs in a step, if it is not the model."""
    scheduler: Scheduler | None = None


def settings_of(learner: type[Learner]) -> dict[str, Parameter]:
    """The settings of a method by name: the keyword arguments of its constructor that have a default."""
    parameters = list(signature(learner.__init__).parameters.values())
    if issubclass(learner, ReplayLearner) and learner.draws:
        parameters.append(Parameter("replay_size", Parameter.KEYWORD_ONLY, default=None))
    return {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is not each.empty}


def settings_for(config: RunConfig) -> dict[str, Any]:
    """The settings of a run's method that no other field of its config decides, by name, with their defaults."""
    learner = _learner_named(config.method)
    decided, own = learner.arguments(config), settings_of(learner).items()
    shared = {"balanced": False} if learner.needs_buffer else {}
    return {name: each.default for name, each in own if name not in decided} | shared


def make_learner(config: RunConfig, parts: Parts) -> Learner:
    """The learner for `config.method`: one registered under that name, or consistency replay with that regularizer."""
    learner, known = _learner_named(config.method), list(settings_for(config))
    for name, _ in config.settings:
        if name not in known:
            raise unknown_name(f"setting of {config.method}", name, known)
    for name, _ in config.options:
        if "options" not in learner.arguments(config):
            raise UsageError(f"{config.method} has no regularizer, and so no option regularizer.{name}.")
    return learner.from_config(config, parts)


def _learner_named(method: str) -> type[Learner]:
    if not is_registered(method):
        raise unknown_name("method", method, method_names())
    learner: type[Learner] = learner_of(method)
    return learner
