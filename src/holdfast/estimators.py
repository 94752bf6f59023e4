"""Replay as scikit-learn estimators: `partial_fit` on each new portion of a stream, `predict` on all of it.

Needs the extra `sklearn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from holdfast.errors import HoldfastError, UsageError
from holdfast.evaluation import predict
from holdfast.learners import ConsistencyReplay, ExperienceReplay, Learner, Sgd
from holdfast.models import MODELS, group_batchnorm
from holdfast.regularizers import Regularizer
from holdfast.rng import generator, own_generators, restore, seeded_globally, swapped_globally

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise HoldfastError(
        "the estimators need scikit-learn 1.6 or newer: install the extra 'sklearn' (pip install 'holdfast[sklearn]')."
    ) from error

__all__ = ["ReplayClassifier", "ReplayRegressor"]

Array = NDArray[Any]


class _ReplayEstimator(BaseEstimator):
    """What both estimators share: the settings, the network made for the first samples, passes over samples."""

    def __init__(
        self,
        model: str | Callable[[tuple[int, ...], int], nn.Module] = "mlp",
        *,
        buffer_size: int | None = 500,
        regularizer: str | Regularizer | None = "mse",
        alpha: float = 1.0,
        beta: float = 0.5,
        lr: float = 0.001,
        optimizer: Callable[..., Any] | None = None,
        batch_size: int = 32,
        epochs: int = 30,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.buffer_size = buffer_size
        self.regularizer = regularizer
        self.alpha = alpha
        self.beta = beta
        self.lr = lr
        self.optimizer = optimizer
        self.batch_size = batch_size
        self.epochs = epochs
        self.device = device
        self.random_state = random_state

    @property
    def module_(self) -> nn.Module:
        """The network."""
        check_is_fitted(self, "learner_")
        return self.learner_.model

    def _options(self) -> dict[str, Any]:
        """Options of the learner beyond the settings."""
        return {}

    def _begin(self, x: Tensor, outputs: int) -> None:
        """A new network and a new learner."""
        self._shape, self._outputs = tuple(x.shape[1:]), outputs
        self._seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self._order = generator(self._seed, "order")
        self._build()

    def _build(self) -> None:
        self.learner_ = self._learner()
        # Layers such as dropout draw from PyTorch's global generators. These replace them while it learns.
        self._random = own_generators(self._seed, "network", self.learner_.device)

    def _learner(self) -> Learner:
        make = MODELS[self.model] if isinstance(self.model, str) else self.model
        with seeded_globally(self._seed, "init"):
            network = group_batchnorm(make(self._shape, self._outputs)).to(self.device)
        optimizer = (self.optimizer or torch.optim.Adam)(network.parameters(), lr=self.lr)
        options = self._options()
        if self.buffer_size is None:
            return Sgd(network, optimizer, **options)
        options |= {"buffer_size": self.buffer_size, "alpha": self.alpha, "seed": self._seed}
        if self.regularizer is None:
            return ExperienceReplay(network, optimizer, **options)
        return ConsistencyReplay(network, optimizer, regularizer=self.regularizer, beta=self.beta, **options)

    def _learn(self, x: Tensor, y: Tensor) -> None:
        """One pass over the samples in random order."""
        self.module_.train()
        with swapped_globally(self._random):
            for rows in self._batches(len(x)):
                self.learner_.observe(x[rows], y[rows])

    def _batches(self, count: int) -> Iterator[Tensor]:
        size = self._positive("batch_size")
        rows = torch.randperm(count, generator=self._order)
        # BatchNorm cannot learn from one sample: a single sample that is left over joins the last minibatch.
        whole = count - 1 if count % size == 1 and count > 1 else count
        parts = list(torch.split(rows[:whole], size))
        parts[-1] = torch.cat([parts[-1], rows[whole:]])
        return iter(parts)

    def _answers(self, X: ArrayLike) -> Tensor:
        """The network's outputs (n, outputs)."""
        check_is_fitted(self)
        x = _tensor(validate_data(self, X, dtype=np.float32, reset=False, allow_nd=True))
        return predict(self.module_, x.to(self.learner_.device), _as_it_is).cpu()

    def _positive(self, name: str) -> int:
        value: int = getattr(self, name)
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}.")
        return value

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and joblib: the learner as its state_dict."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "learner_" in state:
            with swapped_globally(state.pop("_random")):  # their states belong to the state of a learner
                state["learner_"] = state["learner_"].state_dict()
            state["_order"] = self._order.get_state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "learner_" in state:
            self._order = torch.Generator()
            restore(self._order, state["_order"])
            self._build()
            with swapped_globally(self._random):
                self.learner_.load_state_dict(state["learner_"])


class ReplayClassifier(ClassifierMixin, _ReplayEstimator):
    """A network that learns from a stream and keeps what it learned, with the interface of scikit-learn.

    `partial_fit` makes one pass over its samples; call it with every new portion of the stream. To each minibatch it
    adds samples from a buffer, which holds a uniform sample of everything seen. Scale features to about unit variance.

    - `model`: the name of a registered network, or a callable (shape of one sample, number of classes) -> torch module.
    - `buffer_size`: samples in the buffer; None learns without a buffer, for comparison.
    - `regularizer`: keeps outputs on stored samples where they were: a registered name, a function of two logit
      tensors, or None for plain replay.
    - `alpha`, `beta`: weights of the replayed samples and of the regularizer.
    - `optimizer`: a callable such as torch.optim.SGD, called with the parameters and `lr`; None for Adam.
    - `epochs`: passes that `fit` makes.
    - `head`: the name of the network's last nn.Linear, for instance "classifier". With it, `partial_fit` takes new
      labels at any time and the network grows. Without it, the first call fixes `classes`.
    - `random_state`: decides everything random, dropout included. PyTorch's global generators stay as they are, and
      belong to the whole process: estimators in threads take turns. Fit in parallel processes, joblib's default.

    Attributes after fitting: `classes_`, `n_features_in_`, `learner_` (the Holdfast learner), `module_` (its network).
    """

    def __init__(
        self,
        model: str | Callable[[tuple[int, ...], int], nn.Module] = "mlp",
        *,
        buffer_size: int | None = 500,
        regularizer: str | Regularizer | None = "mse",
        alpha: float = 1.0,
        beta: float = 0.5,
        lr: float = 0.001,
        optimizer: Callable[..., Any] | None = None,
        batch_size: int = 32,
        epochs: int = 30,
        head: str | None = None,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        super().__init__(
            model,
            buffer_size=buffer_size,
            regularizer=regularizer,
            alpha=alpha,
            beta=beta,
            lr=lr,
            optimizer=optimizer,
            batch_size=batch_size,
            epochs=epochs,
            device=device,
            random_state=random_state,
        )
        self.head = head

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Start anew and learn from X (n, features) and labels y (n,) for `epochs` passes."""
        x, labels = self._samples(X, y, first=True)
        self._arrived = self.classes_ = np.unique(labels)
        self._begin(x, len(self.classes_))
        for _ in range(self._positive("epochs")):
            self._learn(x, _numbers(labels, self._arrived))
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """Continue to learn from X (n, features) and labels y (n,), in one pass.

        `classes` are all labels that will ever come. The first call needs them, unless `fit` was called before or
        `head` is given.
        """
        first = not hasattr(self, "learner_")
        if first and classes is None and self.head is None:
            raise UsageError(
                "classes must be given on the first call to partial_fit: all labels that will ever come. "
                'If they are not known, name the last nn.Linear with head=, for instance head="classifier".'
            )
        x, labels = self._samples(X, y, first=first)
        announced = np.unique(labels if classes is None else np.asarray(classes))
        if self.head is not None:
            arrived = _joined(np.union1d(announced, labels), announced[:0] if first else self._arrived)
        elif classes is not None and not first and not np.array_equal(announced, self.classes_):
            raise UsageError(f"classes {announced.tolist()} are not those of the first call, {self.classes_.tolist()}.")
        else:
            arrived = announced if first else self._arrived
        numbers = _numbers(labels, arrived)
        if first:
            self._begin(x, len(arrived))
        elif self.head is not None:
            self.learner_.grow(len(arrived))
        self._arrived, self.classes_ = arrived, np.sort(arrived)
        self._learn(x, numbers)
        return self

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities (n, classes), in the order of `classes_`."""
        probabilities: Array = torch.softmax(self._answers(X), dim=1).numpy()
        return probabilities[:, np.argsort(self._arrived)]

    def predict(self, X: ArrayLike) -> Array:
        """The most probable label of each sample, (n,)."""
        probabilities = self.predict_proba(X)
        labels: Array = self.classes_[probabilities.argmax(axis=1)]
        return labels

    def _options(self) -> dict[str, Any]:
        return {"head": self.head}

    def _samples(self, X: ArrayLike, y: ArrayLike, *, first: bool) -> tuple[Tensor, Array]:
        """The samples as a tensor and their labels, checked as scikit-learn does."""
        x, labels = validate_data(self, X, y, dtype=np.float32, reset=first, allow_nd=True)
        check_classification_targets(labels)
        return _tensor(x), labels


class ReplayRegressor(RegressorMixin, _ReplayEstimator):
    """A regression network that learns from a stream and keeps what it learned, with the interface of scikit-learn.

    The loss is the mean squared error; scale targets, like features, to about unit variance. The settings are those of
    `ReplayClassifier` without `head`. A `model` is called with the shape of one sample and the number of targets.

    Attributes after fitting: `n_features_in_`, `learner_` (the Holdfast learner), `module_` (its network).
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Start anew and learn from X (n, features) and targets y (n,) or (n, targets) for `epochs` passes."""
        x, targets = self._samples(X, y, first=True)
        self._begin(x, targets.shape[1])
        for _ in range(self._positive("epochs")):
            self._learn(x, targets)
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Continue to learn from X (n, features) and targets y, shaped as in the first call, in one pass."""
        first = not hasattr(self, "learner_")
        x, targets = self._samples(X, y, first=first)
        if first:
            self._begin(x, targets.shape[1])
        self._learn(x, targets)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """The targets, shaped as they were in training: (n,) or (n, targets)."""
        answers: Array = self._answers(X).numpy()
        return answers[:, 0] if self._flat else answers

    def _options(self) -> dict[str, Any]:
        return {"loss": nn.functional.mse_loss}

    def _samples(self, X: ArrayLike, y: ArrayLike, *, first: bool) -> tuple[Tensor, Tensor]:
        """The samples and their targets (n, targets) as tensors, checked as scikit-learn does."""
        x, targets = validate_data(
            self, X, y, dtype=np.float32, reset=first, allow_nd=True, multi_output=True, y_numeric=True
        )
        rows = _tensor(np.asarray(targets, dtype=np.float32).reshape(len(targets), -1))
        if first:
            self._flat = targets.ndim == 1
        elif rows.shape[1] != self._outputs:
            raise UsageError(f"y has {rows.shape[1]} targets per sample, but the network learned {self._outputs}.")
        return _tensor(x), rows

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output, tags.target_tags.multi_output = True, True
        return tags


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


def _tensor(x: Array) -> Tensor:
    return torch.from_numpy(np.array(x))  # a copy: arrays from scikit-learn may be read-only


def _as_it_is(x: Tensor) -> Tensor:
    return x
