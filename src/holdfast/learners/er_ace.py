"""ER-ACE: a minibatch does not push down the classes that are absent from it.

Caccia et al., "New Insights on Reducing Abrupt Representation Change in Online Continual Learning", ICLR 2022. As in
the authors' code, classes that have never been seen take part in both terms; as in the paper, no boundaries are needed.
"""

from typing import Unpack

import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.learners.losses import NEVER, Losses
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions
from holdfast.learners.replay import ReplayLearner
from holdfast.methods import LEARNERS
from holdfast.models import count_outputs
from holdfast.nested import Nested

__all__ = ["AsymmetricReplay"]


@LEARNERS.register("er-ace", "ER-ACE: replay, and a minibatch that leaves absent classes alone")
class AsymmetricReplay(ReplayLearner):
    """Asymmetric cross-entropy: the minibatch chooses among fewer classes than the draw does.

    loss = CE(minibatch; all classes but those seen before that are absent from it) + CE(draw; all classes)

    """

    passes = ((1, 1), (2, 2))
    terms = ("current", "replay")
    grows = False
    own_state = ("seen",)

    def __init__(self, model: nn.Module, optimizer: Optimizer, **shared: Unpack[ReplayOptions]) -> None:
        super().__init__(model, optimizer, **shared)
        if self.loss is not None:
            raise UsageError("ER-ACE leaves classes out of cross-entropy: leave out loss=.")
        self.seen = torch.zeros(count_outputs(self.model), dtype=torch.bool, device=self.device)

    def plan(self, x: Nested, y: Nested) -> None:
        """None: the classes of all samples are remembered, also of those that will not be stored."""

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """Cross-entropy of the minibatch over its classes and new ones, and of a draw over all."""
        if not self.buffer.stored:
            return self.losses_alone(x, y)
        x, y, (drawn,) = self.align(x, y, self.draw(y))
        outputs, replayed = self.forward_groups(x, drawn.x)
        self.check_labels(y, outputs)
        absent = self.seen.index_fill(0, y, False)
        current = self.criterion(outputs.masked_fill(absent, NEVER), y)
        replay = self.criterion(replayed, drawn.y)
        return Losses(current + replay, current=current, replay=replay, offer=self.offer(x, y, outputs))

    def commit(self, losses: Losses) -> None:
        """Offer the minibatch to the buffer, and remember its classes."""
        super().commit(losses)
        if losses.offer is not None:
            self.seen.index_fill_(0, losses.offer.y, True)
