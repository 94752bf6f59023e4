"""DER: the outputs on stored samples stay where they were; stored labels are not used.

Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple Baseline", NeurIPS 2020. DER++ of the
same paper adds the labels: it is consistency replay with the regularizer mse, which runs know as mse or derpp.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn
from torch.nn import functional as F

from holdfast.config import RunConfig
from holdfast.learners.base import ReplayLearner
from holdfast.learners.consistency import check_width
from holdfast.learners.losses import Losses, Offer
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions, check_sizes, check_weights
from holdfast.methods import LEARNERS
from holdfast.nested import Nested, rows

__all__ = ["DarkReplay"]


@LEARNERS.register("der", "DER: replay of stored logits, without labels")
class DarkReplay(ReplayLearner):
    """Replay with one draw a step, of which it uses the stored outputs only.

    loss = CE(current) + beta * MSE(outputs now, outputs then; draw)

    Options of this learner:

    beta: weight of the second term; the paper calls it alpha. Default: 0.5.
    replay_size: samples drawn per step. Default: as many as observed.
    """

    terms = ("current", "consistency")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        beta: float = 0.5,
        replay_size: int | None = None,
        **shared: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(beta=beta)
        check_sizes(replay_size=replay_size)
        self.beta, self.replay_size = beta, replay_size

    @classmethod
    def arguments(cls, config: RunConfig) -> dict[str, Any]:
        """The draw has the size of a run's replay batch."""
        return {"beta": config.beta, "replay_size": config.replay_size}

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """The loss of the minibatch, and the distance of the draw's outputs from the stored ones."""
        if not self.buffer.stored:
            outputs = self.forward(self.view(x))
            self.check_labels(y, outputs)
            loss = self.criterion(outputs, y)
            return Losses(loss, current=loss, offer=Offer(x, y, outputs.detach()))
        drawn = self.buffer.sample(self.replay_size or rows(y))
        outputs, now = self.forward_groups(x, drawn.x)
        self.check_labels(y, outputs)
        current = self.criterion(outputs, y)
        consistency = F.mse_loss(now, check_width(self, now, drawn.logits))
        total = current + self.beta * consistency
        return Losses(total, current=current, consistency=consistency, offer=Offer(x, y, outputs.detach()))
