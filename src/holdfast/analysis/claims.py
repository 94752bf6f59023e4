"""The paper's claims, each checked by name on means, with the numbers for and against it.

A claim is a list of checks, one for each place (benchmark, buffer, number of tasks) that has the means it needs. It
says in how many of them it holds. The same checks on published numbers can stand beside ours.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple, Self

from holdfast.analysis.comparisons import APPROXIMATE, REGULARIZERS, STRICT
from holdfast.analysis.overview import relative_gain
from holdfast.config import RunConfig

__all__ = ["CLASS_IL", "REFERENCE", "Check", "Claim", "Means", "Place", "check_claims"]

CLASS_IL = ("seq-cifar10", "seq-cifar100", "seq-tinyimagenet")
REFERENCE = "er"
"""The method all others are compared with."""
FEW = 3
"""How many of ten regularizers count as the best, and how many as the worst; linf has ranks 1 to 3 in the paper."""


class Check(NamedTuple):
    """One comparison: where, the numbers in words, and whether the claim holds there."""

    where: str
    numbers: str
    holds: bool


@dataclass(frozen=True)
class Claim:
    """A claim with its checks on our numbers and, where there are any, on the published ones."""

    name: str
    statement: str
    checks: tuple[Check, ...]
    published: tuple[Check, ...] = ()

    @property
    def held(self) -> int:
        """Checks that hold on our numbers."""
        return sum(check.holds for check in self.checks)

    @property
    def holds(self) -> bool:
        """Whether there are several checks and all of them hold on our numbers. One check alone decides nothing."""
        return 1 < len(self.checks) == self.held

    @property
    def exceptions(self) -> tuple[Check, ...]:
        """The checks that do not hold on our numbers."""
        return tuple(check for check in self.checks if not check.holds)

    @property
    def outcome(self) -> str:
        """How often it holds on our numbers: `holds in 45 of 56`."""
        return _outcome(self.checks) + (" (one check decides nothing)" if len(self.checks) == 1 else "")

    @property
    def published_outcome(self) -> str:
        """How often it holds on the published numbers of the same cells."""
        return _outcome(self.published)

    @property
    def detail(self) -> str:
        """The numbers of the exceptions; if there are none, those of the first check."""
        return "; ".join(check.numbers for check in self.exceptions or self.checks[:1])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        told = {"name": self.name, "text": self.statement, "outcome": self.outcome, "detail": self.detail}
        counts = {"held": self.held, "checks": len(self.checks), "holds": self.holds}
        exceptions = [{"where": check.where, "numbers": check.numbers} for check in self.exceptions]
        return {**told, **counts, "exceptions": exceptions, "published": self.published_outcome}


def _outcome(checks: tuple[Check, ...]) -> str:
    return f"holds in {sum(check.holds for check in checks)} of {len(checks)}" if checks else "not enough data"


class Place(NamedTuple):
    """What methods are compared under."""

    benchmark: str
    buffer_size: int | None
    tasks: int | None

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The place of a run."""
        return cls(config.benchmark, config.buffer_size, config.tasks)

    def __str__(self) -> str:
        usual = self.tasks == RunConfig.preset(self.benchmark, REFERENCE).tasks
        return f"{self.benchmark}, buffer {self.buffer_size}{'' if usual else f', {self.tasks} tasks'}"


Means = Mapping[Place, Mapping[str, float]]
"""A measure by place and method."""


def _consistency_beats_er(means: Means) -> Iterator[Check]:
    for place, by_method in means.items():
        for method in REGULARIZERS:
            if REFERENCE in by_method and method in by_method:
                er, ours = by_method[REFERENCE], by_method[method]
                yield Check(str(place), f"{method} {ours:.2f}, er {er:.2f}", ours > er)


def _strict_beats_approximate(means: Means) -> Iterator[Check]:
    for place, by_method in means.items():
        if all(method in by_method for method in REGULARIZERS):
            strict, approximate = (fmean(by_method[method] for method in family) for family in (STRICT, APPROXIMATE))
            yield Check(str(place), f"strict {strict:.2f}, approximate {approximate:.2f}", strict > approximate)


def _rank(method: str, first: bool, benchmarks: tuple[str, ...], means: Means) -> Iterator[Check]:
    """Whether a regularizer is among the first, or else the last, `FEW` of all ten on these benchmarks."""
    for place, by_method in means.items():
        if place.benchmark in benchmarks and all(each in by_method for each in REGULARIZERS):
            order = sorted(REGULARIZERS, key=lambda each: -by_method[each])
            rank = order.index(method) + 1
            end, name = ("best", order[0]) if first else ("worst", order[-1])
            numbers = f"{method} {by_method[method]:.2f}, rank {rank} of 10, {end} {name} {by_method[name]:.2f}"
            yield Check(str(place), numbers, rank <= FEW if first else rank > len(order) - FEW)


def _gain_grows(field: str, unit: str, with_more: bool, means: Means) -> Iterator[Check]:
    """The mean relative gain over ER at the largest and at the smallest value of a place's `field`, all else equal.

    Whether it is greater at the largest value, if `with_more`; else whether it is greater at the smallest.
    """
    alike: dict[tuple[object, ...], list[Place]] = {}
    for place in means:
        if REFERENCE in means[place]:
            rest = tuple(value for name, value in place._asdict().items() if name != field)
            alike.setdefault(rest, []).append(place)
    for places in alike.values():
        ends = [choose(places, key=lambda place: getattr(place, field) or 0) for choose in (max, min)]
        first, second = ends if with_more else reversed(ends)
        common = [method for method in REGULARIZERS if method in means[first] and method in means[second]]
        if first != second and common:
            there, here = (
                fmean(relative_gain("accuracy", means[at][method], means[at][REFERENCE]) for method in common)
                for at in (first, second)
            )
            counts = [getattr(place, field) for place in (first, second)]
            numbers = f"gain {there:+.1f} % with {counts[0]} {unit}, {here:+.1f} % with {counts[1]}"
            yield Check(f"{first.benchmark}, {len(common)} regularizers", numbers, there > here)


def _er_is_worst(quantity: str, sign: int, means: Means) -> Iterator[Check]:
    """Whether er is worse than each other method; `sign` is 1 if more is worse, or -1 if less is.

    The strongest counterexample comes first.
    """
    for place, by_method in means.items():
        if REFERENCE not in by_method:
            continue
        er = by_method[REFERENCE]
        for method, mean in sorted(by_method.items(), key=lambda item: -sign * item[1]):
            if method != REFERENCE:
                yield Check(str(place), f"{quantity}: er {er:.2f}, {method} {mean:.2f}", sign * mean < sign * er)


CLAIMS: dict[str, tuple[str, str, Callable[[Means], Iterator[Check]]]] = {
    "consistency-beats-er": ("accuracy", "Every regularizer is better than ER alone.", _consistency_beats_er),
    "strict-beats-approximate": (
        "accuracy",
        f"Strict regularizers ({', '.join(STRICT)}) are on average better than approximate ones "
        f"({', '.join(APPROXIMATE)}).",
        _strict_beats_approximate,
    ),
    "linf-at-the-top": (
        "accuracy",
        f"linf is among the best {FEW} of ten regularizers in Class-IL.",
        partial(_rank, "linf", True, CLASS_IL),
    ),
    "kl-is-weak": (
        "accuracy",
        f"kl is among the worst {FEW} of ten regularizers where there are many classes.",
        partial(_rank, "kl", False, CLASS_IL[1:]),
    ),
    "gain-grows-with-fewer-samples": (
        "accuracy",
        "The relative gain over ER is larger with the smallest buffer than with the largest.",
        partial(_gain_grows, "buffer_size", "samples", False),
    ),
    "gain-grows-with-more-tasks": (
        "accuracy",
        "The relative gain over ER is larger with the most tasks than with the fewest.",
        partial(_gain_grows, "tasks", "tasks", True),
    ),
    "er-is-miscalibrated": ("ece", "er is the most miscalibrated", partial(_er_is_worst, "ECE", 1)),
    "er-favours-the-last-task": (
        "recency_gap",
        "er is the most biased towards the last task",
        partial(_er_is_worst, "recency gap", 1),
    ),
    "er-is-fragile": ("mra", "er is the least robust", partial(_er_is_worst, "mRA", -1)),
}
"""Name -> the measure it is about, the statement, and the rule that makes its checks."""


def check_claims(ours: Mapping[str, Means], theirs: Mapping[str, Means] | None = None) -> list[Claim]:
    """Every claim, checked on our means and on the published ones, both by measure."""
    return [
        Claim(name, statement, tuple(rule(ours.get(metric, {}))), tuple(rule((theirs or {}).get(metric, {}))))
        for name, (metric, statement, rule) in CLAIMS.items()
    ]
