"""SI: parameters that brought the loss down in earlier tasks are held where they were.

Zenke, Poole, Ganguli, "Continual Learning Through Synaptic Intelligence", ICML 2017. As in the code of Buzzega et al.,
from which the published values come, gradients are those of the whole loss, and each number is limited to 1.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.learners.ewc import AnchoredLearner
from holdfast.learners.losses import Losses, widen
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import Options
from holdfast.methods import LEARNERS

__all__ = ["SynapticIntelligence"]


@LEARNERS.register("si", "synaptic intelligence: parameters that mattered are held where they were, nothing stored")
class SynapticIntelligence(AnchoredLearner):
    """Cross-entropy, and a quadratic penalty on leaving the parameters of the last task's end.

    loss = CE + strength * sum_k O_k (w_k - w*_k)^2;  each step adds - gradient_k * (change of w_k) to o_k, and at a
    task's end O_k <- O_k + o_k / ((w_k - w*_k)^2 + damping), then w* = w and o = 0

    It needs to be told when a task ends: `end_task(x, y)`.

    Options of this learner:

    - strength: weight of the penalty; the paper calls it c. Default: 1.
    - damping: keeps O finite for parameters that have not moved, above 0; the paper calls it xi. Default: 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strength: float = 1.0,
        damping: float = 1.0,
        **shared: Unpack[Options],
    ) -> None:
        super().__init__(model, optimizer, strength, **shared)
        if not damping > 0:
            raise UsageError(f"damping must be above 0, not {damping}.")
        self.damping = damping
        self.before = {name: torch.zeros_like(each) for name, each in self.anchors.items()}
        self.paths = {name: torch.zeros_like(each) for name, each in self.importances.items()}

    @torch.no_grad()
    def backward(self, losses: Losses) -> list[Tensor]:
        """The gradients, each number limited to 1; and where the parameters are before they move."""
        torch._foreach_copy_(list(self.before.values()), [each.detach() for each in self.parameters.values()])
        gradients = super().backward(losses)
        torch._foreach_clamp_min_(gradients, -1.0)
        torch._foreach_clamp_max_(gradients, 1.0)
        return gradients

    @torch.no_grad()
    def commit(self, losses: Losses) -> None:
        """Add what each parameter contributed to the fall of the loss."""
        super().commit(losses)
        for name, now in self.parameters.items():
            if now.grad is not None:
                self.paths[name].sub_(widen(now.grad) * (now - self.before[name]))

    @torch.no_grad()
    def end_task(self, x: Tensor, y: Tensor) -> None:
        """Turn the contributions into importances, and take the parameters as they are now as the place to stay."""
        for name, path in self.paths.items():
            moved = self.parameters[name] - self.anchors[name]
            self.importances[name].add_(path / (moved**2 + self.damping))
            path.zero_()
        self.drop_anchors()

    def extra_state(self) -> dict[str, nn.Module | Tensor | torch.Generator]:
        """Importance, anchor and path of every parameter, in the order of the model."""
        kinds = {"importance": self.importances, "anchor": self.anchors, "path": self.paths}
        return {f"{kind} {number}": each for kind, all_ in kinds.items() for number, each in enumerate(all_.values())}
