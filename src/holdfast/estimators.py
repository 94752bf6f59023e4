"""Replay as scikit-learn estimators: `partial_fit` on each new portion of a stream, `predict` on all of it.

Needs the extra `sklearn`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Signature, signature
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from holdfast import checkpoint
from holdfast.augment import View
from holdfast.errors import CheckpointError, HoldfastError, UsageError, needing
from holdfast.evaluation import predict
from holdfast.export import Exported, export
from holdfast.learners import ConsistencyReplay, ExperienceReplay, Learner, Sgd
from holdfast.learners.losses import Loss
from holdfast.learners.options import check_weights
from holdfast.models import MODELS, group_batchnorm
from holdfast.nested import Nested, transform
from holdfast.registry import unknown_name
from holdfast.regularizers import REGULARIZERS, Regularizer, compares, kind_of, name_of
from holdfast.rng import generator, own_generators, restore, seeded_globally, swapped_globally

with needing("sklearn", "the estimators need scikit-learn 1.6 or newer"):
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

__all__ = ["ReplayClassifier", "ReplayRegressor"]

Array = NDArray[Any]
MakeNetwork = Callable[[tuple[int, ...], int], nn.Module]
"""(shape of one sample, number of outputs) -> network."""


class _Labelled(Learner):
    """A learner whose checkpoints say which label each output stands for. It loads no checkpoint with other labels."""

    labels: list[Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "labels": self.labels}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state.get("labels")
        if self.labels is not None and self.labels != saved:
            raise UsageError(
                f"the outputs of the saved learner stand for {saved or 'unknown labels'}, those of this one for "
                f"{self.labels}. Save and load the whole estimator instead: clf.save(path), "
                "ReplayClassifier.load(path)."
            )
        super().load_state_dict(state)
        self.labels = saved


_LEARNERS: dict[type[Learner], Any] = {
    kind: type(kind.__name__, (_Labelled, kind), {}) for kind in (Sgd, ExperienceReplay, ConsistencyReplay)
}


_READ_ANEW = ("batch_size", "epochs", "class_weight", "random_state")
"""Settings that each call reads itself, or that count from the next `fit` on."""
_CHANGEABLE = ("lr", "alpha", "beta")
"""Settings of the learner that may change while it learns."""


def _joined_signature(own: Callable[..., None], shared: Callable[..., None]) -> Signature:
    """The signature of a constructor whose last parameter, **shared, stands for those of another one."""
    first, second = signature(own), signature(shared)
    return first.replace(parameters=[*({**second.parameters, **dict(list(first.parameters.items())[:-1])}).values()])


class _ReplayEstimator(BaseEstimator):
    """What both estimators share: the settings, the network made for the first samples, passes over samples."""

    _loss: Loss | None = None
    """The loss where none is given; None is the learner's own cross-entropy."""

    def __init__(
        self,
        model: str | MakeNetwork = "mlp",
        *,
        buffer_size: int | None = 500,
        regularizer: str | Regularizer | None = "mse",
        alpha: float = 1.0,
        beta: float = 0.5,
        lr: float = 0.001,
        optimizer: Callable[..., Any] | None = None,
        batch_size: int = 32,
        epochs: int = 30,
        loss: Loss | None = None,
        clip: float | None = None,
        augment: View | None = None,
        storage: str | Path = "device",
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.model, self.device, self.random_state = model, device, random_state
        self.buffer_size, self.storage, self.augment = buffer_size, storage, augment
        self.regularizer, self.alpha, self.beta, self.loss, self.clip = regularizer, alpha, beta, loss, clip
        self.optimizer, self.lr, self.batch_size, self.epochs = optimizer, lr, batch_size, epochs

    learner_: Any

    @property
    def module_(self) -> Any:
        """The network, a torch module."""
        check_is_fitted(self, "learner_")
        return self.learner_.model

    def save(self, path: Path | str) -> None:
        """Write the fitted estimator to the file `path`: settings, labels, network, optimiser, buffer, generators.

        The file holds data only. Settings that are functions or other objects are not in it: give them to `load`.
        """
        check_is_fitted(self, "learner_")
        self.learner_.check_finite()
        state = self.__getstate__()
        given = {name: state.pop(name) for name in self.get_params(deep=False)}
        plain = {name: _plain(value) for name, value in given.items() if _plain(value) is not ...}
        fitted = {name: _packed(value) for name, value in state.items()}
        saved = {"parameters": plain, "again": sorted(given.keys() - plain.keys()), "fitted": fitted}
        checkpoint.write(Path(path), type(self).__name__, saved)
        if self.learner_.buffer is not None:
            self.learner_.buffer.commit(state["learner_"]["buffer"])

    @classmethod
    def load(cls, path: Path | str, **parameters: Any) -> Self:
        """The estimator that `save` wrote. It continues exactly where that one was.

        `parameters` are settings that replace the saved ones. A `model` that was given as a function, like any other
        setting that is no number or text, must be given again.
        """
        for name in parameters.keys() - set(cls._get_param_names()):
            raise unknown_name(f"setting of {cls.__name__}", name, cls._get_param_names())
        saved = checkpoint.read(Path(path), cls.__name__).state
        try:
            if missing := [f"{name}=..." for name in saved["again"] if name not in parameters]:
                raise UsageError(
                    f"{path} does not hold settings that are functions or other objects. Give them again: "
                    f"{cls.__name__}.load(path, {', '.join(missing)})."
                )
            made = cls(**{**saved["parameters"], **parameters})
            made.__setstate__({name: _unpacked(value) for name, value in saved["fitted"].items()})
            if "lr" in parameters:
                made._set_rate()  # that of the file is among the optimiser's own numbers
            if isinstance(made, ClassifierMixin) and not np.array_equal(made.classes_, np.sort(made.learner_.labels)):
                raise ValueError("its labels contradict each other")  # a forged file may say anything
        except HoldfastError:
            raise
        except checkpoint.NONSENSE as error:
            raise CheckpointError(f"{path} is whole, but not what a {cls.__name__} saves: {error!r}.") from error
        if made.learner_.buffer is not None:
            made.learner_.buffer.commit()
        return made

    def export(self, path: Path | str, *, format: str | None = None) -> Exported:
        """Write the network to a file that runs without Holdfast, .onnx or .pt2; see `holdfast.export`."""
        check_is_fitted(self, "learner_")
        model, about = self._served()
        example = torch.randn(8, *self._shape, generator=generator(self._seed, "export"))
        return export(model, example, path, format=format, about={"estimator": type(self).__name__, **about})

    def _served(self) -> tuple[nn.Module, dict[str, Any]]:
        """The network to export, and what its file says about it."""
        return self.module_, {}

    def _begin(self, x: Tensor, outputs: int, *, weighted: bool) -> None:
        """A new network and a new learner."""
        if weighted and self.loss is not None and "reduction" not in signature(self.loss).parameters:
            raise UsageError(
                "weights of samples or classes need a loss for each sample: the loss must take reduction='none', as "
                "the functions of torch.nn.functional do."
            )
        self._shape, self._outputs, self._weighted = tuple(x.shape[1:]), outputs, weighted
        self._seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self._order = generator(self._seed, "order")
        if (earlier := getattr(self, "learner_", None)) is not None and earlier.buffer is not None:
            earlier.buffer.close()  # the new learner's may be in the same folder
        self._build()
        if (buffer := self.learner_.buffer) is not None and buffer.stored:
            buffer.close()
            del self.learner_
            raise UsageError(
                f"{self.storage} holds samples of an estimator that was saved. Load that one, or use an empty folder."
            )
        self._check_outputs(x[:1])

    def _check_outputs(self, x: Tensor) -> None:
        """Raise unless the network gives as many outputs as it should: others would be broadcast, or left out."""
        module = self.module_
        network = module.network if isinstance(module, _ScaledBack) else module  # whose own arithmetic broadcasts
        try:
            found = tuple(predict(network, x.to(self.learner_.device), nn.Identity()).shape[1:])
        except Exception:
            return  # the first step says what is wrong
        if found != (self._outputs,):
            del self.learner_
            what = "class" if isinstance(self, ClassifierMixin) else "target"
            raise UsageError(
                f"the network gives outputs of shape {found} for a sample; it must be ({self._outputs},), one for each "
                f"{what}. `model` is called with the shape of a sample and the number of outputs."
            )

    def _build(self) -> None:
        self.learner_ = self._learner()
        self._made = {name: getattr(self, name) for name in self._get_param_names() if name not in _READ_ANEW}
        # Layers such as dropout draw from PyTorch's global generators. These replace them while it learns.
        self._random = own_generators(self._seed, "network", self.learner_.device)

    def _adopt_settings(self) -> None:
        """Let settings count that were changed since the learner was made; raise for those that cannot."""
        made, now = self._made, {name: getattr(self, name) for name in self._made}
        changed = [name for name in made if made[name] is not now[name] and made[name] != now[name]]
        if fixed := [name for name in changed if name not in _CHANGEABLE]:
            raise UsageError(
                f"{', '.join(fixed)} cannot change after the first samples were learned: set the old value again, or "
                f"call fit, which starts anew. {', '.join(_CHANGEABLE)} can change."
            )
        for name in changed:
            check_weights(**{name: now[name]})
            if name == "lr":
                self._set_rate()
            else:
                setattr(self.learner_, name, now[name])
        self._made = now

    def _set_rate(self) -> None:
        for group in self.learner_.optimizer.param_groups:
            group["lr"] = self.lr

    def _network(self) -> nn.Module:
        make = MODELS[self.model] if isinstance(self.model, str) else self.model
        with seeded_globally(self._seed, "init"):
            return group_batchnorm(make(self._shape, self._outputs))

    def _learner(self) -> Any:
        for name in ("optimizer", "loss", "augment"):
            if (given := getattr(self, name)) is not None and not callable(given):
                raise UsageError(f"{name} must be a function or a class, not {given!r}.")
        network = self._network().to(self.device)
        optimizer = (self.optimizer or torch.optim.Adam)(network.parameters(), lr=self.lr)
        options: dict[str, Any] = {"clip": self.clip, "augment": self.augment, "head": getattr(self, "head", None)}
        replay = {"buffer_size": self.buffer_size, "storage": self.storage, "alpha": self.alpha, "seed": self._seed}
        kind: type[Learner] = Sgd
        if self.buffer_size is not None:
            kind, options = ExperienceReplay, options | replay
            if self.regularizer is not None:
                kind = ConsistencyReplay
                options |= {"regularizer": self._scaled(self.regularizer, network), "beta": self.beta}
        learner = _LEARNERS[kind](network, optimizer, **options)
        loss = self._scaled(self.loss or self._loss, network)
        # Set afterwards: the estimator itself lets the head grow, so that the head goes with any loss and any targets.
        learner.loss = partial(_weighted_mean, loss or nn.functional.cross_entropy) if self._weighted else loss
        learner.labelled = learner.loss is None
        return learner

    def _scaled(self, function: Any, network: nn.Module) -> Any:
        """A loss or a regularizer, in the units in which the network should be judged."""
        return function

    def _learn(self, x: Tensor, y: Tensor, weight: Tensor | None, epochs: int) -> None:
        """Passes over the samples in random order. A sample of weight 0 is left out."""
        targets: Nested = y
        if weight is not None:
            x, targets = x[weight > 0], (y[weight > 0], weight[weight > 0])
        self.module_.train()
        for _ in range(epochs):
            with swapped_globally(self._random):
                for rows in self._batches(len(x)) if len(x) else ():
                    self.learner_.observe(x[rows], transform(itemgetter(rows), targets))

    def _weights(self, x: Tensor, given: ArrayLike | None, *, first: bool) -> Tensor | None:
        """The weights of the samples (n,), all 1 if none are `given`; None for an estimator without weights."""
        asked = given is not None or getattr(self, "class_weight", None) is not None
        if not (asked if first else self._weighted):
            if asked:
                raise UsageError("weights came too late: stored samples have none. Give them from the first call on.")
            return None
        weight = _check_sample_weight(given, x.numpy(), dtype=np.float32, copy=True, ensure_non_negative=True)
        return torch.from_numpy(weight)

    def _batches(self, count: int) -> list[Tensor]:
        size = self._positive("batch_size")
        rows = torch.randperm(count, generator=self._order)
        # BatchNorm cannot learn from one sample: a single sample that is left over joins the last minibatch.
        whole = count - 1 if count % size == 1 and count > 1 else count
        parts = list(torch.split(rows[:whole], size))
        parts[-1] = torch.cat([parts[-1], rows[whole:]])
        return parts

    def _answers(self, X: ArrayLike) -> Tensor:
        """The network's outputs (n, outputs)."""
        check_is_fitted(self, "learner_")
        x = _tensor(validate_data(self, X, dtype=np.float32, reset=False, allow_nd=True))
        return predict(self.module_, x.to(self.learner_.device), nn.Identity()).cpu()

    def _positive(self, name: str) -> int:
        if (value := int(getattr(self, name))) < 1:
            raise UsageError(f"{name} must be at least 1, not {value}.")
        return value

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and joblib: the learner as its state_dict."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "learner_" in state:
            self._adopt_settings()  # else they would contradict the learner
            del state["_made"]
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
    __init__.__signature__ = _joined_signature(__init__, _ReplayEstimator.__init__)  # type: ignore[attr-defined]

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
        x = _tensor(samples)
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


class ReplayRegressor(RegressorMixin, _ReplayEstimator):
    """A regression network that learns from a stream and keeps what it learned, with the interface of scikit-learn.

    The loss is the mean squared error, and targets may have any size: the network learns them in units of their
    standard deviation so far, and predictions are scaled back. The settings are those of `ReplayClassifier` without
    `head` and `class_weight`. A `model` is called with the shape of one sample and the number of targets.

    Attributes after fitting: `n_features_in_`, `learner_` (the Holdfast learner), `module_` (its network, which gives
    the targets in their own units).
    """

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


def _weighted_mean(loss: Callable[..., Tensor], outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of each sample, averaged with the weights that come with the targets."""
    y, weight = targets
    each = loss(outputs, y, reduction="none").reshape(len(weight), -1).mean(dim=1)
    return each @ weight / weight.sum()


def _plain(value: Any) -> Any:
    """A setting as a checkpoint can hold it; ... if it cannot."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else ...


def _packed(value: Any) -> Any:
    """An array as a checkpoint can hold it; anything else as it is."""
    return {"dtype": value.dtype.str, "array": value.tolist()} if isinstance(value, np.ndarray) else value


def _unpacked(value: Any) -> Any:
    packed = isinstance(value, dict) and value.keys() == {"dtype", "array"}
    return np.array(value["array"], dtype=value["dtype"]) if packed else value


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
