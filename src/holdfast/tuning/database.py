"""A study in Optuna's database: Optuna draws the values of each trial, and the database holds what came of them.

A trial of Optuna's is an object of its own here, passed on as it is; `Database.read` makes a plain `Trial` of it.
"""

import sqlite3
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from traceback import walk_tb
from types import ModuleType
from typing import Any

from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, UsageError, needing
from holdfast.tuning.ranges import Range, current_values, rounded
from holdfast.tuning.study import State, Trial

__all__ = ["Database", "import_optuna", "readable_errors"]

FILE = "study.db"
PATIENCE = 60
"""Seconds to wait while another process writes."""
ENOUGH = 5
"""Complete trials before anything is said of which values matter."""
STATES: dict[str, State] = {"RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
"""Optuna's names of the states of trials that have begun, and ours."""


class Database:
    """The study of one run and one space. Its name is `name`; other studies may lie in the same file of the folder."""

    def __init__(self, config: RunConfig, space: Sequence[Range], folder: Path) -> None:
        self._optuna = import_optuna()
        self._seed, self._space = config.seed, space
        self.name = _study_name(config, space)
        # Not by an address: in one, a question mark in the folder's name would end the path.
        connect = partial(sqlite3.connect, (folder / FILE).absolute(), timeout=PATIENCE, check_same_thread=False)
        storage = self._optuna.storages.RDBStorage(f"sqlite:///{FILE}", engine_kwargs={"creator": connect})
        self._study = self._optuna.create_study(
            storage=storage, study_name=self.name, direction="maximize", load_if_exists=True
        )
        own = current_values(config, space)
        inside = all((x := own[each.name]) is not None and each.low <= x <= each.high for each in space)
        if inside and not self._study.get_trials(deepcopy=False):
            self._study.enqueue_trial(own)  # the first trial has the config's own values

    def new_trial(self) -> Any:
        """Begin one more trial."""
        return self._study.ask()

    def unfinished(self) -> list[Any]:
        """Trials that have begun and not ended: others carry them out, or a process was stopped or killed."""
        return [self._optuna.trial.Trial(self._study, found._trial_id) for found in self._found("RUNNING")]

    def draw(self, trial: Any) -> dict[str, float]:
        """A trial's values; the stored ones where they were drawn before."""
        return {each.name: rounded(self._draw(trial, each)) for each in self._space}

    def _draw(self, trial: Any, each: Range) -> float:
        # Each value has a seed of its own. A trial whose process was killed between two draws then gets the values
        # that it would have had.
        seed = sha256(f"{self._seed} {trial.number} {each.name}".encode()).digest()[:4]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            # A constant liar counts runs that have not ended as bad: two at a time then try different values.
            self._study.sampler = self._optuna.samplers.TPESampler(seed=int.from_bytes(seed), constant_liar=True)
        value: float = trial.suggest_float(each.name, each.low, each.high, log=each.logarithmic)
        return value

    def report(self, trial: Any, rows: Iterable[Sequence[float]]) -> None:
        """Store the mean accuracy after each task, from a row of accuracies for each; those stored before stay."""
        known = self.read(trial).tasks
        for row in rows:
            if len(row) > known:  # a run that continues from a checkpoint may learn a task again
                trial.report(fmean(row), len(row) - 1)

    def complete(self, trial: Any, accuracy: float) -> None:
        """End a trial that learned all tasks."""
        self._study.tell(trial, accuracy)

    def prune(self, trial: Any) -> None:
        """End a trial whose values are to be avoided."""
        self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, trial: Any, error: str) -> None:
        """End a trial that says nothing about its values."""
        trial.set_user_attr("error", error)
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def read(self, trial: Any) -> Trial:
        """What the database has of a trial."""
        return self._plain(self._study.get_trials(deepcopy=False)[trial.number])

    def trials(self) -> tuple[Trial, ...]:
        """All trials that have begun."""
        return tuple(map(self._plain, self._found(*STATES)))

    def accuracies_after(self, task: int) -> list[float]:
        """The mean accuracy of each complete trial after it had learned this task, counted from 0."""
        found = [each.intermediate_values.get(task) for each in self._found("COMPLETE")]
        return [accuracy for accuracy in found if accuracy is not None]

    def importance(self) -> dict[str, float]:
        """See `Study.importance`."""
        complete = self._found("COMPLETE")
        if len(complete) < ENOUGH or len({trial.value for trial in complete}) < 2:
            return {}
        evaluator = self._optuna.importance.FanovaImportanceEvaluator(seed=0)
        try:
            found = self._optuna.importance.get_param_importances(self._study, evaluator=evaluator)
        except (RuntimeError, ValueError):  # no variance to explain
            return {}
        return {name: float(share) for name, share in found.items()}

    def _found(self, *states: str) -> list[Any]:
        wanted = tuple(self._optuna.trial.TrialState[state] for state in states)
        found: list[Any] = self._study.get_trials(deepcopy=False, states=wanted)
        return found

    def _plain(self, found: Any) -> Trial:
        steps = found.intermediate_values
        accuracy = found.value if found.value is not None else steps[max(steps)] if steps else None
        values = {each.name: rounded(found.params[each.name]) for each in self._space if each.name in found.params}
        tasks, error = max(steps) + 1 if steps else 0, found.user_attrs.get("error", "")
        return Trial(found.number, STATES.get(found.state.name, "running"), values, accuracy, tasks, error)


def _study_name(config: RunConfig, space: Iterable[Range]) -> str:
    """A name that studies share if and only if they try the same ranges on the same run."""
    buffer = "" if config.buffer_size is None else f"-{config.buffer_size}"
    digest = sha256(f"{config.fingerprint} {[tuple(each) for each in space]}".encode()).hexdigest()[:8]
    return f"{config.benchmark}-{config.method}{buffer}-{digest}"


def import_optuna() -> ModuleType:
    """Optuna without its log messages; if it is not installed, a `UsageError` names the extra."""
    with needing("tune", "tuning needs Optuna", UsageError):
        import optuna
        import optuna.importance
        import optuna.storages
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    module: ModuleType = optuna
    return module


@contextmanager
def readable_errors(folder: Path) -> Iterator[None]:
    """Inside, an error of the database in the folder becomes a sentence with the name of its file."""
    try:
        yield
    except Exception as error:
        # A damaged database also makes these packages raise errors of Python itself.
        *_, (frame, _) = walk_tb(error.__traceback__)
        raised = {name.partition(".")[0] for name in (type(error).__module__, frame.f_globals["__name__"])}
        if raised.isdisjoint(("sqlalchemy", "optuna", "alembic")):
            raise
        reason = str(error).partition("\n")[0]
        remedy = "If it is damaged, move it away to start a new study."
        raise HoldfastError(f"{folder / FILE} cannot be used: {reason}. {remedy}") from error
