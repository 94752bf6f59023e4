"""Model + test sets -> logits -> one row of the accuracy matrix."""

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from holdfast.augment import View
from holdfast.data import ImageSet
from holdfast.models import evaluating

__all__ = ["Accuracies", "Exam", "evaluate", "grade", "predict"]

BATCH_ELEMENTS, CPU_BATCH_ELEMENTS = 16_000_000, 800_000
"""Input numbers of a batch: enough to fill a GPU; on a CPU as many as its caches hold."""


class Exam(NamedTuple):
    """A task's test images on one device, and the classes Task-IL chooses from: (C,) bool, None for all."""

    images: ImageSet
    mask: Tensor | None

    @classmethod
    def of(cls, images: ImageSet, classes: Sequence[int], outputs: int, device: torch.device) -> Self:
        """A task's test images, brought to the device; `classes` are the task's, of so many outputs."""
        mask = torch.zeros(outputs, dtype=torch.bool)
        mask[list(classes)] = True
        moved = ImageSet(images.images.to(device), images.labels.to(device))
        return cls(moved, None if mask.all() else mask.to(device))


class Accuracies(NamedTuple):
    """Accuracies in percent per test set: over all classes, and over each task's own."""

    class_il: list[float]
    task_il: list[float]


@torch.no_grad()
def predict(model: nn.Module, images: Tensor, view: View, precision: str = "float32") -> Tensor:
    """Logits (N, C) float32 of `model` in evaluation mode, without augmentation; its mode is restored."""
    elements = CPU_BATCH_ELEMENTS if images.device.type == "cpu" else BATCH_ELEMENTS
    size = max(1, elements // max(1, prod(images.shape[1:])))
    reduced = torch.autocast(images.device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()
    with evaluating(model), reduced:
        return torch.cat([model(view(part)).float() for part in torch.split(images, size)])


@torch.no_grad()
def grade(logits: Sequence[Tensor], exams: Sequence[Exam]) -> Accuracies:
    """One row of the accuracy matrix from the logits on each test set; waits for the device once."""
    hits = []
    for answers, ((_, labels), mask) in zip(logits, exams, strict=True):
        overall = within = (answers.argmax(dim=1) == labels).double().mean()
        if mask is not None:
            within = (answers.masked_fill(~mask, -torch.inf).argmax(dim=1) == labels).double().mean()
        hits.append(torch.stack([overall, within]))
    class_il, task_il = (100 * torch.stack(hits)).T.tolist()
    return Accuracies(class_il, task_il)


def evaluate(model: nn.Module, exams: Sequence[Exam], view: View, precision: str = "float32") -> Accuracies:
    """One row of the accuracy matrix."""
    return grade([predict(model, exam.images.images, view, precision) for exam in exams], exams)
