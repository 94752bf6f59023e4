"""Online EWC: parameters that mattered for earlier tasks are held where they were.

Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017; the online form, one importance
for all earlier tasks: Schwarz et al., "Progress & Compress", ICML 2018. As in the code of Buzzega et al., from which
the published values come, a sample's squared gradient counts with the probability of its label.
"""

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from holdfast.errors import UsageError
from holdfast.learners.base import Learner
from holdfast.learners.losses import Losses, widen
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import Options, check_counts, check_shares, check_weights
from holdfast.methods import LEARNERS
from holdfast.models import evaluating
from holdfast.nested import Nested, chosen_rows, transform
from holdfast.rng import generator

__all__ = ["AnchoredLearner", "OnlineEwc"]

CHUNK = 16
"""Samples whose gradients are in memory at once."""


class AnchoredLearner(Learner):
    """Cross-entropy, and a penalty on leaving the parameters of the last task's end: importance * (now - then)^2.

    A method says in `end_task` how important each parameter was. Nothing is stored.
    """

    needs_boundaries = True
    grows = False
    uses_parameters = True
    terms = ("current", "penalty")

    def __init__(self, model: nn.Module, optimizer: Optimizer, strength: float, **shared: Unpack[Options]) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(strength=strength)
        self.strength = strength
        self.parameters = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        self.anchors = {name: each.detach().clone() for name, each in self.parameters.items()}
        # Sums of many small numbers, which would come to a stop in 16 bits.
        self.importances = {name: torch.zeros_like(widen(each)) for name, each in self.anchors.items()}

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """Cross-entropy and the penalty, which is 0 during the first task."""
        _, current = self.learn_alone(x, y)
        ways = (self.importances[name] * (each - self.anchors[name]) ** 2 for name, each in self.parameters.items())
        penalty = torch.stack([each.sum() for each in ways]).sum()
        return Losses(current + self.strength * penalty, current=current, penalty=penalty)

    @torch.no_grad()
    def drop_anchors(self) -> None:
        """Hold the parameters where they are now."""
        torch._foreach_copy_(list(self.anchors.values()), list(self.parameters.values()))


@LEARNERS.register("ewc", "online EWC: parameters that mattered are held where they were, nothing stored")
class OnlineEwc(AnchoredLearner):
    """Cross-entropy, and a quadratic penalty on leaving the parameters of the last task's end.

    loss = CE + strength * sum_k F_k (w_k - w*_k)^2;  at the end of a task w* = w and
    F_k <- decay * F_k + mean over its samples of p(y|x) * (d log p(y|x) / d w_k)^2

    It needs to be told when a task ends: `end_task(x, y)`. F is computed in evaluation mode.

    Options of this learner:

    - strength: weight of the penalty. Default: 1.
    - decay: how much of F stays when a task ends, 0 to 1. Default: 1.
    - samples: how many samples of a task F is estimated from, chosen at random. Default: 1000.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strength: float = 1.0,
        decay: float = 1.0,
        samples: int = 1000,
        **shared: Unpack[Options],
    ) -> None:
        super().__init__(model, optimizer, strength, **shared)
        check_shares(decay=decay)
        if self.loss is not None:
            raise UsageError("EWC measures importance by the probability of labels: leave out loss=.")
        check_counts(1, samples=samples)
        self.decay, self.samples = decay, samples

    def end_task(self, x: Tensor, y: Tensor) -> None:
        """Learn which parameters mattered for the task, and where they are now."""
        x, y = self.task_samples(x, y)
        chosen = torch.randperm(len(y), generator=generator(self.seed, "importances"))[: self.samples].to(y.device)
        for each in self.importances.values():
            each.mul_(self.decay)
        with evaluating(self.model):
            for part in torch.split(chosen, CHUNK):
                for name, squares in self._squares(self.view(chosen_rows(x, part)), y[part]).items():
                    self.importances[name].add_(squares / len(chosen))
        self.drop_anchors()

    def _squares(self, view: Nested, labels: Tensor) -> dict[str, Tensor]:
        """The sum over samples of p(y|x) * (d log p(y|x) / d w)^2, for each parameter."""

        def log_probability(parameters: dict[str, Tensor], one: Nested, label: Tensor) -> tuple[Tensor, Tensor]:
            def network(*given: Any, **named: Any) -> Any:
                return functional_call(self.model, parameters, given, named)

            outputs = self.answer(transform(lambda each: each[None], one), network)
            value = widen(outputs).log_softmax(1).gather(1, label[None, None]).squeeze()
            return value, value

        parameters = {name: each.detach() for name, each in self.parameters.items()}
        slope = grad(log_probability, has_aux=True)
        try:
            # A copy: a model may have changed it in place before it turns out that vmap cannot do this.
            slopes, logs = vmap(slope, in_dims=(None, 0, 0))(parameters, transform(torch.clone, view), labels)
        except (RuntimeError, ValueError):  # recurrent layers and models that look at values: one sample at a time
            found = [slope(parameters, chosen_rows(view, row), label) for row, label in enumerate(labels)]
            slopes = {name: torch.stack([each[name] for each, _ in found]) for name in parameters}
            logs = torch.stack([log for _, log in found])
        return {name: torch.einsum("b,b...->...", logs.exp().to(each.dtype), each**2) for name, each in slopes.items()}

    def extra_state(self) -> dict[str, nn.Module | Tensor | torch.Generator]:
        """Importance and anchor of every parameter."""
        importances = {f"importance of {name}": each for name, each in self.importances.items()}
        anchors = {f"anchor of {name}": each for name, each in self.anchors.items()}
        return {**importances, **anchors}
