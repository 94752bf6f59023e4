"""Tuning: a study finds good values, and loses nothing when it is stopped or killed."""

import json
import os
import signal
import sqlite3
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from forked import ended, forked, trains_in_a_fork
from holdfast import results
from holdfast.cli import app, main
from holdfast.config import RunConfig
from holdfast.errors import DivergenceError, HoldfastError, TrainingError, UsageError
from holdfast.experiments import load_results
from holdfast.learners import settings_for
from holdfast.report.draw.tuning import draw_study
from holdfast.sweep import Event, ProcessRunner
from holdfast.sweep.fleets import FleetRunner
from holdfast.sweep.runner import failure
from holdfast.tuning import Range, Study, Trial, preset_text, search_space, session, tune, with_values

BASE = RunConfig.preset("rot-mnist", "mse", buffer_size=20, tasks=3, train_limit=300).change(validation=0.1)


# --- without Optuna: what is tried, and what is written down ---


def test_by_default_what_the_method_reads_is_tuned_around_the_preset():
    assert search_space(BASE) == (Range("lr", 0.01, 1.0), Range("alpha", 0.05, 5.0), Range("beta", 0.1, 10.0))
    assert [each.name for each in search_space(RunConfig.preset("rot-mnist", "er"))] == ["lr", "alpha"]
    assert [each.name for each in search_space(RunConfig.preset("rot-mnist", "sgd"))] == ["lr"]


def test_ranges_are_replaced_added_and_left_out():
    space = search_space(BASE, ["beta=0.5:2", "weight_decay=0:0.1", "regularizer.temperature=1:2"][:2], ["alpha"])
    assert space == (Range("lr", 0.01, 1.0), Range("beta", 0.5, 2.0), Range("weight_decay", 0.0, 0.1))
    assert [each.logarithmic for each in space] == [True, False, False]
    clser = RunConfig.preset("rot-mnist", "clser")
    assert search_space(clser, ["consistency=0.1:2"])[-1] == Range("consistency", 0.1, 2.0)


@pytest.mark.parametrize(
    ("over", "fixed", "message"),
    [
        (["lr"], [], "not of the form name=low:high"),
        (["lr=1:x"], [], "not of the form name=low:high"),
        (["lr=2:1"], [], "low end must be smaller"),
        (["lr=1:inf"], [], "must be finite"),
        (["lr=-1:1"], [], "lr must be a finite number of at least 0"),
        (["momentum=0:2"], [], "momentum must be less than 1, for instance 0.9, not 2.0"),
        (["momentum=0:0.9999"], [], "momentum must be less than 1, for instance 0.9, not 1.0"),
        (["tasks=1:3"], [], "tasks cannot be tuned; what can are lr, alpha, beta"),
        (["validation=0.1:0.2"], [], "validation cannot be tuned"),
        (["lrr=0.1:0.2"], [], "unknown number to tune 'lrr'"),
        (["lrr=1:2"], [], "lr"),
        ([], ["gamma"], "gamma is not tuned anyway; tuned are lr, alpha, beta"),
        ([], ["lr", "alpha", "beta"], "nothing is left to tune"),
        (["lr=0.1:1", "lr=1:2"], [], "--over names lr twice"),
        (["lr=0.1:1"], ["lr"], "lr cannot be left as it is .* and be tuned"),
    ],
)
def test_what_cannot_be_tuned_is_said(over, fixed, message):
    with pytest.raises(UsageError, match=message):
        search_space(BASE, over, fixed)


@pytest.mark.parametrize(
    ("method", "over", "message"),
    [
        ("ballast", "decay=0.5:2", "decay must lie between 0 and 1, not at 2"),
        ("kl", "regularizer.temperature=-1:2", "temperature"),
        ("mse", "regularizer.temperature=1:2", "temperature"),
    ],
)
def test_a_range_that_the_method_refuses_is_refused_before_the_first_trial(method, over, message):
    """Every trial beyond it failed."""
    with pytest.raises(UsageError, match=message):
        search_space(RunConfig.preset("rot-mnist", method), [over])


def test_a_preset_of_zero_has_no_range_of_its_own():
    with pytest.raises(UsageError, match=r"beta is 0 in the preset; .*--over beta=low:high, or --fix beta"):
        search_space(BASE.change(beta=0.0))


def test_values_are_put_where_they_belong():
    config = with_values(RunConfig.preset("rot-mnist", "clser"), {"lr": 0.5, "consistency": 0.25})
    assert (config.lr, dict(config.settings)["consistency"]) == (0.5, 0.25)
    config = with_values(RunConfig.preset("rot-mnist", "kl"), {"regularizer.temperature": 2.0})
    assert dict(config.options) == {"temperature": 2.0}
    plain = RunConfig.preset("rot-mnist", "clser").change(settings=())
    assert with_values(plain, {"consistency": settings_for(plain)["consistency"]}) == plain, "it is in force already"


def made_up(**changes) -> Study:
    space = (Range("lr", 0.01, 1.0), Range("alpha", 0.05, 5.0), Range("beta", 0.0, 10.0))
    trials = [
        Trial(0, "complete", {"lr": 0.1, "alpha": 0.5, "beta": 1.0}, 80.0, 3),
        Trial(1, "complete", {"lr": 0.2, "alpha": 0.7, "beta": 2.0}, 85.5, 3),
        Trial(2, "pruned", {"lr": 0.02, "alpha": 0.5, "beta": 1.0}, 40.0, 2),
        Trial(3, "failed", {"lr": 0.02, "alpha": 0.5, "beta": 3.0}, None, 0),
    ]
    values = {"name": "rot-mnist-mse-20-abc", "config": BASE, "space": space, "trials": tuple(trials)}
    return Study(**{**values, "importance": {"lr": 0.7, "alpha": 0.2, "beta": 0.1}, **changes})


def test_the_best_and_the_preset():
    study = made_up()
    assert (study.best.number, study.preset.number, study.count("pruned")) == (1, 0, 1)
    assert made_up(trials=study.trials[2:]).best is None
    assert study.cramped == []
    assert made_up(space=(Range("lr", 0.19, 1.0), Range("alpha", 0.05, 0.75))).cramped == ["lr", "alpha"]
    at_zero, at_top = Range("beta", 0.0, 100.0), Range("beta", 0.0, 2.0)
    assert made_up(space=(at_zero,)).cramped == [], "there is nothing to try below 0"
    assert made_up(space=(at_top,)).cramped == ["beta"]


def test_the_preset_is_read_as_toml_and_says_where_it_comes_from():
    text = preset_text(made_up(), "holdfast tune rot-mnist mse")
    assert tomllib.loads(text)["benchmarks"]["rot-mnist"]["tuned"]["mse"] == {
        "20": {"lr": 0.2, "alpha": 0.7, "beta": 2.0}
    }
    for part in ("# holdfast tune rot-mnist mse\n", "2 trials complete, 1 stopped early, 1 failed; trial 1", "85.50 %"):
        assert part in text
    assert "With the preset's values: 80.00 %." in text
    with pytest.raises(HoldfastError, match="no trial has finished yet"):
        preset_text(made_up(trials=()), "")


def test_the_preset_of_a_method_without_buffer():
    config = RunConfig.preset("rot-mnist", "sgd").change(validation=0.1)
    study = made_up(config=config, trials=(Trial(0, "complete", {"lr": 0.2}, 50.0, 3),), space=(Range("lr", 0.1, 1),))
    assert tomllib.loads(preset_text(study, ""))["benchmarks"]["rot-mnist"]["tuned"]["sgd"] == {"lr": 0.2}


def test_the_figure_has_a_panel_for_each_value_and_one_for_what_mattered():
    study = made_up()
    titles = [panel.get_title(loc="left") or panel.get_title() for panel in draw_study(study).axes]
    assert titles == ["lr", "alpha", "beta", "what mattered"]
    assert len(draw_study(made_up(importance={})).axes) == 3
    assert len(draw_study(made_up(trials=(), importance={})).axes) == 3


def test_the_extra_is_named_where_optuna_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    done = CliRunner().invoke(app, ["tune", "rot-mnist", "mse"])
    assert isinstance(done.exception, UsageError)
    assert "pip install 'holdfast[tune]'" in str(done.exception)


# --- with it ---


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna")


class Pretend:
    """A runner that computes accuracies from a formula, best at lr 0.3, instead of training."""

    def __init__(self, stop_after=None):
        self.asked, self.stopped, self.stop_after = [], [], stop_after

    def __call__(self, configs, job, emit):
        for config in configs:
            if len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(config)
            emit(Event("started", config))
            final = 90 - 100 * abs(config.lr - 0.3)
            rows = [(99.0,), (99.0, final), (99.0, final, final - 1)]
            for number, row in enumerate(rows, start=1):
                if emit(Event("moved", config, number / 3, row=row)):
                    self.stopped.append((config, number))
                    emit(Event("abandoned", config))
                    break
            else:
                folder = job.out / config.fingerprint
                folder.mkdir()
                (folder / results.WEIGHTS).write_bytes(b"many numbers")
                emit(Event("done", config, 1.0))


@pytest.fixture
def pretended(optuna, monkeypatch):
    """Results by formula."""

    def find(out, config):
        environment = {"holdfast": "0", "commit": "c", "torch": "2", "device": "none"}
        accuracy = 90 - 100 * abs(config.lr - 0.3)
        if not (out / config.fingerprint).exists():
            return None
        return SimpleNamespace(accuracy=accuracy, environment=environment, matrix=torch.full((3, 3), accuracy))

    monkeypatch.setattr(results, "find", find)


SPACE = (Range("lr", 0.01, 1.0), Range("beta", 0.1, 10.0))


def test_a_study_begins_with_the_preset_finds_the_best_and_stops_the_bad(tmp_path, pretended):
    runner = Pretend()
    study = tune(BASE, SPACE, tmp_path, trials=20, runner=runner)
    assert len(study.trials) == len(runner.asked) == 20
    assert runner.asked[0] == BASE
    assert study.preset.number == 0
    assert study.best.accuracy > 85
    assert abs(study.best.values["lr"] - 0.3) < 0.05
    assert study.importance["lr"] > 0.5
    assert len(study.complete) + len(runner.stopped) == 20
    assert runner.stopped
    assert {task for _, task in runner.stopped} == {2}, "never after the first task, which says nothing of forgetting"
    assert not list(tmp_path.rglob(results.WEIGHTS))
    assert list((tmp_path / ".leases").iterdir()) == []


def test_what_is_tried_does_not_depend_on_stops(tmp_path, pretended):
    whole, first, second = Pretend(), Pretend(stop_after=7), Pretend()
    tune(BASE, SPACE, tmp_path / "whole", trials=14, runner=whole)
    part = tune(BASE, SPACE, tmp_path / "parts", trials=14, runner=first)
    assert part.interrupted
    assert part.count("running") == 1, "one was handed out when it was stopped"
    rest = tune(BASE, SPACE, tmp_path / "parts", trials=14, runner=second)
    assert not rest.interrupted
    assert first.asked + second.asked == whole.asked
    assert len(rest.trials) == 14


@pytest.mark.parametrize("draws", [4, 5], ids=["before a trial's first", "before its second"])
def test_what_is_tried_does_not_depend_on_a_stop_between_two_draws(tmp_path, optuna, pretended, monkeypatch, draws):
    whole, first, second = Pretend(), Pretend(), Pretend()
    tune(BASE, SPACE, tmp_path / "whole", trials=6, runner=whole)
    suggest, drawn = optuna.trial.Trial.suggest_float, []

    def stop(trial, name, *ends, **scale):
        drawn.append(name)
        if len(drawn) > draws:
            raise KeyboardInterrupt
        return suggest(trial, name, *ends, **scale)

    with monkeypatch.context() as patch:
        patch.setattr("optuna.trial.Trial.suggest_float", stop)
        assert tune(BASE, SPACE, tmp_path / "parts", trials=6, runner=first).interrupted
    tune(BASE, SPACE, tmp_path / "parts", trials=6, runner=second)
    assert len(first.asked) == draws // 2
    assert first.asked + second.asked == whole.asked


def test_a_finished_study_does_nothing_and_another_space_is_another_study(tmp_path, pretended):
    tune(BASE, SPACE, tmp_path, trials=3, runner=Pretend())
    again = Pretend()
    assert len(tune(BASE, SPACE, tmp_path, trials=3, runner=again).trials) == 3
    assert again.asked == []
    other = tune(BASE, SPACE[:1], tmp_path, trials=2, runner=again)
    assert [trial.tasks for trial in other.trials] == [3, 3]
    assert len(again.asked) == 1, "the run of the preset's values is there"


def test_a_result_that_was_saved_and_not_noted_is_not_computed_again(tmp_path, pretended):
    killed = Pretend(stop_after=2)
    tune(BASE, SPACE, tmp_path, trials=4, runner=killed)
    handed_out = []

    def find_out(configs, job, emit):
        handed_out.append(next(configs))
        raise KeyboardInterrupt

    tune(BASE, SPACE, tmp_path, trials=4, runner=find_out)
    (tmp_path / handed_out[0].fingerprint).mkdir()
    rest = Pretend()
    study = tune(BASE, SPACE, tmp_path, trials=4, runner=rest)
    assert len(rest.asked) == 1
    assert handed_out[0] not in rest.asked
    assert study.count("complete") == 4


@pytest.mark.parametrize("name", ["what? 100%41 #1;a=b&c", "spaced out", "ü"])
def test_a_folder_may_have_any_name(tmp_path, pretended, name):
    """A question mark ended the path, and the database of every such study was one file beside the folder."""
    (tmp_path / name).mkdir()
    tune(BASE, SPACE, tmp_path / name, trials=2, runner=Pretend())
    assert (tmp_path / name / "study.db").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert len(tune(BASE, SPACE, tmp_path / name, trials=3, runner=Pretend()).trials) == 3


class Several(Pretend):
    """Asks for all runs there are before the first one ends, as runners that carry out several at a time do."""

    def __call__(self, configs, job, emit):
        super().__call__(list(configs), job, emit)


def test_values_that_are_drawn_again_before_their_run_ended_end_with_it(tmp_path, pretended):
    """Their trials were "under way" for ever, and the study ended with fewer trials than it should have."""
    runner, heard = Several(), []
    narrow = (Range("lr", 0.1, 0.1004),)
    study = tune(BASE, narrow, tmp_path, trials=5, runner=runner, watch=lambda trial, _: heard.append(trial))
    assert runner.asked == [BASE]
    assert study.count("complete") == 5
    assert {trial.accuracy for trial in study.trials} == {70.0}
    assert {trial.number for trial in heard if trial.state == "complete"} == set(range(5))
    assert list((tmp_path / ".leases").iterdir()) == []


def test_values_that_are_drawn_again_fail_with_their_run(tmp_path, pretended):
    def runner(configs, job, emit):
        failing(HoldfastError("no data"))(list(configs), job, emit)

    study = tune(BASE, (Range("lr", 0.1, 0.1004),), tmp_path, trials=4, runner=runner)
    assert [trial.error for trial in study.trials] == ["no data"] * 4


def failing(error):
    """A runner of which every run fails."""

    def runner(configs, job, emit):
        for config in configs:
            emit(Event("started", config))
            emit(failure(config, error))

    return runner


def test_values_that_diverge_are_avoided_and_other_failures_end_a_study(tmp_path, pretended):
    """Whatever the words of the error are."""
    study = tune(BASE, SPACE, tmp_path / "a", trials=5, runner=failing(DivergenceError("too far out")))
    assert study.count("pruned") == 5
    with pytest.raises(HoldfastError, match=r"gave up after 3 failures. The last: no data that"):
        tune(BASE, SPACE, tmp_path / "b", trials=5, runner=failing(TrainingError("no data that is no longer finite")))


def test_test_sets_must_not_choose(tmp_path):
    with pytest.raises(UsageError, match="tuning needs a validation split"):
        tune(BASE.change(validation=0.0), SPACE, tmp_path)


def test_a_damaged_database_is_said(tmp_path, optuna):
    (tmp_path / "study.db").write_bytes(b"no database, but long enough to be looked at" * 10)
    with pytest.raises(HoldfastError, match=r"study.db cannot be used: .*move it away"):
        tune(BASE, SPACE, tmp_path, trials=1)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE trials SET state = 'COMPLEXE'",  # raises a LookupError
        "UPDATE trials SET datetime_start = '2026-11-16 18:41:19.=1'",  # a ValueError
        "UPDATE study_directions SET direction = 7",
    ],
)
def test_a_database_with_damaged_entries_is_said(tmp_path, optuna, damage):
    def nothing(configs, job, emit):
        emit(Event("started", next(configs)))

    tune(BASE, SPACE, tmp_path, trials=1, runner=nothing)
    with sqlite3.connect(tmp_path / "study.db") as database:
        database.execute(damage)
    with pytest.raises(HoldfastError, match=r"study.db cannot be used: .*move it away"):
        tune(BASE, SPACE, tmp_path, trials=1, runner=nothing)


@pytest.mark.parametrize("runner", [lambda: ProcessRunner(1), lambda: FleetRunner(2)], ids=["processes", "fleet"])
@pytest.mark.usefixtures("quick_workers")
def test_real_runs(tmp_path, optuna, monkeypatch, runner):
    """Trained for real. In a fleet, one is stopped for sure; in a process, a small run may end before it is told."""
    monkeypatch.setattr(session, "ENOUGH", 1)
    seen = []
    study = tune(BASE, (Range("lr", 1e-6, 1.0),), tmp_path, trials=6, runner=runner(), device="cpu",
                 watch=lambda trial, fraction: seen.append((trial, fraction)))  # fmt: skip
    assert len(study.trials) == 6
    assert study.count("pruned") >= isinstance(runner(), FleetRunner)
    for trial in study.complete:
        found = results.find(tmp_path, with_values(BASE, trial.values))
        assert trial.accuracy == pytest.approx(found.accuracy)
        assert trial.tasks == 3
    for trial in study.trials:
        assert trial.state == "complete" or trial.accuracy is None or trial.tasks < 3
    assert {trial.number for trial, fraction in seen if fraction == 1.0} == set(range(6))
    assert not list((tmp_path / ".checkpoints").glob("*"))
    assert load_results(tmp_path).skipped == []


SMALL = ("rot-mnist", "mse", "--tasks", "3", "--set", "train_limit=400", "--device", "cpu", "--jobs", "1")


def command(out, trials):
    return ["tune", *SMALL, "--trials", str(trials), "--out", str(out)]


def start(out, trials, said):
    """A process that carries out the command; what it says goes to the file `said`."""

    def carry_out():
        with said.open("w") as sys.stdout:
            sys.argv, sys.stderr = ["holdfast", *command(out, trials)], sys.stdout
            main()

    return forked(carry_out)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Four trials that nothing happened to."""
    pytest.importorskip("optuna")
    out = tmp_path_factory.mktemp("undisturbed")
    config = RunConfig.preset("rot-mnist", "mse", tasks=3, train_limit=400).change(validation=0.1)
    tune(config, search_space(config), out, trials=4, runner=FleetRunner(1), device="cpu")
    return {stored.config: stored.result.accuracy for stored in load_results(out)}


def trials_ended(out) -> int:
    """Trials that have ended, as the database says."""
    try:
        with sqlite3.connect(f"file:{out / 'study.db'}?mode=ro", uri=True) as database:
            return database.execute("select count(*) from trials where state in ('COMPLETE', 'PRUNED')").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


@trains_in_a_fork
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_study_that_is_ended_in_the_middle_is_continued_by_the_same_command(
    tmp_path, undisturbed, monkeypatch, number
):
    """What was tried, and what came of it, is what an undisturbed study has. Its runs need no further processes."""
    monkeypatch.setattr(session, "local_runner", lambda device, jobs: FleetRunner(1))
    said = tmp_path / "said.md"
    process = start(tmp_path, 4, said)
    deadline = time.monotonic() + 120
    while trials_ended(tmp_path) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process, number)
    (code,) = ended([process])
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL), said.read_text()
    if number == signal.SIGINT:
        assert "the same command continues" in said.read_text()
    assert 2 <= trials_ended(tmp_path) < 4
    done = CliRunner().invoke(app, command(tmp_path, 4))
    assert done.exit_code == 0, done.output
    assert {stored.config: stored.result.accuracy for stored in load_results(tmp_path)} == undisturbed
    assert trials_ended(tmp_path) == 4
    (preset,) = tmp_path.glob("*.toml")
    assert "[benchmarks.rot-mnist.tuned.mse]" in preset.read_text("utf-8")


def test_the_command(tmp_path, optuna, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["tune", *SMALL, "--trials", "2", "--fix", "alpha", "--over", "lr=0.05:0.2", "--json"]
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["complete"] == 2
    assert set(said["best"]["values"]) == {"lr", "beta"}
    names = {path.name.partition(".")[2] for path in Path("tuning").glob("rot-mnist-*")}
    assert names == {"svg", "png", "toml"}
    for arguments, message in (
        ([*SMALL, "--validation", "1"], "must be a share of less than 1"),
        ([*SMALL, "--set", "validation=0"], "needs a validation split"),
        ([*SMALL, "--validation", "0.1", "--set", "validation=0.2"], "say the same setting"),
        ([*SMALL, "--set", "validation=0.1", "--set", "validation=0.2"], "say the same setting"),
        ([*SMALL, "--over", "x=1:2"], "unknown number"),
        (["rot-mnist", "derpp", "--over", "x=1:2"], "unknown number"),  # another name of a method is no unknown method
        (["rot-mnist", "drpp"], "unknown method"),
        (["rot-mnits", "mse"], "unknown benchmark"),
    ):
        done = CliRunner().invoke(app, ["tune", *arguments])
        assert message in str(done.exception)


def test_a_failed_trial_says_why_and_a_study_without_any_other_fails(tmp_path, optuna, monkeypatch):
    monkeypatch.setattr(session, "local_runner", lambda device, jobs: failing(HoldfastError("no data [here]")))
    done = CliRunner().invoke(app, command(tmp_path, 2))
    assert "trial 1: failed; lr=" in done.stderr
    assert done.stderr.count(": no data [here]\n") == 2
    again = CliRunner().invoke(app, command(tmp_path, 2))  # does nothing, and ends as before
    for each in (done, again):
        assert isinstance(each.exception, HoldfastError)
        assert each.exception.exit_code == 1
        assert str(each.exception) == "no trial is complete. The last failure: no data [here]"


@pytest.mark.parametrize(
    ("given", "share"), [([], 0.1), (["--validation", "0.2"], 0.2), (["--set", "validation=0.3"], 0.3)]
)
def test_the_share_to_test_on_is_given_in_either_way(tmp_path, optuna, monkeypatch, given, share):
    asked = []
    monkeypatch.setattr(session, "local_runner", lambda device, jobs: lambda configs, *_: asked.append(next(configs)))
    CliRunner().invoke(app, [*command(tmp_path, 1), *given])
    assert [config.validation for config in asked] == [share]


def test_the_command_that_a_preset_cites_leaves_out_what_does_not_change_the_study(tmp_path, pretended, monkeypatch):
    monkeypatch.setattr(session, "local_runner", lambda device, jobs: Pretend())
    common = ["tune", "rot-mnist", "mse", "--tasks", "3", "--over", "lr=0.1:1", "--out", str(tmp_path)]
    for further in (["--trials", "1"], ["--trials=1", "--jobs", "2", "--json"]):
        monkeypatch.setattr(sys, "argv", ["holdfast", *common, *further])
        assert CliRunner().invoke(app, [*common, *further]).exit_code == 0
        (preset,) = tmp_path.glob("*.toml")
        assert preset.read_text("utf-8").startswith(f"# holdfast {' '.join(common)}\n")
