"""Classes at many positions of a sample, such as tokens or pixels: where they are, and which positions count."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.errors import UsageError
from holdfast.learners.losses import Loss

__all__ = ["IGNORED", "Mask", "Positions", "next_tokens"]

IGNORED = -100
"""The label of a position that is not supervised, as in PyTorch's cross-entropy."""

Mask = Callable[[Any, Any], Tensor]
"""A function (x, y) -> which positions count, of the shape of y, bool."""


class Positions:
    """Where outputs have their classes, and which of their positions count.

    `class_dim` is -1 for outputs (B, T, C), 1 for (B, C, H, W). Labels are (B, T) or (B, H, W), `IGNORED` where nothing
    is supervised. A `mask` says which positions count. Without one, the supervised positions do.
    """

    def __init__(self, class_dim: int, mask: Mask | None = None) -> None:
        if not isinstance(class_dim, int) or class_dim == 0:
            raise UsageError(
                f"class_dim is the dimension of the outputs that has the classes, not {class_dim!r}: give -1 for "
                "outputs (samples, positions, classes), or 1 for (samples, classes, height, width)."
            )
        self.class_dim, self.mask = class_dim, mask

    def counted(self, x: Any, y: Tensor) -> Tensor:
        """Which positions count, of the shape of `y`, bool."""
        if self.mask is None:
            return y != IGNORED
        found = self.mask(x, y)
        if not isinstance(found, Tensor) or (found.dtype, found.shape) != (torch.bool, y.shape):
            form = f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(f"mask must give a bool for each of the labels {tuple(y.shape)}, not {form}.")
        return found

    def labels(self, x: Any, y: Tensor) -> Tensor:
        """The labels, `IGNORED` where a position does not count."""
        return y if self.mask is None else y.masked_fill(~self.counted(x, y), IGNORED)

    def last(self, outputs: Tensor) -> Tensor:
        """The outputs with their classes in the last dimension."""
        return outputs.movedim(self.class_dim, -1)

    def check(self, outputs: Tensor, y: Tensor) -> None:
        """Raise unless outputs have classes at every position that has a label; there may be more samples than `y`."""
        wide = -outputs.dim() <= self.class_dim < outputs.dim()
        if not wide or self.last(outputs).shape[1:-1] != y.shape[1:] or len(outputs) < len(y):
            raise UsageError(
                f"outputs of shape {tuple(outputs.shape)} with class_dim={self.class_dim} do not fit labels of shape "
                f"{tuple(y.shape)}: every position needs one label."
            )

    def check_changed(self, labels: Any, shape: tuple[int, ...]) -> None:
        """Raise unless what a view made of labels (B, ...) of this shape still is one label for each position."""
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != shape:
            form = f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels)
            raise UsageError(
                f"with class_dim, augment must return labels of shape {shape}, as it got them, not {form}: it may move "
                "labels, but not mix them."
            )

    def mean(self, outputs: Tensor, labels: Tensor, loss: Loss | None, weights: Tensor | None) -> Tensor:
        """The mean loss over supervised positions, cross-entropy if no other is given; 0 if there are none."""
        flat, wanted = self.last(outputs).flatten(0, -2), labels.flatten()
        if loss is not None:
            supervised = wanted != IGNORED
            return loss(flat[supervised], wanted[supervised]) if bool(supervised.any()) else 0 * flat.sum()
        total = F.cross_entropy(flat, wanted, weights, ignore_index=IGNORED, reduction="sum")
        return self.mean_of(total, labels, weights)

    def mean_of(self, total: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """A sum over the supervised positions, divided by their weight; 0 if there are none."""
        return total / self.weight(labels, weights).to(total.dtype).clamp(min=torch.finfo(total.dtype).tiny)

    def weight(self, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """How much the supervised positions weigh together: their number, if there are no weights of classes."""
        supervised = labels != IGNORED
        if weights is None:
            return supervised.sum()
        return (weights[labels.clamp(min=0)] * supervised).sum()


def next_tokens(labels: Tensor) -> Tensor:
    """For each position the label of the next one, (B, T); the last position has none.

    Outputs of causal language models are for the next token: those at position t are to be compared with label t + 1.

    >>> next_tokens(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
