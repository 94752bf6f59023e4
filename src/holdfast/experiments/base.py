"""What an experiment is: a grid of cells, each a run over several seeds read by one measure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.experiments.published import Published
from holdfast.methods import canonical
from holdfast.registry import Registry, unknown_name

if TYPE_CHECKING:
    from holdfast.experiments.verdicts import Table

__all__ = ["EXPERIMENTS", "SEEDS", "Cell", "Experiment", "find_experiment", "register"]

SEEDS = (0, 1, 2)
"""The paper averages over three seeds."""

SELECTABLE = ("benchmark", "method", "buffer_size", "tasks", "alpha", "beta")
"""Settings of a run that `--only` can choose by; the cell's own `metric`, `row` and `column` come on top."""


@dataclass(frozen=True)
class Cell:
    """One number of a table: where it stands, which runs it is the mean of, and what was published for it."""

    group: str
    """Block of the table, for instance 'buffer 200'; ranks are compared within a group and column."""
    row: str
    column: str
    metric: str
    """Name of a measure in MEASURES."""
    config: RunConfig
    """The run; its seed is a placeholder."""
    published: Published | None = None

    def configs(self, seeds: Iterable[int]) -> list[RunConfig]:
        """The runs of this cell, one per seed."""
        return [self.config.change(seed=seed) for seed in seeds]

    def facts(self) -> dict[str, str]:
        """What `--only` compares with, as typed: settings of the run, and the place in the table."""
        settings = {key: _spelled(getattr(self.config, key)) for key in SELECTABLE}
        return {**settings, "metric": self.metric, "row": self.row, "column": self.column}


FIGURES = ("differences", "lines", "matrices", "gains", "reliability", "recency", "robustness")

Derived = Mapping[str, Mapping[str, float]]
"""Column -> row -> number: what an experiment computes from its means."""


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    name: str
    title: str
    source: str
    """Where the paper has it, for instance 'Table 2'."""
    shows: str
    """One sentence: what is to be seen in it."""
    cells: tuple[Cell, ...]
    figure: str = "differences"
    """How it is drawn, one of FIGURES: differences are ours minus published, lines take ordered columns or rows."""
    derive: Callable[[Table], Derived] | None = None
    """Numbers computed from the means, such as gains relative to ER; None where the cells say everything."""
    caveat: str = ""
    """What a reader must know before comparing ours with the published."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Names by the paper's numbers, such as figure4, each with the condition of `select` for that part of the cells."""

    def __post_init__(self) -> None:
        if self.figure not in FIGURES:
            raise unknown_name("figure", self.figure, list(FIGURES))

    def configs(self, seeds: Sequence[int] = SEEDS) -> list[RunConfig]:
        """Every run the experiment needs, each once (cells may share runs), seed by seed so that all cells fill."""
        wanted = (cell.config.change(seed=seed) for seed in seeds for cell in self.cells)
        return list(dict.fromkeys(wanted))

    def select(self, conditions: Sequence[str]) -> Experiment:
        """The experiment with only the cells that meet `key=value` conditions.

        A condition may hold several, separated by commas. The same key twice means either value; different keys must
        all hold. `buffer_size=none` selects methods without a buffer.
        """
        wanted = self._parse(conditions)
        chosen = tuple(
            cell for cell in self.cells if all(cell.facts()[key] in values for key, values in wanted.items())
        )
        if not chosen:
            text = ", ".join(f"{key}={value}" for key, values in wanted.items() for value in values)
            raise UsageError(f"no cell of {self.name} has {text} at once. {self._choices()}")
        return replace(self, cells=chosen)

    def choices(self) -> dict[str, list[str]]:
        """The values each key of `select` can take here, in the order of the cells."""
        facts = [cell.facts() for cell in self.cells]
        return {key: list(dict.fromkeys(fact[key] for fact in facts)) for key in (facts[0] if facts else {})}

    def _parse(self, conditions: Sequence[str]) -> dict[str, list[str]]:
        choices = self.choices()
        wanted: dict[str, list[str]] = {}
        for condition in ",".join(conditions).split(","):
            key, equals, value = (part.strip() for part in condition.partition("="))
            if not condition.strip():
                continue
            if not equals:
                raise UsageError(f"--only takes key=value, not '{condition.strip()}'. {self._choices()}")
            if key not in choices:
                raise unknown_name("key of --only", key, list(choices))
            if key in SELECTABLE:
                value = canonical(value) if key == "method" else _spelled(_number(value))
            if value not in choices[key]:
                raise UsageError(f"no cell of {self.name} has {key}={value}; there is {', '.join(choices[key])}.")
            wanted.setdefault(key, []).append(value)
        return wanted

    def _choices(self) -> str:
        varying = {key: values for key, values in self.choices().items() if key in SELECTABLE and len(values) > 1}
        return "There is " + "; ".join(f"{key} = {', '.join(values)}" for key, values in varying.items()) + "."


EXPERIMENTS: Registry[Experiment] = Registry("experiment")


def register(experiment: Experiment) -> Experiment:
    """File an experiment under its name."""
    if not experiment.cells:
        raise UsageError(f"the experiment {experiment.name} has no cells; it needs one at least.")
    return EXPERIMENTS.register(experiment.name, f"{experiment.title} ({experiment.source})")(experiment)


def find_experiment(name: str) -> Experiment:
    """An experiment by its name, or by the paper's number of its table or figure: `table2`, `figure-4`, `Figure 4`.

    `table1` is the main table, which the paper counts as Table 2. The paper's own Table 1 lists the regularizers and
    has no numbers to reproduce, so that the name is free.
    """
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    number = re.sub(r"[\W_]", "", name.lower())
    if number in EXPERIMENTS:
        return EXPERIMENTS[number]
    if number == "figure2":
        raise UsageError("the paper's Figure 2 is a drawing of the method; there is nothing to run.")
    for experiment in EXPERIMENTS.values():
        if number in experiment.numbers:
            return experiment.select([experiment.numbers[number]])
    known = [*EXPERIMENTS, *(each for experiment in EXPERIMENTS.values() for each in experiment.numbers)]
    raise unknown_name("experiment", name, known)


def _number(text: str) -> Any:
    """`0.50` and `0.5` are the same value; anything that is no number stays as it is."""
    try:
        return float(text)
    except ValueError:
        return None if text.lower() == "none" else text


def _spelled(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
