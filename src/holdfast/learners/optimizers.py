"""What a learner needs of an optimiser and of a learning-rate schedule, and those that runs use."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.config import RunConfig
from holdfast.errors import UsageError

__all__ = [
    "ByUpdates",
    "FadingRate",
    "MomentumSgd",
    "Optimizer",
    "PlainSgd",
    "Scheduler",
    "adopt",
    "clip_gradients",
    "decayed",
    "fitting",
    "forget_gradients",
    "gradients_of",
    "made_again",
    "make_optimizer",
]


class Optimizer(Protocol):
    """Any of torch.optim, or anything else with these two methods."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> Any:
        """Update the parameters."""


class Scheduler(Protocol):
    """Any of torch.optim.lr_scheduler, or anything else with these three methods. See also `ByUpdates`."""

    def step(self, *args: Any) -> Any:
        """Change the learning rate; called after every step of the optimiser."""

    def state_dict(self) -> dict[str, Any]:
        """All that decides what the next steps do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue where another one was."""


class ByUpdates:
    """A scheduler that wants to be told the number of updates, as those of timm; counts them."""

    def __init__(self, inner: Any) -> None:
        if getattr(inner, "t_in_epochs", False):
            raise UsageError(
                "this scheduler counts epochs, of which a learner knows nothing: make it with t_in_epochs=False and "
                "lengths in updates, or leave it out and call its step(epoch) yourself."
            )
        self.inner, self.updates = inner, 0

    def step(self) -> None:
        """Tell the scheduler of one more update."""
        self.updates += 1
        self.inner.step_update(self.updates)

    def state_dict(self) -> dict[str, Any]:
        """The count, and what the scheduler saves."""
        return {"updates": self.updates, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another one was."""
        self.updates = state["updates"]
        self.inner.load_state_dict(state["inner"])


def fitting(scheduler: Any, optimizer: Optimizer) -> Scheduler | None:
    """The scheduler as a learner calls it, if there is one; one that was made for another optimiser raises."""
    scheduled = getattr(scheduler, "optimizer", optimizer)
    if isinstance(scheduled, torch.optim.Optimizer) and scheduled is not optimizer:
        raise UsageError("the scheduler was made for another optimiser than this learner's: make it for this one.")
    return ByUpdates(scheduler) if hasattr(scheduler, "step_update") else scheduler


def forget_gradients(optimizer: Optimizer) -> None:
    """What `zero_grad` does; that of torch.optim spends ten times as long on a record for the profiler."""
    if type(optimizer).zero_grad.__module__ != "torch.optim.optimizer" or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:  # type: ignore[attr-defined]
        for parameter in group["params"]:
            parameter.grad = None


def adopt(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """Let the optimiser update these parameters as well, with the settings of its last group."""
    if isinstance(optimizer, PlainSgd):
        optimizer.adopt(parameters)
    elif hasattr(optimizer, "param_groups"):
        group, state = optimizer.param_groups[-1], getattr(optimizer, "state", {})
        if state:  # some make it when they are made, such as Adagrad before torch 2.13
            with suppress(TypeError):  # the others may need more than a group's settings to be made
                state.update(made_again(optimizer, group, parameters).state)
        # Not a group of its own: schedulers count groups when they are made.
        group["params"].extend(parameters)
    else:
        raise UsageError(
            f"an optimiser of type {type(optimizer).__name__} has no param_groups that could take in further "
            "parameters; use one of torch.optim."
        )


def made_again(optimizer: Any, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Any:
    """A new optimiser of the same class, for these parameters, with the settings of a group."""
    known = signature(type(optimizer)).parameters
    settings = {name: value for name, value in group.items() if name in known}
    return type(optimizer)(**{**settings, "params": parameters})


def gradients_of(optimizer: Optimizer, model: nn.Module, *, every: bool = False) -> list[Tensor]:
    """The gradients that the optimiser's next step applies; other parameters may hold old ones that nobody clears.

    With `every`, parameters without a gradient are given one of zeros.
    """
    trained: Callable[[], list[Tensor]] | None = getattr(optimizer, "trained", None)
    groups = getattr(optimizer, "param_groups", [{"params": model.parameters()}])
    parameters = [each for group in groups for each in group["params"]] if trained is None else trained()
    for each in parameters if every else ():
        if each.requires_grad and each.grad is None:
            each.grad = torch.zeros_like(each)
    return [each.grad for each in parameters if each.grad is not None]


@torch.no_grad()
def clip_gradients(gradients: list[Tensor], limit: float) -> None:
    """Scale all gradients together, in place, so that their common norm is at most `limit`."""
    # Of sparse ones, their numbers count, those of the same place together; all are scaled where they are.
    counted = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    scaled = [each._values() if each.is_sparse else each for each in gradients]
    scale = (limit / (torch.nn.utils.get_total_norm(counted) + 1e-6)).clamp_(max=1.0)
    for device in {each.device for each in scaled}:
        torch._foreach_mul_([each for each in scaled if each.device == device], scale.to(device))


def decayed(gradients: list[Tensor], parameters: list[Tensor], weight_decay: float) -> list[Tensor]:
    """The gradients of the loss and of `weight_decay` / 2 times the squares of all parameters."""
    return list(torch._foreach_add(gradients, parameters, alpha=weight_decay)) if weight_decay else gradients


class PlainSgd:
    """SGD without momentum, hence without state.

    Equal to torch.optim.SGD, which costs 0.1 ms of Python more per step and 1.4 s of imports before the first. `lr` is
    a number, or a 0-d tensor that a schedule changes in place.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float | Tensor, weight_decay: float = 0.0) -> None:
        self.parameters, self.lr, self.weight_decay = list(parameters), lr, weight_decay

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def adopt(self, parameters: list[nn.Parameter]) -> None:
        """Update these parameters as well."""
        self.parameters += parameters

    def trained(self) -> list[Tensor]:
        """The tensors whose gradients `step` applies."""
        return list(self.parameters)

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter against its gradient."""
        moved = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if moved:
            parameters, gradients = (list(each) for each in zip(*moved, strict=True))
            self._move(parameters, decayed(gradients, parameters, self.weight_decay))

    def _move(self, parameters: list[Tensor], directions: list[Tensor]) -> None:
        if isinstance(self.lr, Tensor):
            torch._foreach_sub_(parameters, torch._foreach_mul(directions, self.lr))
        else:
            torch._foreach_add_(parameters, directions, alpha=-self.lr)


class MomentumSgd(PlainSgd):
    """SGD with momentum and weight decay, as torch.optim.SGD; its state stays at fixed addresses for CUDA graphs."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float | Tensor, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, lr, weight_decay)
        self.momentum = momentum
        self.velocities = [torch.zeros_like(parameter) for parameter in self.parameters]

    def adopt(self, parameters: list[nn.Parameter]) -> None:
        """Update these parameters as well; their velocities begin at 0."""
        super().adopt(parameters)
        self.velocities += [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter along its velocity."""
        both = zip(self.parameters, self.velocities, strict=True)
        moved = [(each, velocity, each.grad) for each, velocity in both if each.grad is not None]
        if not moved:
            return
        parameters, velocities, gradients = (list(each) for each in zip(*moved, strict=True))
        torch._foreach_mul_(velocities, self.momentum)
        torch._foreach_add_(velocities, decayed(gradients, parameters, self.weight_decay))
        self._move(parameters, velocities)

    def state_dict(self) -> dict[str, Any]:
        """The velocities."""
        return {"velocities": self.velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another one was, in place."""
        for own, saved in zip(self.velocities, state["velocities"], strict=True):
            own.copy_(saved)


class FadingRate:
    """A learning rate that falls from its peak to 0 within each task, along half a cosine or a straight line.

    Count and rate are tensors on the device, so that a captured step moves them too.
    """

    def __init__(self, lr: Tensor, shape: str) -> None:
        self.lr, self.shape, self.peak = lr, shape, float(lr)
        self.done = torch.zeros((), dtype=torch.float64, device=lr.device)
        self.steps = torch.ones((), dtype=torch.float64, device=lr.device)

    def restart(self, steps: int) -> None:
        """Begin a task of so many steps."""
        self.done.zero_()
        self.steps.fill_(steps)
        self.lr.fill_(self.peak)

    def step(self) -> None:
        """Count a step and set the rate of the next one."""
        self.done += 1
        share = self.done / self.steps
        left = (1 + torch.cos(math.pi * share)) / 2 if self.shape == "cosine" else 1 - share
        self.lr.copy_(self.peak * left.clamp(min=0))

    def state_dict(self) -> dict[str, Any]:
        """How far the task is."""
        return {"done": self.done, "steps": self.steps, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another one was, in place."""
        for name, own in self.state_dict().items():
            own.copy_(state[name])


def make_optimizer(config: RunConfig, model: nn.Module, device: torch.device) -> tuple[Optimizer, FadingRate | None]:
    """The optimiser of a run, and its schedule if the learning rate is not constant."""
    lr: float | Tensor = config.lr
    schedule = None
    if config.schedule != "constant":
        lr = torch.tensor(config.lr, dtype=torch.float64, device=device).float()
        schedule = FadingRate(lr, config.schedule)
    if config.optimizer == "sgd":
        parameters, momentum, decay = model.parameters(), config.momentum, config.weight_decay
        return MomentumSgd(parameters, lr, momentum, decay) if momentum else PlainSgd(parameters, lr, decay), schedule
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    # Capturable: its counts are tensors on the device, which a CUDA graph moves.
    captured = device.type == "cuda"
    return kind(model.parameters(), lr=lr, weight_decay=config.weight_decay, capturable=captured), schedule
