"""DER: the outputs on stored samples stay where they were; stored labels are not used.

Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple Baseline", NeurIPS 2020. DER++ of the
same paper adds the labels: it is consistency replay with the regularizer mse, which runs know as mse or derpp.
"""

from typing import Any, Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.config import RunConfig
from holdfast.learners.losses import Losses
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions, check_weights
from holdfast.learners.replay import ReplayLearner
from holdfast.methods import LEARNERS
from holdfast.nested import Nested

__all__ = ["DarkReplay"]


@LEARNERS.register("der", "DER: replay of stored logits, without labels")
class DarkReplay(ReplayLearner):
    """Replay with one draw a step, of which it uses the stored outputs only.

    loss = CE(current) + beta * MSE(outputs now, outputs then; draw)

    Options of this learner:

    - beta: weight of the second term; the paper calls it alpha. Default: 0.5.
    """

    passes = ((1, 1), (2, 2))
    terms = ("current", "consistency")
    stores_outputs = True
    takes_positions = True

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, beta: float = 0.5, **shared: Unpack[ReplayOptions]
    ) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(beta=beta)
        self.beta = beta

    @classmethod
    def arguments(cls, config: RunConfig) -> dict[str, Any]:
        """The weight is that of a run's consistency term."""
        return {**super().arguments(config), "beta": config.beta}

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """The loss of the minibatch, and the distance of the draw's outputs from the stored ones."""
        if not self.buffer.stored:
            return self.losses_alone(x, y)
        x, y, (drawn,) = self.align(x, y, self.draw(y))
        plan = self.plan(x, y)
        outputs, now = self.forward_groups(x, drawn.x)
        self.check_labels(y, outputs)
        current = self.criterion(outputs, self.targets(x, y))
        now, then = self.compare(now, drawn)
        consistency = self.distance(now, then) if len(now) else now.sum()
        total = current + self.beta * consistency
        return Losses(total, current=current, consistency=consistency, offer=self.offer(x, y, outputs, plan))

    def distance(self, now: Tensor, then: Tensor) -> Tensor:
        """How far outputs (rows, classes) are from where they were."""
        return F.mse_loss(now, then)
