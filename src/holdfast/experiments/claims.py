"""The paper's main claims, each checked by name on our means, with the numbers for and against it.

A claim is a list of checks, one per setting (benchmark, buffer, number of tasks) that has the means it needs; it says
in how many of them it holds. The same checks on the published numbers stand beside ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isnan
from statistics import fmean
from typing import NamedTuple

from holdfast.analysis.claims import Check, Claim
from holdfast.analysis.comparisons import APPROXIMATE, STRICT
from holdfast.analysis.overview import relative_gain
from holdfast.config import RunConfig
from holdfast.experiments.tables import CLASS_IL, REGULARIZERS, REPLAY
from holdfast.experiments.verdicts import Verdict

__all__ = ["CLAIMS", "claims"]

TOP = 3
"""Ranks that count as the top among ten regularizers; the published numbers have linf at 1 to 3."""


class Setting(NamedTuple):
    """What methods are compared under."""

    benchmark: str
    buffer_size: int
    tasks: int | None

    def __str__(self) -> str:
        usual = self.tasks == RunConfig.preset(self.benchmark, "er").tasks
        tasks = "" if usual else f", {self.tasks} tasks"
        return f"{self.benchmark}, buffer {self.buffer_size}{tasks}"


Means = Mapping[Setting, Mapping[str, float]]
"""Accuracy in percent by setting and method."""

Rule = Callable[[Means], Iterator[Check]]


def _consistency_beats_er(means: Means) -> Iterator[Check]:
    for setting, by_method in means.items():
        for method in REGULARIZERS:
            if "er" in by_method and method in by_method:
                er, ours = by_method["er"], by_method[method]
                yield Check(str(setting), f"{method} {ours:.2f}, er {er:.2f}", ours > er)


def _strict_beats_approximate(means: Means) -> Iterator[Check]:
    for setting, by_method in means.items():
        if all(method in by_method for method in REGULARIZERS):
            strict = fmean(by_method[method] for method in STRICT)
            approximate = fmean(by_method[method] for method in APPROXIMATE)
            yield Check(str(setting), f"strict {strict:.2f}, approximate {approximate:.2f}", strict > approximate)


def _linf_at_the_top(means: Means) -> Iterator[Check]:
    for setting, by_method in means.items():
        if setting.benchmark in CLASS_IL and all(method in by_method for method in REGULARIZERS):
            order = sorted(REGULARIZERS, key=lambda method: -by_method[method])
            rank = order.index("linf") + 1
            best = f"best {order[0]} {by_method[order[0]]:.2f}"
            yield Check(str(setting), f"linf {by_method['linf']:.2f}, rank {rank} of 10, {best}", rank <= TOP)


def _gain_grows_with_fewer_samples(means: Means) -> Iterator[Check]:
    """The mean relative gain over ER at the smallest buffer against that at the largest, per benchmark and length."""
    for benchmark, tasks in dict.fromkeys((setting.benchmark, setting.tasks) for setting in means):
        sizes = sorted(s.buffer_size for s in means if (s.benchmark, s.tasks) == (benchmark, tasks))
        few, many = (Setting(benchmark, size, tasks) for size in (sizes[0], sizes[-1]))
        common = [m for m in REGULARIZERS if m in means[few] and m in means[many]]
        if few == many or not common or "er" not in means[few] or "er" not in means[many]:
            continue
        small, large = (
            fmean(relative_gain(means[at][method], means[at]["er"]) for method in common) for at in (few, many)
        )
        numbers = f"gain {small:+.1f} % with {few.buffer_size} samples, {large:+.1f} % with {many.buffer_size}"
        yield Check(f"{benchmark}, {len(common)} regularizers", numbers, small > large)


CLAIMS: dict[str, tuple[str, Rule]] = {
    "consistency-beats-er": ("Every regularizer is better than ER alone.", _consistency_beats_er),
    "strict-beats-approximate": (
        f"Strict regularizers ({', '.join(STRICT)}) are on average better than approximate ones "
        f"({', '.join(APPROXIMATE)}).",
        _strict_beats_approximate,
    ),
    "linf-at-the-top": (f"linf is among the best {TOP} of ten regularizers in Class-IL.", _linf_at_the_top),
    "gain-grows-with-fewer-samples": (
        "The relative gain over ER is larger with the smallest buffer than with the largest.",
        _gain_grows_with_fewer_samples,
    ),
}


def claims(verdicts: Iterable[Verdict]) -> list[Claim]:
    """Every claim, checked on the accuracies among the verdicts and on the published numbers of the same cells."""
    ours: dict[Setting, dict[str, float]] = {}
    theirs: dict[Setting, dict[str, float]] = {}
    for verdict in verdicts:
        config = verdict.cell.config
        # A cell with its own alpha or beta is no method of the paper's comparison; its row then is not the method.
        if verdict.cell.metric != "accuracy" or config.method not in REPLAY or verdict.cell.row != config.method:
            continue
        # Other papers ran the same methods with other settings.
        if config.buffer_size is None or (verdict.published is not None and verdict.published.source):
            continue
        setting = Setting(config.benchmark, config.buffer_size, config.tasks)
        if not isnan(verdict.mean):
            ours.setdefault(setting, {})[config.method] = verdict.mean
        if verdict.published is not None:
            theirs.setdefault(setting, {})[config.method] = verdict.published.mean
    return [
        Claim(name, statement, tuple(rule(ours)), tuple(rule(theirs))) for name, (statement, rule) in CLAIMS.items()
    ]
