"""What the estimators share: settings, a learner made for the first samples, passes over samples, saving."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Signature, signature
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from holdfast import checkpoint
from holdfast.augment import View
from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.evaluation import predict
from holdfast.export import Exported, export
from holdfast.learners import ConsistencyReplay, ExperienceReplay, Learner, Sgd
from holdfast.learners.losses import Loss
from holdfast.learners.options import check_weights
from holdfast.models import MODELS, group_batchnorm
from holdfast.nested import Nested, transform
from holdfast.registry import unknown_name
from holdfast.regularizers import Regularizer
from holdfast.rng import generator, own_generators, restore, seeded_globally, swapped_globally

__all__ = ["Array", "MakeNetwork", "ReplayEstimator", "joined_signature", "tensor_of"]

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


class ReplayEstimator(BaseEstimator):
    """What both estimators share: the settings, the network made for the first samples, passes over samples."""

    _loss: Loss | None = None
    """The loss where none is given; None is the learner's own cross-entropy."""
    _output: str
    """What an output of the network stands for, in a sentence."""

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
            made._check_loaded()
        except HoldfastError:
            raise
        except checkpoint.NONSENSE as error:
            raise CheckpointError(f"{path} is whole, but not what a {cls.__name__} saves: {error!r}.") from error
        if made.learner_.buffer is not None:
            made.learner_.buffer.commit()
        return made

    def _check_loaded(self) -> None:
        """Raise if what was loaded contradicts itself: a forged file may say anything."""

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
        try:
            found = tuple(predict(self._given_network(), x.to(self.learner_.device), nn.Identity()).shape[1:])
        except Exception:
            return  # the first step says what is wrong
        if found != (self._outputs,):
            del self.learner_
            raise UsageError(
                f"the network gives outputs of shape {found} for a sample; it must be ({self._outputs},), one for each "
                f"{self._output}. `model` is called with the shape of a sample and the number of outputs."
            )

    def _given_network(self) -> nn.Module:
        """The network as `model` made it."""
        network: nn.Module = self.module_
        return network

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
        x = tensor_of(validate_data(self, X, dtype=np.float32, reset=False, allow_nd=True))
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


def joined_signature(own: Callable[..., None], shared: Callable[..., None]) -> Signature:
    """The signature of a constructor whose last parameter, **shared, stands for those of another one."""
    first, second = signature(own), signature(shared)
    return first.replace(parameters=[*({**second.parameters, **dict(list(first.parameters.items())[:-1])}).values()])


def tensor_of(x: Array) -> Tensor:
    """The array as a tensor, copied: arrays from scikit-learn may be read-only."""
    return torch.from_numpy(np.array(x))


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
