"""A claim of the paper: a list of comparisons, each of which holds or does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Check", "Claim"]


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
    def published_held(self) -> int:
        """Checks that hold on the published numbers."""
        return sum(check.holds for check in self.published)

    @property
    def holds(self) -> bool:
        """Whether there are checks and all of them hold on our numbers."""
        return 0 < len(self.checks) == self.held

    @property
    def exceptions(self) -> tuple[Check, ...]:
        """The checks that do not hold on our numbers."""
        return tuple(check for check in self.checks if not check.holds)

    @property
    def outcome(self) -> str:
        """How often it holds on our numbers: `holds in 45 of 56`."""
        return _outcome(self.held, len(self.checks))

    @property
    def published_outcome(self) -> str:
        """How often it holds on the published numbers of the same cells."""
        return _outcome(self.published_held, len(self.published))

    @property
    def detail(self) -> str:
        """The numbers of the exceptions; if there are none, those of the first check."""
        return "; ".join(check.numbers for check in self.exceptions or self.checks[:1])


def _outcome(held: int, checks: int) -> str:
    return f"holds in {held} of {checks}" if checks else "not enough data"
