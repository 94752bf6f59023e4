"""`holdfast reproduce` as a user meets it: the table, what is missing, and every way to ask for the wrong thing."""

import json
import sys
import time
from dataclasses import replace

import pytest
import torch

from holdfast import results
from holdfast.cli import main
from holdfast.cli.screen import SweepScreen
from holdfast.config import RunConfig
from holdfast.display import errors, output
from holdfast.errors import DataError
from holdfast.experiments import EXPERIMENTS, Cell, Experiment, Published, Results, Stored, register
from holdfast.results import RunResult
from holdfast.sweep import Event, Rates
from test_sweep import HOPELESS, inline, tiny


def cells(config, *, low):
    return (
        Cell("buffer 20", "mse", "rot-mnist", "accuracy", config, Published(low, 1.0)),
        Cell("buffer 20", "er", "rot-mnist", "accuracy", config.change(method="er"), Published(low - 10, 1.0)),
        Cell("buffer 20", "l1", "rot-mnist", "accuracy", config.change(method="l1")),
    )


@pytest.fixture
def small():
    """An experiment of seconds."""
    experiment = register(Experiment("small", "Something small", "nowhere", "Little.", cells(tiny(), low=30.0)))
    yield experiment
    del EXPERIMENTS._entries["small"]


@pytest.fixture
def holdfast(monkeypatch, capfd, tmp_path, small):
    """Call the command in an empty folder, runs in this process; gives (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr("holdfast.sweep.engines.local_runner", lambda *_: inline)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["holdfast", "reproduce", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capfd.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return call


def made_up(config, accuracy=30.0):
    matrix = torch.full((2, 2), accuracy, dtype=torch.float64)
    return RunResult(config, matrix, matrix, matrix[0], 40.0, environment={"device_type": "cpu"})


def test_runs_what_is_missing_and_shows_the_table(holdfast, tmp_path, small):
    results.save(made_up(tiny()), tmp_path / "elsewhere")
    arguments = ("small", "--seeds", "2", "--only", "method=mse", "--results", "elsewhere", "--device", "cpu")
    code, out, err = holdfast(*arguments)
    assert code == 0
    assert "1 run done, 1 were there" in err
    assert "30.00 ± 1.00" in out
    found = results.find(tmp_path / "runs", tiny(seed=1))
    assert f"{(30.0 + found.accuracy) / 2:.2f} ± " in out
    code, out_again, err = holdfast(*arguments)
    assert code == 0
    assert "0 runs done, 2 were there" in err
    assert out_again == out


def test_results_of_further_seeds_are_told(holdfast, tmp_path, small):
    for seed in range(3):
        results.save(made_up(tiny(seed=seed)), tmp_path / "runs")
    arguments = ("small", "--only", "method=mse", "--device", "cpu", "--seeds")
    assert "further seeds are there: --seeds 3 shows them" in holdfast(*arguments, "2")[2]
    assert "further seeds" not in holdfast(*arguments, "3")[2]


def test_marks_order_and_claims(holdfast, tmp_path, small):
    for config, accuracy in ((tiny(), 30.5), (tiny(method="er"), 40.0), (tiny(method="l1"), 50.0)):
        for seed in range(3):
            results.save(made_up(config.change(seed=seed), accuracy), tmp_path / "runs")
    code, out, _ = holdfast("small", "--seeds", "3")
    assert code == 0
    assert "30.50 ± 0.00 (3) ✓" in out
    assert "40.00 ± 0.00 (3) ✗" in out
    assert "differs: buffer 20, er, rot-mnist: the difference lies between +18.77 and +21.23 (90 %), outside ±2" in out
    assert "Cells: 1 ✓ agree, 1 ✗ differ, 0 ? open, 0 without a run" in out
    assert "rot-mnist: 2 of 2 cells lie over the paper; mean difference +10.25" in out
    assert "claim consistency-beats-er: holds in 1 of 2 (published: holds in 1 of 1)" in out


def test_the_order_of_methods_is_compared(holdfast, tmp_path, small):
    published = {"mse": 30.0, "er": 20.0, "l1": 10.0}
    ranked = [replace(cell, published=Published(published[cell.row], 1.0)) for cell in small.cells]
    del EXPERIMENTS._entries["small"]
    register(replace(small, cells=tuple(ranked)))
    for cell, accuracy in zip(small.cells, (30.0, 40.0, 50.0), strict=True):
        results.save(made_up(cell.config, accuracy), tmp_path / "runs")
    _, out, _ = holdfast("small", "--seeds", "1")
    assert any(line.split() == ["tau", "-1.00", "(3)"] for line in out.splitlines())


def test_the_field_names_its_sources(holdfast, tmp_path):
    for cell in EXPERIMENTS["field"].select(["benchmark=rot-mnist,method=der,method=esmer,buffer_size=200"]).cells:
        for seed in range(3):
            results.save(made_up(cell.config.change(seed=seed), 90.0 + seed / 10), tmp_path / "runs")
    code, out, _ = holdfast(
        "field", "--only", "benchmark=rot-mnist,method=der,method=esmer", "--only", "buffer_size=200"
    )
    assert code == 0
    assert "90.10 ± 0.10 (3) ?" in out
    assert "90.04 ± 2.61" in out
    assert "Cells: 0 ✓ agree, 0 ✗ differ, 1 ? open, 0 without a run" in out
    told = " ".join(out.split())
    assert "Other papers ran other code, settings and numbers of seeds" in told
    assert "published: der on rot-mnist: Buzzega et al. 2020 (DER), Table 2, as reprinted by Ye et al. 2025" in told
    assert "claim" not in out


def test_a_single_run_decides_nothing(holdfast, tmp_path, small):
    results.save(made_up(tiny(), 31.0), tmp_path / "runs")
    code, out, _ = holdfast("small", "--seeds", "1", "--only", "method=mse")
    assert code == 0
    assert "31.00 (1) ?" in out
    assert "Cells: 0 ✓ agree, 0 ✗ differ, 1 ? open, 0 without a run" in out


def test_dry_run(holdfast, tmp_path, small):
    code, out, _ = holdfast("small", "--dry-run", "--seeds", "2", "--jobs", "2", "--device", "cpu")
    assert code == 0
    assert "about 2 s" in out, "a guess, as nothing was measured yet"
    assert not (tmp_path / "runs").exists()
    results.save(made_up(tiny()), tmp_path / "runs")
    code, out, _ = holdfast("small", "--dry-run", "--seeds", "2", "--jobs", "2", "--device", "cpu")
    line = out.splitlines()[-2]  # 5 runs of 40 s, two at a time
    assert [part.strip() for part in line.strip("│").split("│")] == ["all", "6", "1", "5", "2 min", "there"]
    for seed in (0, 1):
        for cell in small.cells:
            results.save(made_up(cell.config.change(seed=seed)), tmp_path / "runs")
    assert "nothing to do" in holdfast("small", "--dry-run", "--seeds", "2")[1]


@pytest.mark.parametrize("has", [True, False], ids=["has", "lacks"])
def test_a_processor_without_bfloat16_is_announced(holdfast, tmp_path, monkeypatch, has):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has)
    cell = ("table1", "--only", "benchmark=seq-cifar10,method=er,buffer_size=200", "--seeds", "1", "--dry-run")
    code, _, err = holdfast(*cell, "--device", "cpu")
    assert code == 0
    assert ("in which 1 run would compute" in err) is not has
    results.save(made_up(RunConfig.preset("seq-cifar10", "er", buffer_size=200)), tmp_path / "runs")
    assert "bfloat16" not in holdfast(*cell, "--device", "cpu")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smal"], "unknown experiment 'smal': did you mean 'small'?"),
        (["small", "--only", "method=kl"], "no cell of small has method=kl; there is mse, er, l1."),
        (["small", "--only", "kl"], "--only takes key=value, not 'kl'"),
        (["small", "--engine", "rya"], "unknown engine 'rya': did you mean 'ray'?"),
        (["small", "--address", "host:1"], "--address is for --engine ray"),
        (["small", "--out", "s3://bucket"], "--out can be an address only with --engine ray"),
        (["small", "--results", "nowhere"], "--results nowhere is not a folder"),
        (["small", "--seeds", "0"], "Invalid value for '--seeds'"),
    ],
)
def test_bad_usage(holdfast, arguments, message):
    code, out, err = holdfast(*arguments)
    assert code == 2
    assert message in err
    assert out == ""


def test_no_ray_names_the_extra(holdfast, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = holdfast("small", "--engine", "ray")
    assert code == 2
    assert "install the extra 'cluster'" in err


def test_failed_runs_are_told(holdfast, tmp_path, small):
    del EXPERIMENTS._entries["small"]
    register(Experiment("small", "Small", "nowhere", "Little.", (*small.cells[:1], *cells(HOPELESS, low=1.0)[1:2])))
    code, out, err = holdfast("small", "--seeds", "1", "--device", "cpu")
    assert code == 1
    assert "1 run done, 0 were there, 1 failed" in err
    assert "no longer finite" in err
    assert "1 without a run" in out  # and the rest is shown


def test_interruption(holdfast, tmp_path, small, monkeypatch):
    def interrupted(configs, job, emit):
        emit(Event("started", next(configs)))
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.sweep.engines.local_runner", lambda *_: interrupted)
    code, _, err = holdfast("small", "--seeds", "1")
    assert code == 130
    assert "0 runs done, 0 were there, 3 left; the same command continues" in err


def test_minutes(holdfast, tmp_path, small):
    code, out, err = holdfast("small", "--seeds", "1", "--device", "cpu", "--minutes", "0")
    assert code == 0, "it did as it was told"
    assert "0 runs done, 0 were there, 3 left; the same command continues" in err
    assert "3 without a run" in out
    code, _, err = holdfast("small", "--seeds", "1", "--device", "cpu", "--minutes", "60")
    assert (code, "3 runs done, 0 were there" in err) == (0, True)
    assert holdfast("small", "--minutes", "-1")[0] == 2


def test_foreign_files_are_named_and_stay(holdfast, tmp_path, small):
    for cell in small.cells:
        results.save(made_up(cell.config), tmp_path / "runs")
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    broken = tmp_path / "runs" / "0123456789abcdef" / "result.json"
    broken.parent.mkdir()
    broken.write_text('{"config": ')
    code, _, err = holdfast("small", "--seeds", "1")
    assert code == 0
    assert "skipped runs/notes.txt: not a result" in err
    assert "skipped runs/0123456789abcdef/result.json: damaged" in err
    assert broken.read_text() == '{"config": '


def test_results_of_another_protocol_are_not_mixed(holdfast, tmp_path, small):
    folder = results.save(made_up(tiny()), tmp_path / "runs")
    values = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**values, "protocol": 0}))
    code, out, err = holdfast("small", "--seeds", "1", "--only", "method=mse")
    assert code == 1  # it lies where the run belongs, and is not overwritten
    assert "of protocol 0" in err
    assert "move it away" in err
    assert "30.00 (1)" not in out


def test_robustness_is_measured_once(holdfast, tmp_path, small, monkeypatch):
    del EXPERIMENTS._entries["small"]
    cell = Cell("buffer 20", "mse", "mra", "mra", tiny())
    register(Experiment("small", "Small", "nowhere", "Little.", (cell,)))
    results.save(made_up(tiny()), tmp_path / "runs")
    calls = []

    def measure(stored, **_):
        calls.append(stored.config)
        stored.add_measures(
            dict.fromkeys(("robust_noise", "robust_blur", "robust_weather", "robust_digital", "mra"), 12.5)
        )

    monkeypatch.setattr("holdfast.experiments.measures.measure_robustness", measure)
    for _ in range(2):
        code, out, _ = holdfast("small", "--seeds", "1")
        assert code == 0
        assert "12.50" in out
    assert calls == [tiny()]


def test_screen_counts_and_tells_the_time_left(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    grid = [tiny(seed) for seed in range(4)]
    screen = SweepScreen("small", grid, tmp_path, Rates(Results(), "cpu"))
    assert screen.headline() == "0 done, 0 running, 0 failed, 4 waiting"
    screen.watch(Event("started", grid[0]))
    screen.watch(Event("done", grid[0], 1.0))
    screen.watch(Event("failed", grid[1], error="bad luck"))
    screen.watch(Event("moved", grid[2], 0.5))
    now[0] = 50.0  # two and a half of four in 50 s: 20 s each
    assert screen.time_left() == pytest.approx(30.0)
    assert screen.headline() == "1 done, 1 running, 1 failed, 1 waiting, about 30 s left"


def test_screen_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    results.save(made_up(tiny(), 42.0), tmp_path)
    screen = SweepScreen("small", [tiny(), tiny(1)], tmp_path, Rates(Results(), "cpu"))
    with screen:
        screen.watch(Event("done", tiny(), 1.0))
        screen.watch(Event("moved", tiny(1), 0.25))
        with errors.capture() as captured:
            errors.print(screen.get_renderable())
    text = captured.get()
    assert "1 done, 1 running" in text
    assert "42.00 %" in text
    assert "25%" in text


def test_figures_are_written_beside_the_results(holdfast, tmp_path, small):
    for cell in small.cells:
        results.save(made_up(cell.config), tmp_path / "runs")
    del EXPERIMENTS._entries["small"]
    register(replace(small, figure="lines"))
    code, _, err = holdfast("small", "--seeds", "1")
    assert code == 0
    folder = tmp_path / "runs" / "figures" / "small"
    assert {path.suffix for path in folder.iterdir()} == {".svg", ".png", ".csv"}
    (numbers,) = folder.glob("*.csv")
    assert numbers.read_text().splitlines()[1].startswith("small,buffer 20,mse,rot-mnist,accuracy,30,,1,30,1,0,")
    assert "something-small-buffer-20.png in runs/figures/small" in err
    assert "skipped" not in holdfast("small", "--seeds", "1")[2]  # figures are no results


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_figures_that_cannot_be_written_do_not_hide_the_table(holdfast, tmp_path, small, options):
    """With results in a folder that is read-only, there was an error and no table."""
    for cell in small.cells:
        results.save(made_up(cell.config), tmp_path / "runs")
    del EXPERIMENTS._entries["small"]
    register(replace(small, figure="lines"))
    (tmp_path / "runs" / "figures").write_text("a file in place of the folder")
    code, out, err = holdfast("small", "--seeds", "1", *options)
    assert code == 1
    assert "the figure could not be written to runs/figures/small" in err
    assert "30.0" in out


def test_dry_run_writes_nothing_and_draws_nothing(holdfast, tmp_path, small):
    results.save(made_up(tiny()), tmp_path / "runs")
    assert holdfast("small", "--dry-run")[0] == 0
    assert not (tmp_path / "runs" / "figures").exists()


def test_damaged_files_beside_results_are_named_after_the_table(holdfast, tmp_path, small):
    folder = results.save(made_up(tiny()), tmp_path / "runs")
    (folder / "measures.json").write_text("{")
    code, out, err = holdfast("small", "--seeds", "1", "--only", "method=mse")
    assert code == 0
    assert "30.00 (1)" in out
    assert "measures.json is not readable" in err


def test_json_is_one_object(holdfast, tmp_path, small):
    for config, accuracy in ((tiny(), 30.5), (tiny(method="er"), 40.0), (tiny(method="l1"), 39.0)):
        for seed in range(3):
            results.save(made_up(config.change(seed=seed), accuracy), tmp_path / "runs")
    code, out, _ = holdfast("small", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["experiment"] == "small"
    assert told["runs"] == {"done": 0, "there": 9, "failed": 0, "left": 0}
    mse, er, l1 = told["cells"]
    assert (mse["mean"], mse["n"], mse["seeds"], mse["status"]) == (30.5, 3, [0, 1, 2], "agrees")
    assert er["reason"] == "the difference lies between +18.77 and +21.23 (90 %), outside ±2"
    assert l1["published_mean"] is None
    (claim,) = told["claims"]
    assert (claim["name"], claim["held"], claim["checks"], claim["holds"]) == ("consistency-beats-er", 0, 2, False)
    assert claim["exceptions"][0]["numbers"] == "l1 39.00, er 40.00"
    code, out, _ = holdfast("small", "--seeds", "4", "--dry-run", "--json", "--jobs", "2", "--device", "cpu")
    assert code == 0
    plan = json.loads(out)["plan"]["all"]
    assert (plan["runs"], plan["there"], plan["to_run"], plan["missing_data"]) == (12, 9, 3, [])


def test_missing_data_is_found_once_before_anything_runs(holdfast, tmp_path, monkeypatch):
    def refuse(name, *_):
        asked.append(name)
        raise DataError(f"{name} could not be downloaded.")

    asked = []
    monkeypatch.setattr("holdfast.data.fetch", refuse)
    arguments = ("table1", "--data", str(tmp_path / "data"), "--only", "method=er,buffer_size=200", "--seeds", "2")
    code, out, _ = holdfast(*arguments, "--dry-run")
    assert code == 0
    assert "missing: cifar10 (for seq-cifar10)" in out + _
    assert "missing: mnist" not in out + _
    assert asked == []
    code, out, err = holdfast(*arguments)
    assert code == 1
    assert asked == ["cifar10", "cifar100", "tinyimagenet"]  # each once, for all seeds
    told = " ".join(err.split())
    assert "nothing was run, as data is missing for seq-cifar10, seq-cifar100, seq-tinyimagenet." in told
    assert "choose its benchmarks with --only benchmark=NAME" in told
    assert not (tmp_path / "runs").exists()


def test_a_narrow_terminal_gets_several_tables_and_no_broken_word(holdfast, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_width", 80)
    recency = EXPERIMENTS["recency"]
    for config in recency.configs(range(2)):
        found = made_up(config, 30.0 + config.seed)
        Stored(found, results.save(found, tmp_path / "runs") / "result.json").add_measures(
            {cell.metric: 0.1 for cell in recency.cells}
        )
    code, out, _ = holdfast("recency", "--seeds", "2", "--only", "method=er,method=mse")
    assert code == 0
    tables = out.split("Upper number")[0]
    assert tables.count("0.100 ± 0.000 (2)") == len(recency.select(["method=er,method=mse"]).cells)
    assert max(map(len, tables.splitlines())) <= 80
    _, out, _ = holdfast("table1", "--dry-run", "--data", str(tmp_path))
    assert "seq-tinyimagenet " in out
    assert max(map(len, out.splitlines())) <= 80


def test_robustness_wants_the_papers_benchmark_only(holdfast, tmp_path):
    code, out, err = holdfast("robustness", "--data", str(tmp_path / "data"), "--dry-run")
    assert code == 0
    assert "cifar10" in err + out
    assert "tinyimagenet" not in err + out


def test_claims_beyond_accuracy_are_checked(holdfast, tmp_path):
    for cell in EXPERIMENTS["calibration"].select(["benchmark=seq-cifar10"]).cells:
        stored = results.save(made_up(cell.config), tmp_path / "runs")
        worst = {"er": 40.0, "mi": 41.0}.get(cell.config.method, 20.0)
        (stored / "measures.json").write_text(json.dumps({"ece": worst}))
    code, out, _ = holdfast("figure4", "--seeds", "1")
    assert code == 0
    assert "claim er-is-miscalibrated: holds in 9 of 10" in out
    assert "except seq-cifar10, buffer 500: ECE: er 40.00, mi 41.00" in out
