"""benchmarks/work_off.py: the queue is what was asked for; it is worked off in order, stops in time and continues."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.experiments import load_results
from holdfast.learners import settings_for
from holdfast.results import find
from holdfast.sweep import Event
from holdfast.training import run

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import work_off
finally:
    sys.path.pop(0)

SMALL = """
[[runs]]
what = "first"
experiment = "table1"
only = ["benchmark=rot-mnist", "buffer_size=200", "method=er", "method=mse"]
set = ["tasks=2", "train_limit={limit}"]
seeds = 2

[[runs]]
what = "second"
experiment = "table1"
only = ["benchmark=rot-mnist", "method=sgd"]
set = ["tasks=2", "train_limit=200"]
"""


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    """The script counts from its own start; here it was imported long before."""
    monkeypatch.setattr(work_off, "BEGAN", time.monotonic())


@pytest.fixture
def queue(tmp_path):
    path = tmp_path / "queue.toml"
    path.write_text(SMALL.format(limit=200))
    return path


TABLE1 = "S-CIFAR-10, Table 1: all methods at 500 and 200"


def test_the_committed_queue_has_the_tables_in_the_order_asked_for():
    entries = {entry.what: entry.configs for entry in work_off.read_queue(ROOT / "benchmarks" / "queue.toml")}
    sizes = {
        TABLE1: 66,
        "S-CIFAR-100, Table 1: all methods at 500 and 200": 22,
        "long sequences: 10 and 20 tasks": 22,
        "alpha": 4,
        "low buffer": 44,
        "S-TinyImageNet at 500, a tenth of the epochs": 11,
        "S-TinyImageNet at 500, full length: er, linf, mse": 3,
    }
    assert [(what, len(configs)) for what, configs in entries.items() if what in sizes] == list(sizes.items())
    first, tenth = entries[TABLE1], entries["S-TinyImageNet at 500, a tenth of the epochs"]
    assert {config.benchmark for config in first} == {"seq-cifar10"}
    assert [config.seed for config in first] == sorted(config.seed for config in first), "every cell gets a seed first"
    assert {(config.epochs, config.buffer_size) for config in tenth} == {(10, 500)}
    assert not any(config in entries["S-TinyImageNet at 500, full length: er, linf, mse"] for config in tenth)


def test_what_is_there_is_passed_over(capsys):
    assert work_off.main(["--list"]) == 0
    said = capsys.readouterr().out
    there = len(load_results(ROOT / "results" / "seq-cifar10"))
    (line,) = (line for line in said.splitlines() if TABLE1 in line)
    assert 42 <= int(line.rpartition(": ")[2].split()[0]) <= there
    assert len(said.splitlines()) == len(work_off.read_queue(ROOT / "benchmarks" / "queue.toml"))


def test_runs_are_carried_out_in_order_and_written_small(tmp_path, queue, capsys):
    places = ["--results", str(tmp_path / "none"), "--out", str(tmp_path / "runs"), "--small", str(tmp_path / "small")]
    assert work_off.main(["--queue", str(queue), *places, "--device", "cpu", "--fleet", "2"]) == 0
    said = capsys.readouterr().out
    assert "5 runs done, 0 failed, 0 left" in said
    started = [line.partition("started ")[2] for line in said.splitlines() if "started" in line]
    assert [title.split(",")[0].removeprefix("rot-mnist ") for title in started] == ["er", "mse", "er", "mse", "sgd"]
    names = sorted(str(path.relative_to(tmp_path / "small")) for path in (tmp_path / "small").rglob("*.json"))
    assert names[0] == "rot-mnist/er-200-seed0-tasks2-train_limit200.json"
    assert names[-1] == "rot-mnist/sgd-seed0-tasks2-train_limit200.json"
    small, whole = load_results(tmp_path / "small"), load_results(tmp_path / "runs")
    assert len(small) == len(whole) == 5
    assert small.skipped == whole.skipped == []
    assert work_off.main(["--queue", str(queue), *places]) == 0
    assert "done" not in capsys.readouterr().out, "nothing is left"


def test_a_file_s_name_says_what_differs_from_the_preset():
    config = RunConfig.preset("seq-cifar10", "ballast", buffer_size=200, seed=1)
    assert work_off.small_name(config) == "seq-cifar10/ballast-200-seed1.json"
    other = config.change(weight_decay=0.0).parse(["turn=0", "strength=2"], settings_for(config))
    assert work_off.small_name(other) == "seq-cifar10/ballast-200-seed1-weight_decay0.0-strength2.0-turn0.0.json"
    back = config.parse(["strength=1"], settings_for(config))  # the method's default, but not the preset's
    assert work_off.small_name(back) == "seq-cifar10/ballast-200-seed1-strength1.0.json"


def test_it_stops_in_time_and_the_next_call_continues(tmp_path, capsys):
    """The runs go on where they were, and give what they would have given without a stop."""
    queue, out = tmp_path / "queue.toml", tmp_path / "runs"
    queue.write_text(SMALL.format(limit=20000).replace("seeds = 2", "seeds = 1"))
    configs = work_off.read_queue(queue)[0].configs
    began = time.monotonic()
    first = work_off.work_off(configs, out, seconds=20.4, reserve=20, fleet=2, device="cpu")
    assert time.monotonic() - began < 20
    assert (first.out_of_time, first.interrupted, first.done, first.left) == (True, False, [], 2)
    assert len(list((out / ".checkpoints").glob("*.safetensors"))) == 2
    second = work_off.work_off(configs, out, seconds=500, fleet=2, device="cpu")
    assert sorted(second.done, key=str) == sorted(configs, key=str)
    alone = run(configs[1], device="cpu")
    assert find(out, configs[1]).matrix.nan_to_num().equal(alone.matrix.nan_to_num())
    assert not list((out / ".checkpoints").glob("*.safetensors"))


def test_a_failed_run_is_said_and_the_others_go_on(tmp_path, queue, capsys):
    queue.write_text(SMALL.format(limit=200).replace('"tasks=2", "train_limit=200"', '"tasks=2", "lr=1e30"', 1))
    places = ["--results", str(tmp_path / "none"), "--out", str(tmp_path / "runs")]
    assert work_off.main(["--queue", str(queue), *places, "--device", "cpu", "--fleet", "2"]) == 1
    assert "1 runs done, 4 failed, 0 left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [("[[runs", "is no queue of runs"), ("a = 1", "is no queue of runs"), ("[[runs]]\nwat = 1", "'wat' is not known")],
)
def test_a_queue_that_makes_no_sense_is_refused(tmp_path, text, message):
    path = tmp_path / "queue.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        work_off.read_queue(path)


def test_it_needs_no_extras(tmp_path, queue):
    """As on a machine with torch and the command line's packages only."""
    missing = ("ray", "pooch", "optuna", "scipy", "sklearn", "tensorboard", "onnx")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); sys.argv[1:] = {['--queue', str(queue)]!r}; "
    places = ["--out", str(tmp_path / "o"), "--results", str(tmp_path)]
    code += f"sys.argv += {[*places, '--device', 'cpu', '--fleet', '1']!r}; "  # all in the process without the extras
    code += f"import runpy; runpy.run_path({str(ROOT / 'benchmarks' / 'work_off.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "5 runs done" in done.stdout
    assert json.loads(next((tmp_path / "o").rglob("result.json")).read_text())["accuracy"] > 10


def test_now_and_then_it_says_how_far_the_runs_are(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(work_off.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(work_off, "BEGAN", 0.0)
    first, second = (RunConfig.preset("seq-mnist", "er", buffer_size=200, seed=seed) for seed in (0, 1))
    tell = work_off.Teller(often=60.0)

    def at(seconds, kind, config, fraction=0.0):
        clock[0] = seconds
        tell(Event(kind, config, fraction))
        return capsys.readouterr().out.split("  ")[-1].strip()

    assert at(1, "started", first) == f"started {first.title}"
    assert at(2, "started", second) == f"started {second.title}"
    assert at(30, "moved", first, 0.25) == ""
    assert at(70, "moved", second, 0.5) == f"{first.title} 25%, {second.title} 50%"
    assert at(80, "moved", second, 0.6) == ""
    assert at(90, "done", first) == f"done {first.title}"
    assert at(140, "moved", second, 0.9) == f"{second.title} 90%"
