"""Replay as a scikit-learn regressor, for targets of any size."""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.estimators.base import Array, ReplayEstimator, tensor_of
from holdfast.regularizers import REGULARIZERS, compares, kind_of, name_of

__all__ = ["ReplayRegressor"]


class ReplayRegressor(RegressorMixin, ReplayEstimator):
    """A regression network that learns from a stream and keeps what it learned, with the interface of scikit-learn.

    The loss is the mean squared error, and targets may have any size: the network learns them in units of their
    standard deviation so far, and predictions are scaled back. The settings are those of `ReplayClassifier` without
    `head` and `class_weight`. A `model` is called with the shape of one sample and the number of targets.

    Attributes after fitting: `n_features_in_`, `learner_` (the Holdfast learner), `module_` (its network, which gives
    the targets in their own units).
    """

    _output = "target"
    _loss = staticmethod(nn.functional.mse_loss)

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Start anew and learn from X (n, features) and targets y (n,) or (n, targets) for `epochs` passes."""
        return self._continue(X, y, sample_weight, first=True, epochs=self._positive("epochs"))

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Continue to learn from X (n, features) and targets y, shaped as in the first call, in one pass."""
        return self._continue(X, y, sample_weight, first=not hasattr(self, "learner_"), epochs=1)

    def predict(self, X: ArrayLike) -> Array:
        """The targets, shaped as they were in training: (n,) or (n, targets)."""
        answers: Array = self._answers(X).numpy()
        return answers[:, 0] if self._flat else answers

    def _continue(self, X: ArrayLike, y: ArrayLike, given: ArrayLike | None, *, first: bool, epochs: int) -> Self:
        if not first:
            self._adopt_settings()
        x, targets = self._samples(X, y, first=first)
        weight = self._weights(x, given, first=first)
        if first:
            self._begin(x, targets.shape[1], weighted=weight is not None)
        counted = targets if weight is None else targets[weight > 0]
        if len(counted):  # newer scikit-learns refuse weights that are all 0
            self.module_.update(counted)
        self._learn(x, targets, weight, epochs)
        return self

    def _network(self) -> nn.Module:
        return _ScaledBack(super()._network(), self._outputs)

    def _given_network(self) -> nn.Module:
        network: nn.Module = self.module_.network  # without the arithmetic around it, which broadcasts
        return network

    def _scaled(self, function: Any, network: Any) -> Any:
        function = REGULARIZERS[function] if isinstance(function, str) else function

        @compares(kind_of(function))
        def scaled(one: Tensor, other: Tensor, **options: Any) -> Any:
            return function(network.scale(one), network.scale(other), **options)

        scaled.__name__ = name_of(function)  # for sentences about it
        return scaled

    def _samples(self, X: ArrayLike, y: ArrayLike, *, first: bool) -> tuple[Tensor, Tensor]:
        """The samples and their targets (n, targets) as tensors, checked as scikit-learn does."""
        x, targets = validate_data(
            self, X, y, dtype=np.float32, reset=first, allow_nd=True, multi_output=True, y_numeric=True
        )
        rows = tensor_of(np.asarray(targets, dtype=np.float32).reshape(len(targets), -1))
        if first:
            self._flat = targets.ndim == 1
        elif rows.shape[1] != self._outputs:
            raise UsageError(f"y has {rows.shape[1]} targets per sample, but the network learned {self._outputs}.")
        return tensor_of(x), rows

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output, tags.target_tags.multi_output = True, True
        return tags


class _ScaledBack(nn.Module):
    """A network whose outputs are multiples of the targets' standard deviation around their mean, scaled back here.

    Stored outputs are in units of the targets, so that they stay valid when mean and standard deviation move.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, network: nn.Module, outputs: int) -> None:
        super().__init__()
        self.network = network
        for name, size in (("count", ()), ("mean", (outputs,)), ("variance", (outputs,))):
            self.register_buffer(name, torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.network(x)
        return outputs * self._deviation() + self.mean

    def scale(self, targets: Tensor) -> Tensor:
        """Targets, or outputs of this network, as the network inside should compute them."""
        return (targets - self.mean) / self._deviation()

    def update(self, targets: Tensor) -> None:
        """Make mean and variance those of all targets so far and of these (n, outputs)."""
        targets = targets.double().to(self.mean.device)
        old, new = self.count.double(), len(targets)
        share, apart = new / (old + new), targets.mean(dim=0) - self.mean
        within = (1 - share) * self.variance + share * targets.var(dim=0, correction=0)
        self.mean += share * apart
        self.variance.copy_(within + share * (1 - share) * apart**2)
        self.count += new

    def _deviation(self) -> Tensor:
        # Below this share of the mean, a float cannot tell the targets apart: they are constant.
        return torch.where(self.variance > (1e-6 * self.mean) ** 2, self.variance, 1.0).sqrt()
