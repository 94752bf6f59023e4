"""The two baselines without a memory: learning on as if nothing were lost, and learning everything at once."""

from holdfast.learners.base import Learner
from holdfast.learners.losses import Losses
from holdfast.methods import LEARNERS
from holdfast.nested import Nested

__all__ = ["Joint", "Sgd"]


@LEARNERS.register("sgd", "plain training on the stream: the lower bound")
class Sgd(Learner):
    """Cross-entropy, or the loss given instead, on what comes in, nothing else."""

    terms = ("current",)
    learns_mixtures = True
    takes_positions = True

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """The loss of the minibatch alone."""
        _, loss = self.learn_alone(x, y)
        return Losses(loss, current=loss)


@LEARNERS.register("joint", "training on all tasks at once: the upper bound")
class Joint(Sgd):
    """Plain training on the data of all tasks together."""

    all_at_once = True
