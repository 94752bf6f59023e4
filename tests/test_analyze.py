"""holdfast analyze as a user meets it: tables, files, exit codes, and never a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast import results
from holdfast.analysis import Robustness
from holdfast.cli import main
from holdfast.config import RunConfig
from holdfast.experiments import load_results
from holdfast.training import run

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of real, short runs: two methods, two seeds, and one of another benchmark."""
    out = tmp_path_factory.mktemp("runs")
    for method in ("er", "mse"):
        for seed in (0, 1):
            config = RunConfig.preset("seq-mnist", method, seed=seed, train_limit=320)
            results.save(run(config, device="cpu"), out)
    return out


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    """A copy of the runs that a test may damage; large files are links."""
    copy = tmp_path / "runs"
    for folder in finished.iterdir():
        (copy / folder.name).mkdir(parents=True)
        for file in folder.iterdir():
            (copy / folder.name / file.name).symlink_to(file)
    return copy


@pytest.fixture
def analyze(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Call the command in an empty folder; gives (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", "analyze", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return end.value.code or 0, captured.out, captured.err  # type: ignore[return-value]

    return call


def test_tables_figures_and_json(analyze: Call, runs: Path, tmp_path: Path) -> None:
    code, out, err = analyze(runs)
    assert code == 0
    for heading in (
        "seq-mnist, buffer 200",
        "ECE (%)",
        "recency gap",
        "forgetting",
        "task 5",
        "The paper's claims here",
    ):
        assert heading in out
    assert "in analysis: analysis.json, figures: 5" in err
    report = json.loads((tmp_path / "analysis" / "analysis.json").read_text("utf-8"))
    (comparison,) = report["comparisons"]
    assert [method["label"] for method in comparison["methods"]] == ["er", "mse"]
    er = comparison["methods"][0]
    assert er["seeds"] == [0, 1]
    assert er["transfer"]["forgetting"]["low"] <= er["transfer"]["forgetting"]["mean"]
    assert sum(er["recency"]["task_probabilities"]) == pytest.approx(1)
    written = {path.name for path in (tmp_path / "analysis" / "seq-mnist-buffer-200").iterdir()}
    assert {"reliability.svg", "reliability.png", "reliability.csv", "reliability.json", "overview.svg"} <= written


@pytest.mark.usefixtures("undrawn")
def test_json_is_one_object_and_the_file(analyze: Call, runs: Path, tmp_path: Path) -> None:
    code, out, _ = analyze(next(runs.iterdir()), "--json", "--bins", 5, "--out", "elsewhere")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "elsewhere" / "analysis.json").read_text("utf-8"))
    assert len(json.loads(out)["comparisons"][0]["methods"][0]["calibration"]["count"]) == 5


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures, which take most of the time."""
    monkeypatch.setattr("holdfast.cli.analyze.write_analysis_figures", lambda found, out: [])


@pytest.mark.usefixtures("undrawn")
def test_corruptions(analyze: Call, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sheets = []
    monkeypatch.setattr("holdfast.cli.analyze.BENCHMARK_CORRUPTIONS", ("contrast",))
    monkeypatch.setattr("holdfast.cli.analyze.save_contact_sheet", lambda images, out: sheets.append(images) or out)
    code, out, err = analyze(runs, "--corruptions", "--severities", "1,5", "--contact-sheet")
    assert code == 0
    assert "Accuracy under corruptions" in out
    assert "figures: 1" in err
    report = json.loads((tmp_path / "analysis" / "analysis.json").read_text("utf-8"))
    robust = report["comparisons"][0]["methods"][0]["robustness"]
    assert robust["source"] == "generated"
    assert robust["severities"] == [1, 5]
    assert list(robust["accuracy"]) == ["contrast"]
    assert robust["accuracy"]["contrast"][1] < robust["clean"]
    assert sheets[0].shape == (2, 1, 28, 28)


@pytest.mark.usefixtures("undrawn")
def test_a_complete_evaluation_is_kept_beside_the_results(analyze: Call, runs: Path, monkeypatch) -> None:
    categories = dict.fromkeys(("noise", "blur", "weather", "digital"), 40.0)
    found = Robustness("generated", (1, 2, 3, 4, 5), 60.0, {"fog": [40.0] * 5}, {"fog": 40.0}, categories, 41.0)
    monkeypatch.setattr(
        "holdfast.cli.analyze.with_robustness", lambda runs, *_, **__: [replace(run, robustness=found) for run in runs]
    )
    assert analyze(runs, "--corruptions")[0] == 0
    for stored in load_results(runs):
        assert stored.measures["mra"] == 41.0


@pytest.mark.usefixtures("undrawn")
def test_benchmarks_are_compared_apart(analyze: Call, runs: Path, tmp_path: Path) -> None:
    config = RunConfig.preset("rot-mnist", "er", tasks=2, train_limit=200)
    results.save(run(config, device="cpu"), tmp_path / "other")
    code, out, _ = analyze(runs, tmp_path / "other")
    assert code == 0
    assert "rot-mnist, buffer 200" in out
    assert "seq-mnist, buffer 200" in out


# --- bad input ---


@pytest.mark.usefixtures("undrawn")
def test_runs_without_tensors_say_how_to_get_them(analyze: Call, runs: Path) -> None:
    for folder in runs.iterdir():
        (folder / results.LOGITS).unlink()
        (folder / results.WEIGHTS).unlink()
    code, out, err = analyze(runs, "--corruptions")
    assert code == 0
    assert "forgetting" in out
    assert err.count("has no logits") == err.count("has no weights") == 4
    assert "holdfast run seq-mnist er --buffer-size 200 --seed 1 --set train_limit=320 --out" in err
    assert "--force" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "is not a folder"),
        (["."], 1, "holds no result"),
        (["RUNS", "--corruptions", "--severities", "0,1"], 2, "severities must be"),
        (["RUNS", "--corruptions", "--severities", "all"], 2, "severities must be"),
        (["RUNS", "--severities", "1"], 2, "add --corruptions"),
        (["RUNS", "--extra"], 2, "add --corruptions"),
        (["RUNS", "--bins", "0"], 2, "bins"),
        (["RUNS", "--bins", "1000000000"], 2, "bins"),  # took all memory
        (["RUNS", "--device", "tpu"], 2, "unknown device"),
        (["RUNS", "--plugin", "no_such_module"], 1, "could not be imported"),
        ([], 2, "Missing argument"),
    ],
)
def test_bad_requests(analyze: Call, finished: Path, arguments: list[str], code: int, message: str) -> None:
    given, _, err = analyze(*[str(finished) if argument == "RUNS" else argument for argument in arguments])
    assert given == code
    assert message in err


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"logits.0": torch.full((2115, 10), torch.nan)}, "NaN"),
        ({"labels.0": torch.full((2115,), 12)}, "labels must lie"),
    ],
)
def test_damaged_logits(analyze: Call, runs: Path, tensor: dict[str, torch.Tensor], message: str) -> None:
    file = next(runs.iterdir()) / results.LOGITS
    kept = load_file(file)
    file.unlink()
    save_file({**kept, **tensor}, file)
    code, _, err = analyze(file.parent)
    assert code == 1
    assert message in err
    assert "logits.safetensors" in err


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("damage", ["cut off", "another network's"])
def test_damaged_weights_of_one_run_leave_the_others_their_robustness(
    analyze: Call, runs: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command failed, after the evaluations of the runs before it."""
    monkeypatch.setattr("holdfast.cli.analyze.BENCHMARK_CORRUPTIONS", ("contrast",))
    file = sorted(runs.iterdir())[1] / results.WEIGHTS
    kept = load_file(file)
    file.unlink()
    if damage == "cut off":
        file.write_bytes(b"half")
    else:
        save_file({name: tensor[:1].clone() for name, tensor in kept.items()}, file)
    code, out, err = analyze(runs, "--corruptions", "--severities", "1", "--json")
    assert code == 0
    assert err.count("note: no robustness: ") == 1
    assert f"{file} " in err
    summaries = [one for found in json.loads(out)["comparisons"] for one in found["methods"]]
    assert all(one["robustness"] for one in summaries)


def test_a_damaged_result(analyze: Call, runs: Path) -> None:
    file = next(runs.iterdir()) / results.RESULT
    file.unlink()
    file.write_text("{}")
    code, out, err = analyze(runs)
    assert code == 0
    assert out
    assert f"skipped {file.parent}" in err
    assert "not a readable result" in err
    code, out, err = analyze(file.parent)
    assert code == 1
    assert not out
    assert "not a readable result" in err
