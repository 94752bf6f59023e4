"""Task recency bias: how much of a model's belief goes to the classes it saw last."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

import torch
from torch import Tensor

from holdfast.analysis.calibration import check_logits
from holdfast.errors import UsageError
from holdfast.schema import Share

__all__ = ["Recency", "mean_recency", "recency"]


@dataclass(frozen=True)
class Recency:
    """What each task is given, in training order; all numbers are shares in [0, 1].

    - `task_probabilities`: average softmax probability of the task's classes, summed over the classes.
    - `gap`: that of the last task minus that of the first, in [-1, 1]; 0 is unbiased when the test set is balanced.
    - `prediction_shares`: share of the samples whose predicted class belongs to the task.
    """

    task_probabilities: list[Share]
    gap: Annotated[float, lambda value: -1 <= value <= 1]
    prediction_shares: list[Share]


def recency(logits: Tensor, task_classes: Sequence[Sequence[int]]) -> Recency:
    """The recency bias in logits (N, classes) over the whole test set; `task_classes[t]` are the classes of task t.

    The softmax and the argmax run over all columns of the logits (the Class-IL setting). If some columns belong to no
    task, the task probabilities sum to less than 1.

    >>> recency(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), [[0, 1], [2, 3]]).task_probabilities
    [0.5, 0.5]
    """
    check_logits(logits)
    if len(task_classes) == 0 or any(len(classes) == 0 for classes in task_classes):
        raise UsageError("task_classes must name at least one task, and at least one class for every task.")
    classes, last = [label for task in task_classes for label in task], logits.shape[1] - 1
    if min(classes) < 0 or max(classes) > last:
        found = f"{min(classes)}..{max(classes)}"
        raise UsageError(f"task_classes must lie in 0..{last} (columns of the logits), got {found}.")
    if len(set(classes)) != len(classes):
        raise UsageError("a class appears twice in task_classes: every task needs classes of its own (Class-IL).")
    per_class = torch.softmax(logits.double(), dim=1).mean(dim=0)
    predicted = torch.bincount(logits.argmax(dim=1), minlength=logits.shape[1]).double() / logits.shape[0]
    probabilities = [float(per_class[list(task)].sum()) for task in task_classes]
    shares = [float(predicted[list(task)].sum()) for task in task_classes]
    return Recency(probabilities, probabilities[-1] - probabilities[0], shares)


def mean_recency(parts: Sequence[Recency]) -> Recency:
    """The mean over seeds."""
    return Recency(
        [fmean(column) for column in zip(*(part.task_probabilities for part in parts), strict=True)],
        fmean(part.gap for part in parts),
        [fmean(column) for column in zip(*(part.prediction_shares for part in parts), strict=True)],
    )
