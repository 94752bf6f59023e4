"""A-GEM: a step must not raise the loss on stored samples.

Chaudhry et al., "Efficient Lifelong Learning with A-GEM", ICLR 2019. The original fills its memory at the end of each
task; here the memory is the reservoir, so that no boundaries are needed (elsewhere called A-GEM-R).
"""

import torch
from torch import Tensor

from holdfast.learners.losses import Losses, widen
from holdfast.learners.replay import ReplayLearner
from holdfast.methods import LEARNERS
from holdfast.nested import Nested

__all__ = ["AveragedGem"]


@LEARNERS.register("agem", "A-GEM: gradients that do not raise the loss on stored samples")
class AveragedGem(ReplayLearner):
    """The gradient g of the minibatch is projected where it would raise the loss on a draw, whose gradient is r.

    g <- g - (g . r / r . r) r    if g . r < 0

    """

    terms = ("current", "replay")
    learns_mixtures = True
    takes_positions = True

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """The loss of the minibatch, and that of a draw beside it."""
        losses = self.losses_alone(x, y)
        if self.buffer.stored:
            drawn = self.draw(y)
            view, targets = self.show([drawn.x], [drawn.y])
            losses.terms["replay"] = self.criterion(self.forward(view), targets)
        return losses

    def backward(self, losses: Losses) -> list[Tensor]:
        """The gradient of the minibatch, projected where it points against that of the draw."""
        if "replay" not in losses.terms:
            return super().backward(losses)
        reference = [gradient.clone() for gradient in self.gradients(losses.replay, every=True)]
        gradients = self.gradients(losses.total, every=True)
        _project(gradients, reference)
        return gradients


@torch.no_grad()
def _project(gradients: list[Tensor], reference: list[Tensor]) -> None:
    """Take from the gradients, in place, their part against `reference`; a tensor decides, not a branch."""
    against = _dot(gradients, reference).clamp(max=0)
    scale = against / _dot(reference, reference).clamp(min=torch.finfo(torch.float32).tiny)
    for gradient, other in zip(gradients, reference, strict=True):
        gradient.sub_(scale.to(gradient.dtype) * other)


def _dot(one: list[Tensor], other: list[Tensor]) -> Tensor:
    return torch.stack([(widen(a) * widen(b)).sum() for a, b in zip(one, other, strict=True)]).sum()
