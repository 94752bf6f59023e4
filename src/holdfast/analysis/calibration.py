"""Whether a model's confidence can be believed: calibration errors and the data of a reliability diagram."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.errors import UsageError
from holdfast.schema import Count, Percent, Share

__all__ = ["Calibration", "calibration", "check_labels", "check_logits", "pool_calibrations"]


@dataclass(frozen=True)
class Calibration:
    """How confidence and accuracy agree, overall and per bin of confidence.

    `ece` and `mce` are in percent; `confidence` and `accuracy` are the means of a bin as shares in [0, 1], 0 for a bin
    without samples. Bin b of `bins` holds confidences in [b / bins, (b + 1) / bins); the last one includes 1.
    """

    ece: Percent
    mce: Percent
    confidence: list[Share]
    accuracy: list[Share]
    count: list[Count]
    bins: int


def calibration(logits: Tensor, labels: Tensor, bins: int = 15) -> Calibration:
    """The calibration of logits (N, classes) against integer labels (N,), over equal-width bins of confidence.

    Confidence is the largest softmax probability. The expected error (`ece`) weighs each bin's |accuracy - confidence|
    by the share of samples in it; the maximum error (`mce`) is the largest of them. Everything is float64.

    torchmetrics uses the same bins, except that it gives confidences of exactly 1 a bin of their own.

    >>> sure_and_right = calibration(torch.tensor([[9.0, -9.0], [-9.0, 9.0]]), torch.tensor([0, 1]))
    >>> round(sure_and_right.ece, 3), sure_and_right.count[-1]
    (0.0, 2)
    """
    if bins < 1:
        raise UsageError(f"calibration needs at least one bin, got bins={bins}.")
    check_logits(logits)
    if logits.shape[1] < 2:
        raise UsageError(f"calibration needs two classes or more, got logits of shape {tuple(logits.shape)}.")
    check_labels(labels, logits)
    confidences, predictions = torch.softmax(logits.double(), dim=1).max(dim=1)
    correct = (predictions == labels).double()

    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=logits.device)
    bin_of = (torch.bucketize(confidences, edges, right=True) - 1).clamp(max=bins - 1)
    count = torch.bincount(bin_of, minlength=bins)
    confidence = torch.bincount(bin_of, weights=confidences, minlength=bins) / count.clamp(min=1)
    accuracy = torch.bincount(bin_of, weights=correct, minlength=bins) / count.clamp(min=1)
    return _from_bins(confidence, accuracy, count)


def pool_calibrations(parts: Sequence[Calibration]) -> Calibration:
    """The calibration of all predictions together, from that of several seeds with the same bins."""
    count = torch.tensor([part.count for part in parts], dtype=torch.float64)
    total = count.sum(0)
    confidence, accuracy = (
        (count * torch.tensor([getattr(part, name) for part in parts], dtype=torch.float64)).sum(0) / total.clamp(min=1)
        for name in ("confidence", "accuracy")
    )
    return _from_bins(confidence, accuracy, total.long())


def _from_bins(confidence: Tensor, accuracy: Tensor, count: Tensor) -> Calibration:
    """The errors of bins (bins,) with their mean confidence, accuracy and number of samples."""
    gaps = (accuracy - confidence).abs()
    return Calibration(
        ece=100 * float((gaps * count).sum() / count.sum()),
        mce=100 * float(gaps.max()),
        confidence=confidence.tolist(),
        accuracy=accuracy.tolist(),
        count=count.tolist(),
        bins=len(count),
    )


def check_logits(logits: Tensor) -> None:
    """Raise a UsageError unless the logits are finite (samples, classes) with one sample or more."""
    if logits.ndim != 2 or logits.shape[0] == 0:
        raise UsageError(f"logits must be (samples, classes) with one sample or more, got {tuple(logits.shape)}.")
    if not bool(torch.isfinite(logits).all()):
        raise UsageError("logits contain NaN or infinity; check that the model's training did not diverge.")


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Raise a UsageError unless the labels are a column of the logits for each sample."""
    if labels.shape != logits.shape[:1]:
        raise UsageError(f"labels must have the shape ({len(logits)},), one per row, got {tuple(labels.shape)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UsageError(f"labels must be class indices (integers), got {labels.dtype}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        raise UsageError(f"labels must lie in 0..{logits.shape[1] - 1} (columns of the logits), got {low}..{high}.")
