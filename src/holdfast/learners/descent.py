"""What a learner needs of an optimiser, and the plain one that runs use."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["BfloatTwin", "Optimizer", "PlainSgd", "Scheduler", "forget_gradients"]


class Optimizer(Protocol):
    """Any of torch.optim, or anything else with these two methods."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> Any:
        """Update the parameters."""


def forget_gradients(optimizer: Optimizer) -> None:
    """What `zero_grad` does; that of torch.optim spends ten times as long on a record for the profiler."""
    if type(optimizer).zero_grad.__module__ != "torch.optim.optimizer" or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:  # type: ignore[attr-defined]
        for parameter in group["params"]:
            parameter.grad = None


class Scheduler(Protocol):
    """Any of torch.optim.lr_scheduler, or anything else with these three methods."""

    def step(self, *args: Any) -> Any:
        """Change the learning rate; called after every step of the optimiser."""

    def state_dict(self) -> dict[str, Any]:
        """All that decides what the next steps do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue where another one was."""


class PlainSgd:
    """SGD with a constant learning rate and nothing else: no momentum, no weight decay, hence no state.

    Equal to torch.optim.SGD, which costs 0.1 ms of Python more per step and 1.4 s of imports before the first.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter against its gradient."""
        moved: list[Tensor] = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_add_(moved, gradients, alpha=-self.lr)


class BfloatTwin(PlainSgd):
    """Plain SGD on float32 weights, with a twin of the network whose matrices are in bfloat16.

    Autocast converts every weight to bfloat16 in each forward pass and every gradient back, one kernel each. The twin
    keeps the bfloat16 weights between steps and converts all of them at once, which gives the same numbers.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        """`model` keeps the float32 weights; `self.network` computes with the others."""
        matrices = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        # Everything but the matrices is shared; BatchNorms wholly, since they also share who is in which group.
        shared = [*model.parameters(), *model.buffers(), *(m for m in model.modules() if isinstance(m, _BatchNorm))]
        memo: dict[int, Any] = {id(thing): thing for thing in shared}
        self.network: nn.Module = deepcopy(model, memo)
        self.masters: list[Tensor] = []
        self.twins: list[Tensor] = []
        for module in matrices:
            for name, parameter in module.named_parameters(recurse=False):
                twin = nn.Parameter(parameter.detach().bfloat16())
                setattr(memo[id(module)], name, twin)
                self.masters.append(parameter)
                self.twins.append(twin)
        converted = {id(master) for master in self.masters}
        super().__init__((p for p in model.parameters() if id(p) not in converted), lr)
        self._gradients = [torch.empty_like(master) for master in self.masters]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        super().zero_grad()
        for twin in self.twins:
            twin.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the float32 weights against the gradients of the twin, and the twin with them."""
        super().step()
        torch._foreach_copy_(self._gradients, [twin.grad for twin in self.twins if twin.grad is not None])
        torch._foreach_add_(self.masters, self._gradients, alpha=-self.lr)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the twin what the float32 weights are; needed after anything else than `step` changed those."""
        torch._foreach_copy_(self.twins, self.masters)
