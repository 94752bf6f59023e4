"""The accuracy matrix of one's own stream: how well a model does on each part of it, again and again."""

from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.monitor import ForgettingMonitor, aligned

__all__ = ["AccuracyMatrix", "Row", "evaluate"]


def evaluate(
    model: nn.Module,
    slices: Mapping[str, tuple[Any, Any]],
    *,
    view: Callable[[Any], Any] | None = None,
    classes: Sequence[Any] | None = None,
    batch_size: int = 500,
) -> dict[str, float]:
    """The accuracy of `model` on each slice in percent, by name: one row for an `AccuracyMatrix`.

    A slice is a pair (inputs, labels) of test samples. The model computes in evaluation mode, in batches of
    `batch_size`; nothing of it changes. `view`, for instance a normalisation, is applied to the inputs first. Inputs,
    labels and `classes` are as for `ForgettingMonitor`.
    """
    monitor = ForgettingMonitor(model, view=view, classes=classes, batch_size=batch_size)
    return {name: monitor.add(name, x, y).score for name, (x, y) in slices.items()}


class Row(NamedTuple):
    """One moment of the stream: what had just been learned, and the accuracies by slice in percent."""

    learned: str | None
    accuracies: dict[str, float]


class AccuracyMatrix:
    """Rows of accuracies that are collected while a model learns, and what they say about forgetting.

        matrix, slices = hf.AccuracyMatrix(), {}
        for month, stream in months.items():
            for x, y in stream:
                learner.observe(x, y)
            slices[month] = held_out[month]
            matrix.add(hf.evaluate(learner.evaluated(), slices), learned=month)
        print(matrix, matrix.forgetting)

    A slice may be missing in a row, and may come before it is learned. An accuracy of NaN says the same as a missing
    one: not measured then, as for a task that is still to come. A number that is not defined yet is NaN. `rows`
    continues an earlier matrix: after `learner.save(path, {"rows": matrix.rows})`, `AccuracyMatrix(extra["rows"])`.
    """

    def __init__(self, rows: Sequence[tuple[str | None, Mapping[str, float]]] = ()) -> None:
        self.rows: list[Row] = []
        """One per call of `add`."""
        for learned, accuracies in rows:
            self.add(accuracies, learned)

    def add(self, accuracies: Mapping[str, float], learned: str | None = None) -> None:
        """Add a row, as `evaluate` gives it. `learned` is the slice that was learned just before, where one was."""
        if learned is not None and learned not in accuracies:
            raise UsageError(
                f"the row does not have the slice '{learned}' that was learned; it has {list(accuracies)}."
            )
        self.rows.append(Row(learned, dict(accuracies)))

    @property
    def slices(self) -> list[str]:
        """The names of all slices, in the order in which they came."""
        return list(dict.fromkeys(name for row in self.rows for name in row.accuracies))

    @property
    def tensor(self) -> Tensor:
        """The accuracies in percent, (rows, slices) float64, NaN where a slice was not measured."""
        values = [[row.accuracies.get(name, nan) for name in self.slices] for row in self.rows]
        return torch.tensor(values, dtype=torch.float64).reshape(len(self.rows), len(self.slices))

    @property
    def accuracy(self) -> float:
        """The mean over the slices measured in the last row, in percent."""
        return _mean(list(self._measured[-1].accuracies.values()) if self.rows else [])

    @property
    def forgetting(self) -> float:
        """How far slices fell from their best to the last row, in points, averaged over those learned before it.

        Without any `learned`, all slices count that were measured before the last row.
        """
        measured = self._measured
        courses = [[row.accuracies[name] for row in measured if name in row.accuracies] for name in self._since()]
        return _mean([max(course) - course[-1] for course in courses])

    @property
    def backward_transfer(self) -> float:
        """How slices changed since they were learned, in points, averaged as `forgetting`; negative is forgetting."""
        measured = [row.accuracies for row in self._measured]
        return _mean([measured[-1][name] - measured[row][name] for name, row in self._since().items()])

    @property
    def _measured(self) -> list[Row]:
        """The rows with what was measured, so without any NaN."""
        kept = [{name: each for name, each in row.accuracies.items() if not isnan(each)} for row in self.rows]
        return [Row(row.learned, accuracies) for row, accuracies in zip(self.rows, kept, strict=True)]

    def _since(self) -> dict[str, int]:
        """The slices that count in `forgetting`, each with the number of the row in which it was learned."""
        named, since, rows = any(row.learned for row in self.rows), dict[str, int](), self._measured
        for number, row in enumerate(rows[:-1]):
            for name in row.accuracies:
                if name == row.learned or not named:
                    since.setdefault(name, number)
        last = rows[-1] if rows else Row(None, {})
        return {name: row for name, row in since.items() if name in last.accuracies and name != last.learned}

    def __str__(self) -> str:
        """The matrix as a small table: a row per moment, a column per slice, `-` where it was not measured."""
        lines = [["after", *self.slices]]
        for number, (learned, accuracies) in enumerate(self.rows, start=1):
            cells = (accuracies.get(name, nan) for name in self.slices)
            lines.append([learned or f"row {number}", *("-" if isnan(cell) else f"{cell:.1f}" for cell in cells)])
        return aligned(lines)

    def __repr__(self) -> str:
        return f"AccuracyMatrix({len(self.rows)} rows, {len(self.slices)} slices)"


def _mean(values: list[float]) -> float:
    return fmean(values) if values else nan
