"""Pure functions of the accuracy matrix.

R (T, T) float64 holds in R[i, j] the accuracy in percent on task j after training on task i; NaN where it was not
measured. b (T,) is the accuracy of the untrained network. A metric that is not defined, such as forgetting with one
task, is NaN.
"""

from collections.abc import Sequence
from math import nan
from statistics import fmean, stdev

from torch import Tensor

__all__ = ["accuracy", "backward_transfer", "forgetting", "forward_transfer", "mean_std"]


def accuracy(matrix: Tensor) -> float:
    """Mean over tasks after the last one, in percent."""
    return float(matrix[-1].mean())


def forward_transfer(matrix: Tensor, untrained: Tensor) -> float:
    """How much better than untrained the network is on each next task before it trains on it, in points."""
    return float((matrix.diagonal(1) - untrained[1:]).mean()) if _is_square(matrix) else nan


def backward_transfer(matrix: Tensor) -> float:
    """Change on each earlier task between learning it and the end, in points; negative is forgetting."""
    return float((matrix[-1] - matrix.diagonal())[:-1].mean()) if _is_square(matrix) else nan


def forgetting(matrix: Tensor) -> float:
    """How far each earlier task fell from its best to the end, in points."""
    best = matrix.nan_to_num(nan=-1.0).amax(dim=0)
    return float((best - matrix[-1])[:-1].mean()) if _is_square(matrix) else nan


def _is_square(matrix: Tensor) -> bool:
    """False for a method that learns all tasks at once: its matrix has one row."""
    return len(matrix) == matrix.shape[1]


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1) of a number over seeds; NaN where there are too few values.

    >>> mean_std([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    return (fmean(values) if values else nan), (stdev(values) if len(values) > 1 else nan)
