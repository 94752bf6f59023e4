"""Cross-entropy of many positions and the logits of stored classes: one pass over the outputs, and one gradient.

Outputs for a vocabulary are by far the largest tensors of a step. Each operation on them reads or writes all of them,
so what a step needs of them is computed together.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from holdfast.errors import UsageError
from holdfast.learners.positions import IGNORED, Positions

__all__ = ["LIMIT", "Past", "Reading", "largest", "normalizer", "other_width"]

LIMIT = torch.finfo(torch.float16).max
"""The largest number in half precision."""

LEAST = 1e-30
"""A smaller probability of the rest counts as this one: divided by it, a gradient stays finite."""


class Past(NamedTuple):
    """What was looked up of a draw's stored logits before the model computes new ones. A row is a position."""

    classes: list[int]
    """How many classes each sample was stored with."""
    places: Tensor
    """Classes whose logits are stored, (rows, k) int64."""
    counted: Tensor
    """Which rows count, int64."""
    logits: Tensor
    """The stored logits of the rows that count, (counted, k); with the rest as a last column if `with_rest`."""
    with_rest: bool


class Reading:
    """What a step needs of outputs with positions, from one pass over them: of a minibatch, and of a draw behind it.

    `sums` (2,) are minus the log-probabilities of the labels, summed over the minibatch and over the draw. For each row
    of the draw, `chosen` (rows, k) are the logits of its places, and `rest` (rows,) is the logarithm of the sum of
    exp(logit) over all other classes. `logs` (B, ..., C) are the log-probabilities of the minibatch, without gradient.
    """

    def __init__(
        self,
        positions: Positions,
        outputs: Tensor,
        labels: Tensor,
        observed: int,
        weights: Tensor | None = None,
        past: Past | None = None,
    ) -> None:
        """`observed` samples come first. `weights` are those of classes; without `past`, no places are asked for."""
        last, self.labels = positions.last(outputs), labels.flatten()
        self.positions, self.first = positions, observed * (labels.numel() // len(labels))
        self.weights = None if weights is None else weights.to(outputs.dtype)
        if past is not None and any(each != last.shape[-1] for each in past.classes):
            raise other_width(str(last.shape[-1]), str(max(past.classes)))
        places, with_rest = (labels.new_empty((0, 1)), False) if past is None else (past.places, past.with_rest)
        asked = (self.labels, self.first, self.weights, places, with_rest)
        self.sums, self.chosen, self.rest, logs = _Score.apply(last.flatten(0, -2), *asked)  # type: ignore[no-untyped-call]
        self.logs = logs[: self.first].view(last[:observed].shape)

    def losses(self) -> list[Tensor]:
        """The mean loss of the minibatch, and that of the draw."""
        parts = self.labels[: self.first], self.labels[self.first :]
        return [self.positions.mean_of(*each, self.weights) for each in zip(self.sums.unbind(), parts, strict=True)]

    def pair(self, past: Past) -> tuple[Tensor, Tensor]:
        """The logits of the draw's rows that count, as they are now and as they were stored."""
        now = torch.cat([self.chosen, self.rest[:, None]], 1) if past.with_rest else self.chosen
        return now.index_select(0, past.counted), past.logits.to(now.dtype)


def other_width(now: str, then: str) -> UsageError:
    """What is wrong with a model that has other outputs than it had."""
    return UsageError(
        f"the model now has {now} outputs, but the buffer holds logits of {then}; start a new learner after changing "
        'the head, or let the learner change it, with head="classifier" or what its name is.'
    )


class _Score(torch.autograd.Function):
    """A reading with its gradient: softmax times one number for each row, and other values at labels and places.

    The gradients of log_softmax, gather and logsumexp, one by one, would each fill a tensor as large as the outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, labels: Tensor, observed: int, weights: Tensor | None, places: Tensor, rest: bool
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        logs = outputs.log_softmax(1, dtype=torch.promote_types(outputs.dtype, torch.float32))
        sums = [
            F.nll_loss(logs[part], labels[part], weights, ignore_index=IGNORED, reduction="sum")
            for part in (slice(observed), slice(observed, None))
        ]
        first, classes = len(outputs) - len(places), outputs.shape[1]
        chosen = outputs[first:].gather(1, places).to(logs.dtype)
        chosen_logs = logs[first:].gather(1, places)
        left = logs.new_zeros(len(places))
        others = logs.new_full((len(places),), -LIMIT)  # the logarithm of 0, where the places are all classes
        rest = rest and places.shape[1] < classes and len(places) > 0
        if rest:
            left = logs[first:].exp().scatter_(1, places, 0).sum(1).clamp(min=LEAST)
            others = left.log() + normalizer(chosen, chosen_logs)
        ctx.save_for_backward(logs, labels, weights, places, chosen_logs, left)
        ctx.observed, ctx.rest, ctx.dtype = observed, rest, outputs.dtype
        ctx.mark_non_differentiable(logs)
        return torch.stack(sums), chosen, others, logs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_sums: Tensor | None, of_chosen: Tensor | None, of_others: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logs, labels, weights, places, chosen_logs, left = ctx.saved_tensors
        first, known = len(logs) - len(places), labels.clamp(min=0)
        counts = (labels != IGNORED).to(logs.dtype)
        if weights is not None:
            counts = counts * weights[known]
        sums = logs.new_zeros(2) if of_sums is None else of_sums
        by_row = torch.cat([sums[:1].expand(ctx.observed), sums[1:].expand(len(logs) - ctx.observed)]) * counts
        scale = by_row.clone()
        if ctx.rest and of_others is not None:
            scale[first:] += of_others / left
        gradient = logs.exp().mul_(scale[:, None])
        # The rest has no part in the places: their own values take the place of what was computed.
        last = gradient[first:].scatter_(1, places, chosen_logs.exp() * by_row[first:, None])
        if of_chosen is not None:
            last.scatter_add_(1, places, of_chosen)
        gradient.scatter_add_(1, known[:, None], -by_row[:, None])
        return gradient.to(ctx.dtype), None, None, None, None, None


def normalizer(logits: Tensor, logs: Tensor) -> Tensor:
    """The logarithm of the sum of exp over all classes, (...,), from logits and log-probabilities of some, (..., k).

    The most probable of them has the smallest rounding error.
    """
    best = logs.argmax(-1, keepdim=True)
    return (logits.gather(-1, best) - logs.gather(-1, best)).squeeze(-1)


def largest(outputs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of each row (..., C) and their columns, as `torch.topk`; of equal ones any may be chosen.

    The largest ones are in those k groups of columns that have the largest maxima. A maximum takes one reading of
    the outputs. A GPU's top-k reads them many times, but here it sees few columns.
    """
    columns = outputs.shape[-1]
    size = 1 << (max(1, columns // k).bit_length() // 2)  # about √(columns / k): as many groups as columns in them
    groups = columns // size
    if groups < 2 * k:
        return outputs.topk(k)
    # Column c is in group c % groups, so that neighbours in memory are in different groups: their maxima are found
    # side by side. The columns after the last whole group are looked at in any case.
    maxima = outputs[..., : size * groups].reshape(*outputs.shape[:-1], size, groups).amax(-2)
    inside = torch.arange(0, size * groups, groups, device=outputs.device)
    candidates = (maxima.topk(k).indices[..., None] + inside).flatten(-2)
    after = torch.arange(size * groups, columns, device=outputs.device).expand(*outputs.shape[:-1], -1)
    candidates = torch.cat([candidates, after], -1)
    values, found = outputs.gather(-1, candidates).topk(k)
    return values, candidates.gather(-1, found)
