"""GEM: a step must not raise the loss on the stored samples of any earlier task.

Lopez-Paz, Ranzato, "Gradient Episodic Memory for Continual Learning", NeurIPS 2017. The buffer is divided evenly among
the tasks that have ended, so that their number need not be known in advance; samples are chosen at random.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Self, Unpack

import torch
from torch import Tensor, nn

from holdfast.buffer import Draw
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners.losses import Losses, widen
from holdfast.learners.making import Parts
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions, check_weights
from holdfast.learners.replay import ReplayLearner
from holdfast.methods import LEARNERS
from holdfast.nested import Nested, chosen_rows, concat, rows, transform
from holdfast.rng import generator

__all__ = ["EpisodicGem"]

RIDGE = 1e-3
"""Added to the diagonal of the quadratic program, as in the authors' code, so that it always has one solution."""


@LEARNERS.register("gem", "GEM: gradients that do not raise the loss on any earlier task")
class EpisodicGem(ReplayLearner):
    """The gradient g of the minibatch is projected where it would raise the loss on an earlier task.

    g <- g + R^T v;  the rows of R are the gradients r_k on the stored samples of each earlier task, and v minimises
    v^T (R R^T + 0.001) v / 2 + v^T R g with all v_k >= margin. Nothing is changed if no product r_k . g is negative.

    It needs to be told when a task ends: `end_task(x, y)`. A step passes all stored samples through the network, and
    the quadratic program is solved on the host (scipy.optimize.nnls, exact), so steps are not captured in CUDA graphs.

    Options of this learner:

    - margin: the least v_k; more than 0 favours earlier tasks. Default: 0.5.
    """

    needs_boundaries = True
    capturable = False
    draws = False
    chooses = True
    terms = ("current",)
    own_state = ("tasks",)

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, margin: float = 0.5, **shared: Unpack[ReplayOptions]
    ) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(margin=margin)
        if find_spec("scipy") is None:
            raise UsageError("GEM needs scipy: install the extra 'gem' (pip install 'holdfast[gem]').")
        self.margin = margin
        self.tasks = torch.full((self.buffer.capacity,), -1)
        """For each slot of the buffer, the number of the task that its sample is from, or -1; on the host."""

    @classmethod
    def from_config(cls, config: RunConfig, parts: Parts) -> Self:
        """The learner of a run, whose tasks are counted: a buffer that is too small is refused before it begins."""
        learner = super().from_config(config, parts)
        learner._share(config.tasks or 1)
        return learner

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """The loss of the minibatch."""
        _, loss = self.learn_alone(x, y)
        return Losses(loss, current=loss)

    def backward(self, losses: Losses) -> list[Tensor]:
        """The gradient of the minibatch, projected where it points against that of an earlier task."""
        if not self.buffer.stored:
            return super().backward(losses)
        stored = self.buffer.contents()
        references = torch.stack([_flat(self._gradients(stored, task)) for task in range(int(self.tasks.max()) + 1)])
        gradients = self.gradients(losses.total, every=True)
        direction = _flat(gradients)
        products = references @ direction
        if bool((products < 0).any()):
            weights = _weights((references @ references.T).cpu(), products.cpu(), self.margin)
            _assign(gradients, direction + weights.to(direction) @ references)
        return gradients

    def _gradients(self, stored: Draw, task: int) -> list[Tensor]:
        """The gradients on those of the stored samples that are from an earlier task."""
        slots = (self.tasks[: self.buffer.stored] == task).nonzero().squeeze(1).to(stored.y.device)
        x, y = (transform(lambda each: each.to(self.device), chosen_rows(part, slots)) for part in stored[:2])
        return self.gradients(self.criterion(self.forward(self.view(x)), y), every=True)

    def end_task(self, x: Tensor, y: Tensor) -> None:
        """Give the task its share of the buffer; those of earlier tasks become smaller."""
        x, y = self.task_samples(x, y)
        task = int(self.tasks.max()) + 1
        share = self._share(task + 1)
        chosen = torch.randperm(rows(y), generator=generator(self.seed, "memory"))[:share].to(self.device)
        x, y = chosen_rows(x, chosen), chosen_rows(y, chosen)
        tasks = torch.full((len(chosen),), task)
        if self.buffer.stored:
            stored, before = self.buffer.contents(), self.tasks[: self.buffer.stored]
            slots = torch.cat([(before == each).nonzero().squeeze(1)[:share] for each in range(task)])
            xs, ys = (transform(lambda each: each.to(self.device), chosen_rows(part, slots)) for part in stored[:2])
            x, y, (earlier,) = self.align(x, y, Draw(xs, ys, None))
            x, y, tasks = concat([earlier.x, x]), concat([earlier.y, y]), torch.cat([before[slots], tasks])
        self.buffer.replace(x, y)
        self._attribute(tasks)

    def _share(self, tasks: int) -> int:
        """How many samples of each of so many tasks the buffer holds."""
        if self.buffer.capacity < tasks:
            raise UsageError(f"a buffer of {self.buffer.capacity} samples is too small for {tasks} tasks.")
        return self.buffer.capacity // tasks

    def _attribute(self, tasks: Tensor) -> None:
        """The first slots hold samples of these tasks, the others none."""
        self.tasks.fill_(-1)
        self.tasks[: len(tasks)] = tasks

    def forget(self, where: Callable[[Draw], Tensor] | Tensor) -> int:
        """As in every replay method; the others keep their tasks."""
        if not self.buffer.stored:
            return 0
        mask = where(self.buffer.contents()) if callable(where) else where
        tasks, dropped = self.tasks[: self.buffer.stored], super().forget(mask)
        self._attribute(tasks[~mask.cpu()])
        return dropped

    def forget_all(self) -> None:
        """Empty the buffer; the next task is the first again."""
        super().forget_all()
        self.tasks.fill_(-1)


def _weights(gram: Tensor, products: Tensor, margin: float) -> Tensor:
    """The v that minimises v^T (gram + RIDGE) v / 2 + v^T products with all v_k >= margin, (T,) float64.

    With v = margin + u and the Cholesky factor L of the matrix, it is |L^T u + L^-1 (products + matrix margin)|^2 / 2
    with u >= 0: least squares that are not negative, which an active set solves exactly.
    """
    from scipy.optimize import nnls

    matrix = gram.double() + RIDGE * torch.eye(len(gram), dtype=torch.float64)
    factor = _root(matrix)
    linear = products.double() + matrix.sum(1) * margin
    goal = -torch.linalg.solve_triangular(factor, linear[:, None], upper=False)[:, 0]
    return torch.from_numpy(nnls(factor.T.numpy(), goal.numpy())[0]) + margin


def _root(matrix: Tensor) -> Tensor:
    """The lower triangular L with L L^T = matrix.

    Products of large gradients that are nearly the same are rounded so much, in float32, that the matrix may seem to
    have eigenvalues below `RIDGE`, which it cannot have.
    """
    lower: Tensor
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        values, vectors = torch.linalg.eigh(matrix)
        lower = torch.linalg.qr((vectors * values.clamp(min=RIDGE).sqrt()).T).R.T
    return lower


def _flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([widen(gradient).flatten() for gradient in gradients])


@torch.no_grad()
def _assign(gradients: list[Tensor], flat: Tensor) -> None:
    """Write the numbers of `flat` back, in place."""
    for gradient, part in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
