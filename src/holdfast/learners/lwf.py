"""LwF: the network of the last task is the teacher of the next, on the samples of the next.

Li, Hoiem, "Learning without Forgetting", ECCV 2016. Two things differ here. The teacher answers each minibatch as it
comes, with the same view as the network, instead of once per sample before the task; so no sample is stored. And new
outputs are not warmed up alone before a task. docs/concepts/how-sure.md has what the two change.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.learners.base import Learner
from holdfast.learners.checks import check_begun, named_classes
from holdfast.learners.losses import NEVER, Losses
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import Options, check_weights
from holdfast.methods import LEARNERS
from holdfast.models import copied, count_outputs
from holdfast.nested import Nested, transform

__all__ = ["WithoutForgetting"]


@LEARNERS.register("lwf", "learning without forgetting: the last task's network as teacher, nothing stored")
class WithoutForgetting(Learner):
    """Cross-entropy on the new task, and distillation of the old classes' probabilities from a teacher.

    loss = CE(outputs seen so far) + distillation * H(softmax(teacher / T), softmax(outputs / T); classes of old tasks)

    It needs to be told where tasks begin and end: `begin_task(classes)`, `end_task(x, y)`. During the first task the
    second term is 0.

    Options of this learner:

    - distillation: weight of the second term. Default: 1.
    - temperature: T, above 0. Default: 2.
    """

    needs_boundaries = True
    grows = False
    terms = ("current", "distillation")
    own_state = ("teacher", "seen", "old")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        distillation: float = 1.0,
        temperature: float = 2.0,
        **shared: Unpack[Options],
    ) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(distillation=distillation)
        if self.loss is not None:
            raise UsageError("LwF leaves classes out of cross-entropy: leave out loss=.")
        if not temperature > 0:
            raise UsageError(f"temperature must be above 0, not {temperature}.")
        self.distillation, self.temperature = distillation, temperature
        self.teacher = copied(self.model).eval()
        outputs = count_outputs(self.model)
        # Which outputs belong to classes of this task or an earlier one, and which to those of earlier tasks only.
        self.seen, self.old = (torch.zeros(outputs, dtype=torch.bool, device=self.device) for _ in range(2))

    def begin_task(self, classes: tuple[int, ...]) -> None:
        """Let the outputs of these classes take part from now on."""
        self.seen[named_classes(classes, len(self.seen))] = True

    def end_task(self, x: Tensor, y: Tensor) -> None:
        """Make the network as it is now the teacher of the next task."""
        self.old.copy_(self.seen)
        self.teacher.load_state_dict(self.model.state_dict())

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """Cross-entropy over the classes seen so far, and distillation over those of earlier tasks."""
        view = self.view(x)
        taught = transform(torch.clone, view)  # each network has its own: it may work in place
        outputs = self.forward(view)
        self.check_labels(y, outputs)
        check_begun(self, self.seen, y)
        current = self.criterion(outputs.masked_fill(~self.seen, NEVER), y)
        with torch.no_grad():
            target = (self.forward(taught, self.teacher) / self.temperature).masked_fill(~self.old, NEVER).softmax(1)
        answers = (outputs / self.temperature).masked_fill(~self.old, NEVER).log_softmax(1)
        # Without an old class, all outputs are masked alike and the term would be a constant: count it as 0.
        distillation = -(target * answers).sum(1).mean() * self.old.any()
        return Losses(current + self.distillation * distillation, current=current, distillation=distillation)
