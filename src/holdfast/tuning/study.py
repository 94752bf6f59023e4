"""What a study has found: its trials, the best of them, and which values mattered."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from holdfast.config import RunConfig
from holdfast.results import RunResult
from holdfast.tuning.ranges import Range, current_values, rounded

__all__ = ["State", "Study", "Trial"]

State = Literal["running", "complete", "pruned", "failed"]
"""`pruned` trials were stopped early, or their values made the run diverge."""


class Trial(NamedTuple):
    """One run of a study."""

    number: int
    state: State
    values: dict[str, float]
    accuracy: float | None
    """Mean validation accuracy in percent over the tasks learned; None if none was learned."""
    tasks: int
    """Tasks learned: fewer than all where the run was stopped early."""
    error: str = ""
    """Why it failed."""


@dataclass(frozen=True)
class Study:
    """What is known so far."""

    name: str
    config: RunConfig
    """The run that values are put into."""
    space: tuple[Range, ...]
    trials: tuple[Trial, ...]
    importance: dict[str, float]
    """Share of the differences in accuracy that each value explains (fANOVA); empty after few trials."""
    interrupted: bool = False
    best_result: RunResult | None = None

    @cached_property
    def complete(self) -> list[Trial]:
        """The trials that learned all tasks."""
        return [trial for trial in self.trials if trial.state == "complete"]

    @property
    def best(self) -> Trial | None:
        """The trial of the highest accuracy; the earlier one of two."""
        return max(self.complete, key=lambda trial: trial.accuracy or 0.0, default=None)

    @property
    def preset(self) -> Trial | None:
        """The trial with the values that the config had before, if it is complete."""
        own = {name: value and rounded(value) for name, value in current_values(self.config, self.space).items()}
        return next((trial for trial in self.complete if trial.values == own), None)

    @property
    def cramped(self) -> list[str]:
        """The numbers whose best value lies near an end of its range: a wider range may have a better one."""
        best = self.best
        return [each.name for each in self.space if best and each.cramps(best.values[each.name])]

    def count(self, state: State) -> int:
        """Trials of a state."""
        return sum(trial.state == state for trial in self.trials)
