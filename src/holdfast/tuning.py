"""Hyper-parameters of a method -> a study: many runs on a validation split, each with other values.

    study = tune(config, search_space(config), Path("tuning"))

Optuna (the extra `tune`) chooses the values. The folder holds its record of all studies, `study.db`, and the numbers of
each finished run in a folder of its fingerprint. A study that was stopped, or killed, is continued by the same call:
runs in flight go on from their checkpoints. Several processes may work on one study.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import sha256
from math import isfinite, log
from pathlib import Path
from statistics import fmean, median
from traceback import walk_tb
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from holdfast import results
from holdfast.benchmarks import Benchmark
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, UsageError, needing
from holdfast.learners import Parts, make_learner, make_optimizer, settings_for
from holdfast.methods import LEARNERS
from holdfast.registry import unknown_name
from holdfast.rng import generator
from holdfast.sweep.grid import carry_out_all, local_runner
from holdfast.sweep.leases import Leases
from holdfast.sweep.runner import Event, Job, Runner
from holdfast.training import build_model
from holdfast.workload import SHAPES

__all__ = ["Range", "Study", "Trial", "preset_text", "search_space", "tune", "with_values"]

STUDIES = "study.db"
DIGITS = 3
"""Significant digits of a value. Values are rounded before they are tried: a preset holds exactly those that ran."""
SPAN = 10.0
"""A range reaches from the preset divided by this to the preset times this, unless told otherwise."""
FIRST_VERDICT = 1
"""Tasks learned before a run may be stopped early: the first task says nothing about forgetting."""
ENOUGH = 5
"""Finished trials before any may be stopped early."""
HOPELESS = 3
"""Failures without a single success after which a study gives up."""
State = Literal["running", "complete", "pruned", "failed"]
STATES: dict[str, State] = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
"""Optuna's names of states, and ours; all others are "running"."""


class Range(NamedTuple):
    """Values to try: of lr, alpha, beta, another number of a config, or a setting of the method."""

    name: str
    low: float
    high: float

    @property
    def logarithmic(self) -> bool:
        """Whether values are drawn evenly on a logarithmic scale: where the ends are a factor of ten apart."""
        return self.low > 0 and self.high >= SPAN * self.low

    def place(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1, on the scale that values are drawn on."""
        low, high, own = (log(x) if self.logarithmic else x for x in (self.low, self.high, value))
        return (own - low) / (high - low)

    def cramps(self, value: float) -> bool:
        """Whether a value lies so near an end that better ones may lie beyond it. Below an end of 0 there are none."""
        place = self.place(value)
        return place >= 0.9 or (place <= 0.1 and self.low != 0)


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
    best_result: results.RunResult | None = None

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
        own = {name: value and _rounded(value) for name, value in _values(self.config, self.space).items()}
        return next((trial for trial in self.complete if trial.values == own), None)

    @property
    def cramped(self) -> list[str]:
        """The numbers whose best value lies near an end of its range: a wider range may have a better one."""
        best = self.best
        return [each.name for each in self.space if best and each.cramps(best.values[each.name])]

    def count(self, state: str) -> int:
        """Trials of a state."""
        return sum(trial.state == state for trial in self.trials)


Watch = Callable[[Trial, float], None]
"""Called with a trial and the share of its training that is done, 0 to 1, when it moves or ends."""


def search_space(config: RunConfig, over: Iterable[str] = (), fixed: Iterable[str] = ()) -> tuple[Range, ...]:
    """What to try: lr, and alpha and beta where the method reads them, without those `fixed`.

    `over` has texts `name=low:high`, for these or for further numbers.
    """
    given = dict(map(_parse_range, over))
    learner = LEARNERS.get(config.method, LEARNERS["consistency"])
    usual = ["lr", *(name for name in ("alpha", "beta") if name in learner.arguments(config))]
    left_out = set(fixed)
    for name in left_out - set(usual):
        raise UsageError(f"{name} is not tuned anyway; tuned are {', '.join(usual)} and what --over names.")
    space = [given.get(name) or _around(config, name) for name in usual if name not in left_out]
    space += [each for name, each in given.items() if name not in usual]
    if not space:
        raise UsageError("nothing is left to tune: name something with --over name=low:high.")
    for each in space:
        for value in (each.low, each.high):
            # Raises if there is no such number, or if it cannot have the value, which is rounded before it is tried.
            _try_out(with_values(config, {each.name: _rounded(value)}))
    return tuple(space)


def _try_out(config: RunConfig) -> None:
    """Raise if the method refuses its settings: make its learner, around a network of the benchmark's shape."""
    if config.benchmark not in SHAPES:
        return  # one of a plugin, whose shape takes its data to know
    shape, classes = SHAPES[config.benchmark]
    model = build_model(config, Benchmark(classes, shape, ()))
    optimizer, schedule = make_optimizer(config, model, torch.device("cpu"))
    make_learner(config, Parts(model, optimizer, lambda x: x, generator(config.seed, "buffer"), scheduler=schedule))


def _parse_range(text: str) -> tuple[str, Range]:
    name, _, ends = text.partition("=")
    low, colon, high = ends.partition(":")
    try:
        found = Range(name.strip(), float(low), float(high))
    except ValueError:
        raise UsageError(f"'{text}' is not of the form name=low:high, for instance lr=0.01:1.") from None
    if not colon or not isfinite(found.low) or not isfinite(found.high) or found.low >= found.high:
        raise UsageError(f"'{text}': the low end must be smaller than the high one, and both must be finite.")
    return found.name, found


def _around(config: RunConfig, name: str) -> Range:
    value = getattr(config, name)
    if not value:
        raise UsageError(f"{name} is 0 in the preset; say what to try with --over {name}=low:high, or --fix {name}.")
    return Range(name, _rounded(value / SPAN), _rounded(value * SPAN))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def with_values(config: RunConfig, values: dict[str, float]) -> RunConfig:
    """The config with numbers put in by name, as `--set` names them."""
    own = settings_for(config)
    known = [field.name for field in fields(config) if field.type == "float" and field.name != "validation"]
    known += [name for name, default in own.items() if isinstance(default, float)]
    for name in values:
        if name not in known and not name.startswith("regularizer."):
            raise unknown_name("number to tune", name, known)
    return config.parse([f"{name}={value!r}" for name, value in values.items()], own)


def _values(config: RunConfig, space: Iterable[Range]) -> dict[str, float | None]:
    """The numbers that the config has now; None for one that is left to the method's default."""
    own = settings_for(config) | dict(config.settings) | {f"regularizer.{name}": x for name, x in config.options}
    return {each.name: own.get(each.name, getattr(config, each.name, None)) for each in space}


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
    with _database_errors(out):
        session = _Session(config, tuple(space), out, trials, watch)
        job = Job(out, data, device, tuple(plugins), Path.cwd())
        try:
            finished = carry_out_all(runner or local_runner(device, jobs), session.configs(), job, session.emit)
        finally:
            session.close()
        if session.hopeless:
            raise HoldfastError(f"the study gave up after {HOPELESS} failures. The last: {session.failures[-1]}")
        return session.summary(interrupted=not finished)


class _Session:
    """One process's work on a study."""

    def __init__(
        self, config: RunConfig, space: tuple[Range, ...], out: Path, trials: int, watch: Watch | None
    ) -> None:
        self.optuna = import_optuna()
        self._config, self._space, self._out, self._wanted = config, space, out, trials
        self._watch = watch or (lambda trial, fraction: None)
        self._leases = Leases(out)
        self._running: dict[RunConfig, tuple[Any, Trial]] = {}
        """Optuna's trials, and where they are."""
        self.failures: list[str] = []
        self._succeeded = False
        self.name = _study_name(config, space)
        address = f"sqlite:///{(out / STUDIES).absolute()}"
        patient = {"connect_args": {"timeout": 60}}  # seconds to wait while another process writes
        storage = self.optuna.storages.RDBStorage(address, engine_kwargs=patient)
        self._study = self.optuna.create_study(
            storage=storage, study_name=self.name, direction="maximize", load_if_exists=True
        )
        own = _values(config, space)
        inside = all((x := own[each.name]) is not None and each.low <= x <= each.high for each in space)
        if inside and not self._study.get_trials(deepcopy=False):
            self._study.enqueue_trial(own)

    @property
    def hopeless(self) -> bool:
        """Whether every trial failed so far."""
        return len(self.failures) >= HOPELESS and not self._succeeded

    def configs(self) -> Iterator[RunConfig | None]:
        """First the runs that a stopped or killed process left, then new ones until there are enough."""
        for frozen in self._trials("RUNNING"):
            # If the process was killed before it had drawn all values, the others are drawn now.
            config = self._take(self.optuna.trial.Trial(self._study, frozen._trial_id))
            if config is not None:
                yield config
        while len(self._trials("RUNNING", "COMPLETE", "PRUNED", "FAIL")) < self._wanted and not self.hopeless:
            config = self._take(self._study.ask())
            if config is not None:
                yield config

    def _trials(self, *states: str) -> list[Any]:
        wanted = tuple(self.optuna.trial.TrialState[state] for state in states)
        found: list[Any] = self._study.get_trials(deepcopy=False, states=wanted)
        return found

    def _take(self, trial: Any) -> RunConfig | None:
        """The run of a trial; None if another process carries it out, or if its result is there already."""
        config = with_values(self._config, {each.name: _rounded(self._draw(trial, each)) for each in self._space})
        if not self._leases.acquire(config):
            return None
        self._note(config, trial)
        if results.find(self._out, config) is not None:  # its process was killed before it could tell the study
            self._end(Event("done", config, 1.0))
            return None
        return config

    def _draw(self, trial: Any, each: Range) -> float:
        """A trial's value; the stored one if it was drawn before.

        Each value has a seed of its own. A trial whose process was killed between two draws then gets the values that
        it would have had.
        """
        seed = sha256(f"{self._config.seed} {trial.number} {each.name}".encode()).digest()[:4]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            # A constant liar counts runs that have not ended as bad: two at a time then try different values.
            self._study.sampler = self.optuna.samplers.TPESampler(seed=int.from_bytes(seed), constant_liar=True)
        value: float = trial.suggest_float(each.name, each.low, each.high, log=each.logarithmic)
        return value

    def emit(self, event: Event | None) -> bool | None:
        """Take the news of runs; True asks for one to be stopped."""
        self._leases.renew()
        if event is None:
            return None
        if event.kind not in ("started", "moved"):
            self._end(event)
            return None
        behind = event.row is not None and self._is_behind(event)
        self._watch(self._running[event.config][1], event.fraction)
        return behind

    def _note(self, config: RunConfig, trial: Any) -> None:
        """Read where a trial is."""
        self._running[config] = trial, self._read(self._study.get_trials(deepcopy=False)[trial.number])

    def _is_behind(self, event: Event) -> bool:
        """Report the accuracy after a task; whether it is under the median of the finished trials after that task.

        Optuna's own median rule compares the best accuracy so far, which is nearly always the one after the first task.
        """
        assert event.row is not None
        task, accuracy = len(event.row) - 1, fmean(event.row)
        self._report(event.config, [event.row])
        finished = [each.intermediate_values.get(task) for each in self._trials("COMPLETE")]
        others = [value for value in finished if value is not None]
        return task >= FIRST_VERDICT and event.fraction < 1 and len(others) >= ENOUGH and accuracy < median(others)

    def _report(self, config: RunConfig, rows: Iterable[Sequence[float]]) -> None:
        """Note the accuracies after tasks, those that are not noted yet."""
        trial, known = self._running[config]
        for row in rows:
            if len(row) > known.tasks:  # a run that continues from a checkpoint may learn a task again
                trial.report(fmean(row), len(row) - 1)
        self._note(config, trial)

    def _end(self, event: Event) -> None:
        """Note in the study how a run ended."""
        (trial, _), state = self._running[event.config], self.optuna.trial.TrialState
        if event.kind == "done":
            found = results.find(self._out, event.config)
            assert found is not None, "runners report a run as done after its result is saved"
            matrix = found.matrix.tolist()  # a row per task, that of the last one with all tasks
            self._report(event.config, [*(row[: task + 1] for task, row in enumerate(matrix[:-1])), matrix[-1]])
            self._study.tell(trial, found.accuracy)
            self._succeeded = True
            for name in (results.LOGITS, results.WEIGHTS):  # large files that no part of tuning reads
                (self._out / event.config.fingerprint / name).unlink(missing_ok=True)
        elif event.kind == "abandoned" or event.diverged:  # values to avoid, not a failure of the study
            self._study.tell(trial, state=state.PRUNED)
        else:
            trial.set_user_attr("error", event.error)
            self.failures.append(event.error)
            self._study.tell(trial, state=state.FAIL)
        self._note(event.config, trial)
        self._watch(self._running.pop(event.config)[1], 1.0)
        self._leases.release(event.config)

    def close(self) -> None:
        """Give back the runs that were not finished."""
        for config in self._leases.mine():
            self._leases.release(config)

    def _read(self, frozen: Any) -> Trial:
        """A trial of Optuna's as plain values."""
        steps = frozen.intermediate_values
        accuracy = frozen.value if frozen.value is not None else steps[max(steps)] if steps else None
        values = {each.name: _rounded(frozen.params[each.name]) for each in self._space if each.name in frozen.params}
        tasks = max(steps) + 1 if steps else 0
        state, error = STATES.get(frozen.state.name, "running"), frozen.user_attrs.get("error", "")
        return Trial(frozen.number, state, values, accuracy, tasks, error)

    def summary(self, interrupted: bool) -> Study:
        """The study as it is now."""
        found = tuple(map(self._read, self._trials("RUNNING", "COMPLETE", "PRUNED", "FAIL")))
        study = Study(self.name, self._config, self._space, found, self._importance(), interrupted)
        if study.best is None:
            return study
        return replace(study, best_result=results.find(self._out, with_values(self._config, study.best.values)))

    def _importance(self) -> dict[str, float]:
        complete = self._trials("COMPLETE")
        if len(complete) < ENOUGH or len({trial.value for trial in complete}) < 2:
            return {}
        evaluator = self.optuna.importance.FanovaImportanceEvaluator(seed=0)
        try:
            found = self.optuna.importance.get_param_importances(self._study, evaluator=evaluator)
        except (RuntimeError, ValueError):  # no variance to explain
            return {}
        return {name: float(share) for name, share in found.items()}


def _study_name(config: RunConfig, space: tuple[Range, ...]) -> str:
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
def _database_errors(out: Path) -> Iterator[None]:
    """Errors of the database, as a sentence."""
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
        raise HoldfastError(f"{out / STUDIES} cannot be used: {reason}. {remedy}") from error


def preset_text(study: Study, command: str) -> str:
    """The best values as a table of presets.toml, with where they come from. `command` is the command line."""
    best, config = study.best, study.config
    if best is None or best.accuracy is None:
        raise HoldfastError("no trial has finished yet, so there is nothing to write down.")
    made = study.best_result.environment if study.best_result else {}
    about = [
        command,
        f"{study.count('complete')} trials complete, {study.count('pruned')} stopped early, "
        f"{study.count('failed')} failed; trial {best.number} is the best.",
        f"Accuracy {best.accuracy:.2f} % on {100 * config.validation:g} % of the training samples, seed {config.seed}.",
    ]
    if study.preset is not None and study.preset.accuracy is not None:
        about += [f"With the preset's values: {study.preset.accuracy:.2f} %."]
    about += [
        "The best of many trials looks better than it is: compare with other seeds before you trust it.",
        f"holdfast {made.get('holdfast')}, commit {made.get('commit')}, torch {made.get('torch')}, "
        f"{made.get('device')}, {time.strftime('%Y-%m-%d')}.",
    ]
    options = [name for name in best.values if name.startswith("regularizer.")]
    pairs = " ".join(f"{name}={best.values[name]!r}" for name in options)
    about += [f"A preset cannot hold these; give them with --set: {pairs}."] if options else []
    values = ", ".join(f"{name} = {value!r}" for name, value in best.values.items() if name not in options)
    size = f"{config.buffer_size} = {{ {values} }}" if config.buffer_size is not None else values.replace(", ", "\n")
    head = f"[benchmarks.{config.benchmark}.tuned.{config.method}]"
    return "".join(f"# {line}\n" for line in about) + f"{head}\n{size}\n"
