"""A forgetting monitor: measures, while a model learns, how much of the earlier data it still knows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as nesting

from holdfast.analysis.calibration import calibration
from holdfast.errors import UsageError
from holdfast.models import by_keywords, evaluating, is_pretrained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DriftMonitor", "ForgettingMonitor", "ForgettingWarning", "Reading", "aligned"]

Score = Callable[[Any, Any], Any]
"""(outputs, targets) of a whole slice -> one number; larger is better."""


class ForgettingWarning(UserWarning):
    """The model is losing what it learned before."""


@dataclass(frozen=True)
class Reading:
    """One slice at one step."""

    slice: str
    step: int
    score: float
    """Accuracy in percent, or what the slice's own score function returned."""
    best: float
    """The best score of the slice so far, this one included."""
    ece: float | None
    """Expected calibration error in percent; None for slices with a score function, NaN if an output is not finite."""
    dropped: bool
    """Whether the slice has dropped too far and has not yet recovered half of the allowed drop."""

    @property
    def drop(self) -> float:
        """How far the score is below the best, in points."""
        return self.best - self.score


class _Slice(NamedTuple):
    x: Any
    y: Any
    size: int
    score: Score | None
    drop: float


class ForgettingMonitor:
    """Accuracy and calibration on held-out slices of earlier data, and a warning when one drops.

        monitor = hf.ForgettingMonitor(model, drop=5.0, every=100)
        for x, y in stream:
            learner.observe(x, y)
            monitor.observe()                       # measures every 100 steps
        monitor.add("march", held_out_x, held_out_y)    # measured now, and from now on

    A slice that falls more than `drop` points below its best gives a `ForgettingWarning` and a call of
    `on_drop(reading)`. Both come once, and again only after the slice has recovered half of `drop`.

    `x` may be a tensor, an array or a DataFrame, or dicts and tuples of them; the model gets tensors, as its one
    argument. `view`, for instance a normalisation, is applied first. Labels may be texts if `classes` are the labels in
    the order of the model's outputs; of an estimator, that is `clf.output_classes_`. The model computes in evaluation
    mode, `batch_size` samples at a time, on the device of its parameters. Measuring does not change its training.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        drop: float = 5.0,
        every: int = 100,
        view: Callable[[Any], Any] | None = None,
        on_drop: Callable[[Reading], object] | None = None,
        classes: Sequence[Any] | None = None,
        batch_size: int = 500,
        bins: int = 15,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"a monitor watches a torch module, not a {type(model).__name__}. Of a learner, give "
                "learner.evaluated(); of an estimator, clf.module_."
            )
        _check_drop(drop)
        for name, number in (("every", every), ("batch_size", batch_size), ("bins", bins)):
            if number < 1:
                raise UsageError(f"{name} must be at least 1, not {number}.")
        self.model, self.drop, self.every = model, drop, every
        self.view, self.on_drop, self.batch_size, self.bins = view, on_drop, batch_size, bins
        self.classes = classes
        """The labels in the order of the model's outputs; None for labels 0, 1, 2 ... Extend it as the model grows."""
        self.steps = 0
        """Steps so far: counted by `observe`, or set by `check`."""
        self.history: list[Reading] = []
        self._slices: dict[str, _Slice] = {}

    @property
    def slices(self) -> list[str]:
        """The names of the slices, in the order in which they were added."""
        return list(self._slices)

    def add(self, name: str, x: Any, y: Any, *, score: Score | None = None, drop: float | None = None) -> Reading:
        """Measure a slice now, and from now on with the others; returns the reading, from which it can drop.

        `y` are class labels (N,). With a function `score(outputs, y)`, which returns one number (larger is better; for
        regression, minus the error), `y` may be anything it takes, and `drop` is in its units.
        """
        if name in self._slices:
            raise UsageError(f"a slice '{name}' is watched already; choose another name, or remove it first.")
        allowed = self.drop if drop is None else drop
        _check_drop(allowed)
        x = nesting.tree_map(self._tensor, x)
        y = self._numbers(name, y) if score is None else nesting.tree_map(self._tensor, y)
        made = _Slice(x, y, _rows(name, x, y), score, allowed)
        reading = self._measure(name, made)
        self._slices[name] = made
        self.history.append(reading)
        return reading

    def remove(self, name: str) -> None:
        """Stop watching a slice; its history stays."""
        if name not in self._slices:
            raise UsageError(f"no slice '{name}' is watched; there are: {', '.join(self._slices) or 'none'}.")
        del self._slices[name]

    def observe(self) -> list[Reading]:
        """Count a step; every `every` steps, measure all slices and return their readings."""
        self.steps += 1
        return self._check() if self.steps % self.every == 0 else []

    def check(self, step: int | None = None) -> list[Reading]:
        """Measure all slices now and return their readings; `step` sets the count of steps."""
        self.steps = self.steps if step is None else step
        return self._check()

    def latest(self) -> list[Reading]:
        """The last reading of every watched slice."""
        last = {reading.slice: reading for reading in self.history}
        return [last[name] for name in self._slices]

    def values(self) -> dict[str, float]:
        """The last readings as named numbers, for a logger."""
        read = self.latest()
        named = {f"{each.slice}/{name}": getattr(each, name) for each in read for name in ("score", "ece")}
        return {name: value for name, value in named.items() if value is not None}

    def rows(self) -> list[dict[str, Any]]:
        """The history as plain rows, one per reading, for JSON: numbers that are not finite are None."""
        return [{name: _plain(value) for name, value in asdict(reading).items()} for reading in self.history]

    def to_dict(self) -> dict[str, Any]:
        """The history and the count of steps as plain data, for a file or a checkpoint's `extra`."""
        return {"steps": self.steps, "history": self.rows()}

    def load_dict(self, values: Mapping[str, Any]) -> None:
        """Continue the history that `to_dict` gave. Add the slices first."""
        try:
            history = [_reading(row) for row in values["history"]]
            steps = int(values["steps"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"this is not the history of a monitor: {error!r}. Give what to_dict returned.") from error
        known = {reading.slice for reading in history}
        # A slice that the history does not know starts from the reading it has.
        self.history = history + [reading for reading in self.latest() if reading.slice not in known]
        self.steps = steps

    def table(self) -> str:
        """The last readings as a small table."""
        rows = [["slice", "step", "score", "best", "drop", "ECE", ""]]
        for reading in self.latest():
            numbers = [f"{number:.2f}" for number in (reading.score, reading.best, reading.drop)]
            ece = "" if reading.ece is None else f"{reading.ece:.2f}"
            rows.append([reading.slice, str(reading.step), *numbers, ece, "dropped" if reading.dropped else ""])
        return aligned(rows)

    def figure(self, title: str = "") -> Figure:
        """The scores over steps, one line per slice; rings mark the readings that gave a warning."""
        from holdfast.report.draw.history import draw_history

        return draw_history(self.rows(), title=title)

    def _check(self) -> list[Reading]:
        before = {reading.slice: reading for reading in self.latest()}
        readings = [self._measure(name, part, before[name]) for name, part in self._slices.items()]
        self.history += readings
        fresh = [reading for reading in readings if reading.dropped and not before[reading.slice].dropped]
        # First complete the history: callbacks and warnings may raise.
        for one in fresh:
            if self.on_drop is not None:
                self.on_drop(one)
        for one in fresh:
            where = f"{one.score:.2f} at step {one.step}, {one.drop:.2f} below its best of {one.best:.2f}"
            warnings.warn(f"'{one.slice}' is being forgotten: {where}.", ForgettingWarning, stacklevel=3)
        return readings

    def _measure(self, name: str, part: _Slice, before: Reading | None = None) -> Reading:
        outputs = self._outputs(part)
        if part.score is not None:
            targets = nesting.tree_map(lambda tensor: tensor.to(self._device()), part.y)
            score, ece = float(part.score(outputs, targets)), None
        else:
            score, ece = self._grade(name, outputs, part.y)
        best = score if before is None or before.best != before.best else max(before.best, score)
        # A slice that has dropped must recover half of the drop. A score of NaN counts as a drop.
        slack = part.drop / 2 if before is not None and before.dropped else part.drop
        dropped = before is not None and not best - score <= slack
        return Reading(name, self.steps, score, best, ece, dropped)

    @torch.no_grad()
    def _outputs(self, part: _Slice) -> Any:
        """The model's outputs for the whole slice, on its device."""
        device, answers = self._device(), []
        with evaluating(self.model):
            for start in range(0, part.size, self.batch_size):
                rows = slice(start, start + self.batch_size)
                # Copies: view and model may work in place, and the slice is measured again.
                x = nesting.tree_map(lambda tensor, rows=rows: tensor[rows].to(device, copy=True), part.x)
                answers.append(self._answer(x if self.view is None else self.view(x)))
        return nesting.tree_map(lambda *parts: torch.cat(parts), *answers)

    def _answer(self, x: Any) -> Any:
        """What the model returns; models of transformers are called as learners call them."""
        if not is_pretrained(self.model):
            return self.model(x)
        returned = by_keywords(self.model, x)
        return getattr(returned, "logits", returned)

    def _grade(self, name: str, logits: Any, labels: Any) -> tuple[float, float]:
        """Accuracy and expected calibration error in percent."""
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UsageError(
                f"slice '{name}': accuracy needs logits (samples, classes) of two classes or more, but the model gives "
                f"{found}. For other outputs, give a score function: add(..., score=...)."
            )
        if not isinstance(labels, Tensor) or labels.ndim != 1:
            raise UsageError(
                f"slice '{name}': accuracy needs one label per sample. For other targets, give a score function: "
                "add(..., score=...)."
            )
        labels = labels.to(logits.device)
        finite = logits.isfinite().all(dim=1)
        right = (logits.argmax(dim=1) == labels) & finite  # logits that are not finite are a wrong answer
        accuracy = 100 * float(right.double().mean())
        return accuracy, calibration(logits, labels, self.bins).ece if bool(finite.all()) else math.nan

    def _numbers(self, name: str, labels: Any) -> Any:
        """The number of each label's output, (N,)."""
        labels = self._tensor(np.asarray(labels) if isinstance(labels, list | tuple) else labels)
        texts = isinstance(labels, np.ndarray)
        if self.classes is None and texts:
            raise UsageError(
                f"slice '{name}': the labels are texts. Give the monitor the labels in the order of the model's "
                "outputs: ForgettingMonitor(model, classes=...); of an estimator, clf.output_classes_."
            )
        if self.classes is None or not (texts or isinstance(labels, Tensor)):
            return labels
        outputs = {label: output for output, label in enumerate(np.asarray(self.classes).tolist())}
        if unknown := set(labels.tolist()) - outputs.keys():
            found = ", ".join(sorted(map(repr, unknown)))
            raise UsageError(f"slice '{name}': the labels {found} are not among the classes {list(outputs)}.")
        return torch.tensor([outputs[label] for label in labels.tolist()])

    def _tensor(self, value: Any) -> Any:
        """The numbers of an array or a DataFrame as a tensor, floats in the model's type; anything else as it is.

        Unsigned numbers wider than a byte become int64: PyTorch cannot compare them with other whole numbers.
        """
        value = value.to_numpy() if hasattr(value, "to_numpy") else value
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            types = [each.dtype for each in self.model.parameters() if each.is_floating_point()]
            tensor = torch.from_numpy(value.copy())
            value = tensor.to((*types, torch.get_default_dtype())[0]) if tensor.is_floating_point() else tensor
        wide = isinstance(value, Tensor) and value.dtype in (torch.uint16, torch.uint32, torch.uint64)
        return value.long() if wide else value

    def _device(self) -> torch.device:
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of a table as lines of text; the first column begins at the left, the others end at the right."""
    first, *rest = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]).rstrip() for row in rows)


def _check_drop(drop: float) -> None:
    if not (math.isfinite(drop) and drop > 0):
        raise UsageError(f"drop must be a finite number of points above 0, not {drop!r}.")


def _rows(name: str, x: Any, y: Any) -> int:
    """The number of samples in a slice; raises unless each of its tensors has one row per sample."""
    leaves = nesting.tree_leaves((x, y))
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        found = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        raise UsageError(
            f"slice '{name}': x and y must be tensors, or arrays and DataFrames of numbers, with one row per "
            f"sample, or dicts and tuples of them; not {found}."
        )
    sizes = sorted({len(leaf) for leaf in leaves})
    if len(sizes) != 1 or sizes[0] == 0:
        raise UsageError(f"slice '{name}': x and y must have the same number of rows, at least one, not {sizes}.")
    return sizes[0]


def _plain(value: Any) -> Any:
    """None for a number that is not finite: JSON has none of these."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _reading(row: Mapping[str, Any]) -> Reading:
    """The reading behind a row of `rows`."""
    values: dict[str, Any] = {field.name: row[field.name] for field in fields(Reading)}
    for name in ("score", "best"):
        values[name] = math.nan if values[name] is None else float(values[name])
    values["step"], values["ece"] = int(values["step"]), None if values["ece"] is None else float(values["ece"])
    return Reading(**values)


class DriftMonitor:
    """Calls `on_drift()` when the loss on what comes in stays far above what it was: the rule to learn has changed.

        drift = hf.DriftMonitor(on_drift=learner.forget_all)
        for x, y in stream:
            drift.observe(learner.observe(x, y).current)

    The loss must be that of new samples before the step, such as the term `current`. It is compared with its moving
    average over about `memory` steps, in units of its moving standard deviation; the excess over half a unit adds up
    (CUSUM), and above `threshold` the alarm is given. A step counts as 3 units at most, also one whose loss is not
    finite, so that no outlier gives the alarm. At the beginning and after an alarm, `memory` finite losses give none.
    """

    def __init__(
        self, on_drift: Callable[[], object] | None = None, *, threshold: float = 15.0, memory: int = 50
    ) -> None:
        if not (math.isfinite(threshold) and threshold > 0 and memory >= 2):
            raise UsageError(f"threshold must be above 0 and memory at least 2, not {threshold!r} and {memory!r}.")
        self.on_drift, self.threshold, self.memory = on_drift, threshold, memory
        self.steps = 0
        self.alarms: list[int] = []
        """The steps at which an alarm was given, counted from 1."""
        self._restart()

    def _restart(self) -> None:
        self._count, self._mean, self._variance, self._excess = 0, 0.0, 0.0, 0.0

    def observe(self, loss: float | Tensor) -> bool:
        """Take the loss of one step, which waits for the device it is on; returns whether it gave the alarm."""
        value, warm = float(loss), self._count >= self.memory
        self.steps += 1
        if not math.isfinite(value):
            if not warm:
                return False  # there is no mean yet to compare it with
            value = math.inf
        self._count += 1
        above = value - self._mean
        if warm:
            units = above / max(math.sqrt(self._variance), 1e-12)
            self._excess = max(0.0, self._excess + min(units, 3.0) - 0.5)
            if self._excess > self.threshold:
                self.alarms.append(self.steps)
                self._restart()
                if self.on_drift is not None:
                    self.on_drift()
                return True
        # The plain mean at first, later the moving one, into which a step that may be drift counts as 3 units.
        rate = 1 / min(self._count, self.memory)
        above = min(above, 3 * math.sqrt(self._variance)) if warm else above
        self._mean += rate * above
        self._variance = (1 - rate) * (self._variance + rate * above**2)
        return False
