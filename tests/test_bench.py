import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast import bench
from holdfast.bench import DeviceRate, complete_run, made_up, steps_per_second
from holdfast.cli.bench import GPU_CASES, _bench_gpu, _beside, _show_rates
from holdfast.config import RunConfig
from holdfast.display import output
from holdfast.testing import check_benchmark
from holdfast.workload import SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_made_up_data_has_the_shapes_of_the_benchmark(name):
    config = RunConfig.preset(name, "mse", buffer_size=50, tasks=1)
    benchmark = made_up(config, samples=40)
    assert (benchmark.shape, benchmark.classes) == SHAPES[name]
    assert benchmark.tasks[0].train().images.shape == (40, *benchmark.shape)


def test_made_up_data_keeps_the_contract():
    check_benchmark(lambda config, root: made_up(config, samples=64), RunConfig.preset("rot-mnist", "sgd", tasks=2))


def test_a_complete_run_is_the_sum_of_its_parts(tmp_path):
    whole = complete_run(root=tmp_path, tasks=1)
    assert whole.steps == 469
    assert whole.seconds == pytest.approx(whole.training + whole.evaluation + whole.data + whole.setup, rel=0.05)
    assert whole.to_json()["ratio"] == whole.seconds / whole.floor_seconds > 1
    assert whole.peak_memory_mb > 100


def test_rates_are_positive():
    assert steps_per_second("seq-mnist", "er", steps=5) > 0


def test_what_was_measured_is_shown_when_it_is_stopped(monkeypatch, capsys):
    def rates(benchmark, method):
        yield DeviceRate(benchmark, method, 1, 500.0, 100.0, 500.0, 0.2, 50.0, 900.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "device_rates", rates)
    with pytest.raises(KeyboardInterrupt):
        _bench_gpu(["seq-cifar10"], as_json=True)
    (rate,) = json.loads(capsys.readouterr().out)["device_rates"]
    assert (rate["benchmark"], rate["method"], rate["steps_per_second"]) == ("seq-cifar10", "er", 500.0)


def test_the_whole_table_of_a_gpu_takes_less_than_three_minutes():
    """By the times that were measured on a machine without compiled code; ten seconds are for the rest."""
    measured = json.loads((Path(__file__).parents[1] / "docs" / "bench-h200.json").read_text("utf-8"))
    rows = measured["device_rates"]
    assert {(row["benchmark"], row["method"]) for row in rows} == set(GPU_CASES)
    probes = sum(20 * row["runs"] / row["steps_per_second"] for row in rows)
    assert sum(row["ready_seconds"] for row in rows) + probes + len(rows) * bench.SECONDS < 180 - 10
    assert measured["wall_seconds"] < 180


def test_two_runs_at_a_time_are_slower_faster_or_the_same():
    assert _beside(1000.0, 800.0) == "two runs at a time: 800 steps/s each, 20 % less than one alone (1,000)"
    assert "1,090 steps/s each, 9 % more than one alone" in _beside(1000.0, 1090.0)
    assert "as many as one alone" in _beside(1000.0, 1001.0)


def test_no_word_is_broken_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setattr(output, "_width", 80)
    _show_rates([DeviceRate("seq-tinyimagenet", "mse", 8, 12345.6, 400.4, 796.0, 0.503, 137.4, 12345.6)], as_json=False)
    shown = capsys.readouterr().out
    for word in ("benchmark", "seq-tinyimagenet", "steps/s", "TFLOP/s", "12,346", "50.3", "137.4"):
        assert word in shown
    assert "796 to 796 TFLOP/s" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure the GPU")
def test_compiled_code_is_kept_under_the_data_root(tmp_path):
    """Counting a step's operations makes PyTorch choose a folder of its own, if none is set by then."""
    code = """if True:
        import os
        from contextlib import suppress
        from holdfast.bench import device_rates
        with suppress(Exception):  # there is no GPU
            next(device_rates("rot-mnist", "er"))
        print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    """
    quiet = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    env = {**quiet, "HOLDFAST_DATA": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == tmp_path / "compiled"
