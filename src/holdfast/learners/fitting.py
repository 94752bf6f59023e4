"""Whether a saved state fits a learner: asked part by part before anything is loaded. Each raises, or has no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.learners.descent import Optimizer, Scheduler
from holdfast.learners.growing import Head

__all__ = ["check_model", "check_optimizer", "check_parts", "check_scheduler"]


def check_parts(state: Mapping[str, Any], own: Mapping[str, bool]) -> None:
    """A state must have the parts that a learner has, and no others."""
    for name, needed in own.items():
        if needed != (name in state):
            has, lacks = ("this", "the saved") if needed else ("the saved", "this")
            raise UsageError(f"{has} learner keeps state of its {name}, {lacks} one does not; make them alike.")


def check_model(state: Mapping[str, Any], model: nn.Module, head: Head | None) -> None:
    """The same tensors in the same shapes; a head that may grow may have fewer outputs than the saved one."""
    saved, own = _forms(state), _forms(model.state_dict())
    for name, part in head.parameters().items() if head is not None else ():
        there = state.get(name)
        if there is not None and len(there) > len(part) and there.shape[1:] == part.shape[1:]:
            own[name] = saved[name]
    differing = sorted(name for name in saved | own if saved.get(name) != own.get(name))
    if differing:
        name = differing[0]
        raise UsageError(
            f"the saved model does not fit this one: {name} is {saved.get(name, 'missing')} in the file and "
            f"{own.get(name, 'missing')} here. Build the model as it was when saved; one whose head had grown, "
            "with head= as then, or with as many outputs as it had in the end."
        )


def check_optimizer(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Of the same kind, with the same numbers of parameters."""
    if state["type"] != type(optimizer).__name__:
        raise UsageError(f"the saved optimiser is {state['type']}, this one {type(optimizer).__name__}.")
    groups = getattr(optimizer, "param_groups", [])
    saved, own = ([len(group["params"]) for group in each] for each in (state["state"].get("param_groups", []), groups))
    if saved != own:
        raise UsageError(
            f"the saved optimiser does not fit this one: it updates groups of {saved} parameters, this one {own}. "
            "Build the optimiser as it was when saved."
        )


def check_scheduler(state: Mapping[str, Any], scheduler: Scheduler) -> None:
    """Of the same kind."""
    if state["type"] != type(scheduler).__name__:
        raise UsageError(f"the saved scheduler is {state['type']}, this one {type(scheduler).__name__}.")


def _forms(values: Mapping[str, Any]) -> dict[str, str]:
    """Shape and type of every tensor."""
    return {name: f"{tuple(value.shape)} {value.dtype}" for name, value in values.items() if isinstance(value, Tensor)}
