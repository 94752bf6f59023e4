"""One process's work on a study: it carries out trials, stops those that fall behind, and notes how they end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from holdfast import results
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, UsageError
from holdfast.sweep.grid import carry_out_all, local_runner
from holdfast.sweep.leases import Leases
from holdfast.sweep.runner import Event, Job, Runner
from holdfast.tuning.database import Database, readable_errors
from holdfast.tuning.ranges import Range, with_values
from holdfast.tuning.study import Study, Trial

__all__ = ["Watch", "tune"]

FIRST_VERDICT = 1
"""Tasks learned before a run may be stopped early: the first task says nothing about forgetting."""
ENOUGH = 5
"""Complete trials before any other may be stopped early."""
HOPELESS = 3
"""Failures without a single success after which a study gives up."""

Watch = Callable[[Trial, float], None]
"""Called with a trial and the share of its training that is done, 0 to 1, when it moves or ends."""


def tune(
    config: RunConfig,
    space: Sequence[Range],
    out: Path,
    *,
    trials: int = 30,
    runner: Runner | None = None,
    jobs: int | None = None,
    device: str = "auto",
    data: Path | None = None,
    plugins: Sequence[str] = (),
    watch: Watch | None = None,
) -> Study:
    """Carry out runs until the study has so many `trials`; returns the study.

    The first trial has the config's own values. From the second task on, a run is stopped if its accuracy is below the
    median of the finished ones after that task: its state is `pruned`. On Ctrl-C and SIGTERM each run saves its state;
    the same call continues the study. Runs share a GPU as a fleet, or have a process each on a CPU (`local_runner`).
    """
    if not config.validation:
        raise UsageError("tuning needs a validation split, for instance validation=0.1: test sets must not choose.")
    results.check_writable(out)
    with readable_errors(out):
        database = Database(config, space, out)
        session = _Session(config, database, out, trials, watch or (lambda trial, fraction: None))
        job = Job(out, data, device, tuple(plugins), Path.cwd())
        try:
            finished = carry_out_all(runner or local_runner(device, jobs), session.configs(), job, session.emit)
        finally:
            session.close()
        if session.hopeless:
            raise HoldfastError(f"the study gave up after {HOPELESS} failures. The last: {session.failures[-1]}")
        study = Study(
            database.name, config, tuple(space), database.trials(), database.importance(), interrupted=not finished
        )
        if study.best is None:
            return study
        return replace(study, best_result=results.find(out, with_values(config, study.best.values)))


class _Session:
    """Hands out the runs of a study, and notes in its database how they get on."""

    def __init__(self, config: RunConfig, database: Database, out: Path, wanted: int, watch: Watch) -> None:
        self._config, self._database, self._out = config, database, out
        self._wanted, self._watch = wanted, watch
        self._leases = Leases(out)
        self._running: dict[RunConfig, list[tuple[Any, Trial]]] = {}
        """The trials of each run: the database's own, and what was last read of it.

        There are several where the same values were drawn again before the run ended.
        """
        self.failures: list[str] = []
        self._succeeded = False

    @property
    def hopeless(self) -> bool:
        """Whether every trial failed so far."""
        return len(self.failures) >= HOPELESS and not self._succeeded

    def configs(self) -> Iterator[RunConfig]:
        """First the runs that a stopped or killed process left, then new ones until there are enough."""
        for trial in self._database.unfinished():
            if config := self._take(trial):
                yield config
        while len(self._database.trials()) < self._wanted and not self.hopeless:
            if config := self._take(self._database.new_trial()):
                yield config

    def _take(self, trial: Any) -> RunConfig | None:
        """The run of a trial; None if it is under way already, here or elsewhere, or if its result is there."""
        config = with_values(self._config, self._database.draw(trial))
        if config in self._running:
            self._running[config].append((trial, self._database.read(trial)))  # ends as the run does
            return None
        if not self._leases.acquire(config):
            return None
        self._running[config] = [(trial, self._database.read(trial))]
        if results.find(self._out, config) is None:
            return config
        self._end(Event("done", config, 1.0))  # its process was killed before it could tell the study
        return None

    def emit(self, event: Event | None) -> bool | None:
        """Take the news of runs; True asks for one to be stopped."""
        self._leases.renew()
        if event is None:
            return None
        if event.kind not in ("started", "moved"):
            self._end(event)
            return None
        behind = event.row is not None and self._is_behind(event.config, event.row, event.fraction)
        for _, read in self._running[event.config]:
            self._watch(read, event.fraction)
        return behind

    def _is_behind(self, config: RunConfig, row: Sequence[float], fraction: float) -> bool:
        """Store the accuracies after a task; whether their mean is under the median of the complete trials then.

        Optuna's own median rule compares the best accuracy so far, which is nearly always the one after the first task.
        """
        self._report(config, [row])
        task = len(row) - 1
        others = self._database.accuracies_after(task)
        return task >= FIRST_VERDICT and fraction < 1 and len(others) >= ENOUGH and fmean(row) < median(others)

    def _report(self, config: RunConfig, rows: Sequence[Sequence[float]]) -> None:
        for number, (trial, _) in enumerate(self._running[config]):
            self._database.report(trial, rows)
            self._running[config][number] = trial, self._database.read(trial)

    def _end(self, event: Event) -> None:
        """Note how a run ended."""
        trials = [trial for trial, _ in self._running[event.config]]
        if event.kind == "done":
            self._complete(event.config, trials)
        elif event.kind == "abandoned" or event.diverged:  # values to avoid, not a failure of the study
            for trial in trials:
                self._database.prune(trial)
        else:
            self.failures.append(event.error)
            for trial in trials:
                self._database.fail(trial, event.error)
        del self._running[event.config]
        for trial in trials:
            self._watch(self._database.read(trial), 1.0)
        self._leases.release(event.config)

    def _complete(self, config: RunConfig, trials: Sequence[Any]) -> None:
        """Store what a finished run gave, and remove its large files, which no part of tuning reads."""
        found = results.find(self._out, config)
        assert found is not None, "runners report a run as done after its result is saved"
        *earlier, last = found.matrix.tolist()  # a row for each task learned; the last one has all tasks
        self._report(config, [*(row[: task + 1] for task, row in enumerate(earlier)), last])
        for trial in trials:
            self._database.complete(trial, found.accuracy)
        self._succeeded = True
        for name in (results.LOGITS, results.WEIGHTS):
            (self._out / config.fingerprint / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Give back the runs that were not finished."""
        for config in self._leases.mine():
            self._leases.release(config)
