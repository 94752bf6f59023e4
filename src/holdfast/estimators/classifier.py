"""Replay as a scikit-learn classifier, whose labels may arrive at any time."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.estimators.base import Array, MakeNetwork, ReplayEstimator, joined_signature, tensor_of

__all__ = ["ReplayClassifier"]


class ReplayClassifier(ClassifierMixin, ReplayEstimator):
    """A network that learns from a stream and keeps what it learned, with the interface of scikit-learn.

    `partial_fit` makes one pass over its samples; call it with every new portion of the stream. To each minibatch it
    adds samples from a buffer, which holds a uniform sample of everything seen. Scale features to about unit variance.

    - `model`: the name of a registered network, or a callable (shape of one sample, number of classes) -> torch module.
      Default: "mlp".
    - `buffer_size`: samples in the buffer; None learns without a buffer, for comparison. Default: 500.
    - `regularizer`: keeps outputs on stored samples where they were: a registered name, a function of two logit
      tensors, or None for plain replay. Default: "mse".
    - `alpha`, `beta`: weights of the replayed samples and of the regularizer. Default: 1 and 0.5.
    - `optimizer`: a callable such as torch.optim.SGD, called with the parameters and `lr` (0.001). Default: Adam.
    - `batch_size`: samples a step. Default: 32. `epochs`: passes that `fit` makes. Default: 30.
    - `head`: the name of the network's last nn.Linear, for instance "classifier". With it, `partial_fit` takes new
      labels at any time and the network grows. Default: none, and the first call fixes `classes`.
    - `class_weight`: weights by label, or "balanced" in `fit`; a label that is not named weighs 1. Default: 1 each.
    - `loss`: a function (outputs, targets) -> mean. A label is the number of its output. Default: cross-entropy.
    - `clip`: upper limit for the norm of the gradient. Default: none. `augment`: the view of samples that the network
      learns from. Default: the samples.
    - `storage`: where the buffer stores samples: "device", "host", or a Path of a folder. Default: "device".
    - `device`: where the network computes. Default: "cpu".
    - `random_state`: decides everything random, dropout included. PyTorch's global generators stay as they are, and
      belong to the whole process: estimators in threads take turns. Fit in parallel processes, joblib's default.

    `lr`, `alpha` and `beta` may change while it learns: `set_params(lr=...)` counts from the next call on.

    Attributes after fitting: `classes_` (sorted), `output_classes_` (the labels in the order of the network's outputs,
    which is that of their arrival), `n_features_in_`, `learner_` (the Holdfast learner), `module_` (its network).
    """

    _output = "class"
    classes_: Array
    output_classes_: Array

    def __init__(
        self,
        model: str | MakeNetwork = "mlp",
        *,
        head: str | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, **shared)
        self.head, self.class_weight = head, class_weight

    # scikit-learn, and help, read the names of settings from here.
    __init__.__signature__ = joined_signature(__init__, ReplayEstimator.__init__)  # type: ignore[attr-defined]

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Start anew and learn from X (n, features) and labels y (n,) for `epochs` passes."""
        return self._continue(X, y, None, sample_weight, first=True, epochs=self._positive("epochs"))

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Continue to learn from X (n, features) and labels y (n,), in one pass.

        `classes` are all labels that will ever come. The first call needs them, unless `fit` was called before or
        `head` is given. `sample_weight` (n,) must be given to the first call if any call has it; it is stored with the
        samples.
        """
        first = not hasattr(self, "learner_")
        if first and classes is None and self.head is None:
            raise UsageError(
                "classes must be given on the first call to partial_fit: all labels that will ever come. "
                'If they are not known, name the last nn.Linear with head=, for instance head="classifier".'
            )
        if self.class_weight == "balanced":
            raise UsageError("class_weight='balanced' needs all samples at once, as in fit. Give a weight by label.")
        return self._continue(X, y, classes, sample_weight, first=first, epochs=1)

    def _continue(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None,
        given: ArrayLike | None,
        *,
        first: bool,
        epochs: int,
    ) -> Self:
        if not first:
            self._adopt_settings()
        samples, labels = validate_data(self, X, y, dtype=np.float32, reset=first, allow_nd=True)
        check_classification_targets(labels)
        x = tensor_of(samples)
        announced = np.unique(labels if classes is None else np.asarray(classes))
        if self.head is not None:
            arrived = _joined(np.union1d(announced, labels), announced[:0] if first else self.output_classes_)
        elif classes is not None and not first and not np.array_equal(announced, self.classes_):
            raise UsageError(f"classes {announced.tolist()} are not those of the first call, {self.classes_.tolist()}.")
        else:
            arrived = announced if first else self.output_classes_
        numbers = _numbers(labels, arrived)
        weight = self._label_weights(x, labels, given, first=first)
        if first:
            self._begin(x, len(arrived), weighted=weight is not None)
        elif self.head is not None:
            self.learner_.grow(len(arrived))
        self.output_classes_, self.classes_ = arrived, np.sort(arrived)
        self.learner_.labels = arrived.tolist()
        self._learn(x, numbers, weight, epochs)
        return self

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities (n, classes), in the order of `classes_`."""
        probabilities: Array = torch.softmax(self._answers(X), dim=1).numpy()
        return probabilities[:, np.argsort(self.output_classes_)]

    def predict(self, X: ArrayLike) -> Array:
        """The most probable label of each sample, (n,)."""
        best = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def _check_loaded(self) -> None:
        if not np.array_equal(self.classes_, np.sort(self.learner_.labels)):
            raise ValueError("its labels contradict each other")

    def _served(self) -> tuple[nn.Module, dict[str, Any]]:
        return _Sorted(self.module_, self.output_classes_), {"classes": self.classes_.tolist()}

    def _label_weights(self, x: Tensor, labels: Array, given: ArrayLike | None, *, first: bool) -> Tensor | None:
        """The weight of each sample times that of its class, (n,); None for an estimator without weights."""
        weight = self._weights(x, given, first=first)
        if weight is None or self.class_weight is None:
            return weight
        if not isinstance(self.class_weight, str | Mapping):
            raise UsageError(
                f"class_weight must be a dict of weights by label, or 'balanced', not {self.class_weight!r}."
            )
        if isinstance(self.class_weight, str):
            by_class = compute_sample_weight(self.class_weight, labels)
        else:  # scikit-learn would refuse weights of labels that are still to come
            by_class = np.array([self.class_weight.get(label, 1.0) for label in labels.tolist()])
        if (by_class < 0).any():
            raise UsageError(f"weights of classes must be at least 0, unlike those of {self.class_weight}.")
        return weight * torch.from_numpy(by_class).float()


class _Sorted(nn.Module):
    """A classifier with its outputs in the order of the sorted labels."""

    order: Tensor

    def __init__(self, network: nn.Module, labels: Array) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("order", torch.from_numpy(np.argsort(labels)))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.network(x)
        return outputs[:, self.order]


def _joined(labels: Array, arrived: Array) -> Array:
    """The labels that `arrived` before, in their order, then the new ones."""
    if len(arrived) and isinstance(arrived[0], str) != isinstance(labels[0], str):
        kinds = ("texts", "numbers") if isinstance(arrived[0], str) else ("numbers", "texts")
        raise UsageError(f"so far labels are {kinds[0]}, these are {kinds[1]}: give all of them in one form.")
    return np.concatenate([arrived, np.setdiff1d(labels, arrived)])


def _numbers(labels: Array, arrived: Array) -> Tensor:
    """The position of each label among those that `arrived`, (n,)."""
    unknown = np.setdiff1d(labels, arrived)
    if len(unknown):
        raise UsageError(
            f"y has labels that are not among the classes {arrived.tolist()}: {unknown.tolist()}. "
            "Name all classes on the first call to partial_fit, or let the last nn.Linear grow: name it with head=."
        )
    order = np.argsort(arrived)
    return torch.from_numpy(order[np.searchsorted(arrived, labels, sorter=order)])
