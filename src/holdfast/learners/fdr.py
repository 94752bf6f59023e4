"""FDR: the function that the network was at the end of each task is not to change.

Benjamin, Rolnick, Kording, "Measuring and Regularizing Networks in Function Space", ICLR 2019. The memory is a
reservoir that is offered each task when it has ended, so that all tasks have the same share of it on average. Both
terms are descended in one step.
"""

from itertools import pairwise
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.learners.der import DarkReplay
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions
from holdfast.methods import LEARNERS
from holdfast.nested import Nested, rows, split

__all__ = ["FunctionDistance"]

CHUNK = 128
"""Samples of one pass at the end of a task."""


@LEARNERS.register("fdr", "FDR: the probabilities on samples of ended tasks stay where they were")
class FunctionDistance(DarkReplay):
    """Cross-entropy, and the distance from the probabilities that stored samples had when their task ended.

    loss = CE(minibatch) + beta * mean over a draw of |softmax(outputs now) - softmax(outputs then)|_2

    It needs to be told when a task ends: `end_task(x, y)` passes all samples through the network in training mode and
    offers them to the buffer. During the first task the second term is 0.

    Options of this learner:

    - beta: weight of the second term; elsewhere alpha. Default: 1.
    """

    needs_boundaries = True
    takes_positions = False

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, beta: float = 1.0, **shared: Unpack[ReplayOptions]
    ) -> None:
        super().__init__(model, optimizer, beta=beta, **shared)
        if self.loss is not None:
            raise UsageError("FDR compares probabilities of classes: leave out loss=.")

    def offer(self, x: Nested, y: Nested, outputs: Tensor, *known: Any, **more: Any) -> None:
        """Nothing before the task ends."""

    def distance(self, now: Tensor, then: Tensor) -> Tensor:
        """The mean distance of the probabilities."""
        distances: Tensor = torch.linalg.vector_norm(now.softmax(1) - then.softmax(1), dim=1)
        return distances.mean()

    @torch.no_grad()
    def end_task(self, x: Tensor, y: Tensor) -> None:
        """Offer the task's samples to the buffer, with the outputs of the network as it is now."""
        x, y = self.task_samples(x, y)
        count = rows(y)
        starts = list(range(0, count, CHUNK))
        if len(starts) > 1 and count - starts[-1] == 1:
            starts.pop()  # BatchNorm refuses a single sample
        sizes = [end - start for start, end in pairwise([*starts, count])]
        for inputs, labels in zip(split(x, sizes), split(y, sizes), strict=True):
            self.buffer.add(inputs, labels, self.answers_for(self.forward(self.view(inputs))))
