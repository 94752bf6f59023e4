from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast import results
from holdfast.analysis import PublishedCorruptions, calibration, corrupt, recency, robustness
from holdfast.analysis.findings import summarize
from holdfast.analysis.runs import analyze_run, exam_images, final_model, find_runs, rerun_command, with_robustness
from holdfast.benchmarks import BENCHMARKS, Benchmark, Task
from holdfast.config import RunConfig
from holdfast.data import Dataset, ImageSet
from holdfast.errors import DataError, HoldfastError, UsageError
from holdfast.evaluation import predict
from holdfast.methods import REGULARIZERS
from holdfast.results import RunResult
from holdfast.training import build_model, run


def stored(
    folder: Path, method: str = "er", seed: int = 0, *, classes: int = 4, shared: bool = False, **changes
) -> Path:
    """A result with random logits on two tasks, of two classes each or of the same four."""
    config = RunConfig.preset("seq-mnist", method, seed=seed, tasks=2, **changes)
    draw = torch.Generator().manual_seed(seed)
    labels = [torch.arange(40) % 4] * 2 if shared else [torch.arange(40) % 2, torch.arange(40) % 2 + 2]
    logits: dict[str, Tensor] = {}
    for task, part in enumerate(labels):
        logits[f"logits.{task}"] = 2 * torch.randn(40, classes, generator=draw)
        logits[f"labels.{task}"] = part.clone()
    matrix = torch.tensor([[90.0 + seed, 5.0], [60.0, 80.0]], dtype=torch.float64)
    result = RunResult(config, matrix, matrix, torch.tensor([10.0, 10.0]), 1.0, logits=logits)
    return results.save(result, folder)


def test_calibration_and_recency_are_those_of_all_test_sets_together(tmp_path: Path) -> None:
    folder = stored(tmp_path)
    logits = results.read_tensors(folder, results.LOGITS)
    every = torch.cat([logits["logits.0"], logits["logits.1"]])
    labels = torch.cat([logits["labels.0"], logits["labels.1"]])
    analysis = analyze_run(folder, bins=7)
    assert analysis.calibration == calibration(every, labels, 7)
    assert analysis.recency == recency(every, [[0, 1], [2, 3]])
    assert analysis.notes == ()
    assert analysis.result.logits == {}


def test_tasks_that_share_their_classes_have_no_recency(tmp_path: Path) -> None:
    analysis = analyze_run(stored(tmp_path, shared=True))
    assert analysis.calibration is not None
    assert analysis.recency is None


# --- what may be wrong with a run ---


def test_a_run_without_logits_says_how_to_get_them(tmp_path: Path) -> None:
    folder = stored(tmp_path)
    (folder / results.LOGITS).unlink()
    analysis = analyze_run(folder)
    assert (analysis.calibration, analysis.recency) == (None, None)
    (note,) = analysis.notes
    assert "has no logits" in note
    assert f"holdfast run seq-mnist er --buffer-size 200 --seed 0 --set tasks=2 --out {tmp_path} --force" in note
    summary = summarize("er", [analysis])
    assert (summary.ece, summary.calibration, summary.recency_gap) == (None, None, None)
    assert summary.transfer.forgetting is not None


def test_a_run_without_weights_says_how_to_get_them(tmp_path: Path) -> None:
    (analysis,) = with_robustness([analyze_run(stored(tmp_path))], tmp_path)
    assert analysis.robustness is None
    assert "has no weights" in analysis.notes[0]
    assert "--force" in analysis.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits.1": torch.full((40, 4), float("nan"))}, "NaN"),
        ({"labels.1": torch.full((40,), 9)}, r"labels must lie in 0\.\.3"),
        ({"labels.1": torch.zeros(3, dtype=torch.long)}, "one per row"),
        ({"logits.1": torch.zeros(40, 7)}, "Sizes of tensors"),
        ({"labels.2": torch.zeros(40, dtype=torch.long)}, "expected tensors"),
    ],
)
def test_damaged_logits_name_the_file(tmp_path: Path, change: dict[str, Tensor], message: str) -> None:
    folder = stored(tmp_path)
    file = folder / results.LOGITS
    save_file({**load_file(file), **change}, file)
    with pytest.raises(DataError, match=message) as caught:
        analyze_run(folder)
    assert str(file) in str(caught.value)


def test_folders_of_runs_are_found_once_each(tmp_path: Path) -> None:
    first, second = sorted([stored(tmp_path, seed=0), stored(tmp_path, seed=1)])
    (tmp_path / ".half-written").mkdir()
    (tmp_path / ".half-written" / results.RESULT).write_text("{}")
    (tmp_path / "figures").mkdir()
    assert find_runs([tmp_path]) == [first, second]
    assert find_runs([second, tmp_path]) == [second, first]


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="holds no result") as empty:
        find_runs([tmp_path])
    assert empty.value.exit_code == 1
    with pytest.raises(UsageError, match="is not a folder"):
        find_runs([tmp_path / "nowhere"])


def test_rerun_command_repeats_the_settings_of_a_method() -> None:
    config = RunConfig.preset("rot-mnist", "clser").change(settings=(("stable_rate", 0.5),))
    command = rerun_command(config, Path("runs/abc"))
    assert "--set stable_rate=0.5" in command
    assert "settings=" not in command


def test_rerun_command_from_inside_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said `--out .`, which makes the result a part of the old one."""
    run = tmp_path / "runs" / "abc"
    (run / "deeper").mkdir(parents=True)
    for here, name in ((run, "."), (run / "deeper", "..")):
        monkeypatch.chdir(here)
        assert f" --out {run.parent} --force" in rerun_command(RunConfig.preset("rot-mnist", "er"), Path(name))


def nearest(current: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    return (current - stored).abs().amin()


@pytest.mark.parametrize("method", [nearest, partial(nearest), partial(REGULARIZERS["l2"])])
def test_rerun_command_names_the_plugin_that_has_the_method(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that registers it, which may have it from elsewhere."""
    monkeypatch.setattr(REGULARIZERS, "_entries", dict(REGULARIZERS._entries))
    monkeypatch.setattr(REGULARIZERS, "_origins", dict(REGULARIZERS._origins))
    REGULARIZERS.register("nearest", "the smallest change")(method)
    command = rerun_command(RunConfig.preset("rot-mnist", "nearest"), Path("runs/abc"))
    assert f" --plugin {__name__} --out runs --force" in command


def test_rerun_command_repeats_every_setting() -> None:
    config = RunConfig.preset("rot-mnist", "simclr", seed=3, epochs=2, options=(("temperature", 0.2),))
    command = rerun_command(config, Path("runs/abc"))
    assert command == (
        "holdfast run rot-mnist simclr --buffer-size 200 --seed 3 --set epochs=2 "
        "--set regularizer.temperature=0.2 --out runs --force"
    )
    settings = [part for part in command.split() if "=" in part]
    assert RunConfig.preset("rot-mnist", "simclr", seed=3).parse(settings) == config
    assert "--buffer-size" not in rerun_command(RunConfig.preset("rot-mnist", "sgd"), Path("runs/abc"))


# --- robustness, from the weights of a real run ---


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, photos: Tensor) -> None:
    """A benchmark of two tasks on 8 x 8 photographs, bright against dark."""
    small = torch.nn.functional.avg_pool2d(photos.float(), 4).to(torch.uint8)
    bright = (small.float().mean((1, 2, 3)) > small.float().mean()).long()

    def build(config: RunConfig, root: Path) -> Benchmark:
        parts = [ImageSet(small[half::2], bright[half::2] + 2 * half) for half in (0, 1)]
        tasks = tuple(Task((2 * t, 2 * t + 1), lambda part=part: part, part) for t, part in enumerate(parts))
        return Benchmark(4, (3, 8, 8), tasks)

    monkeypatch.setitem(BENCHMARKS._entries, "tiny", build)
    monkeypatch.setitem(BENCHMARKS._descriptions, "tiny", "bright or dark")


def trained(folder: Path, **changes) -> Path:
    config = RunConfig(benchmark="tiny", method="er", buffer_size=10, epochs=5, batch_size=4, replay_size=4, **changes)
    return results.save(run(config, data=folder, device="cpu"), folder)


@pytest.mark.usefixtures("tiny")
def test_robustness_is_that_of_the_final_model(tmp_path: Path) -> None:
    analysis = analyze_run(trained(tmp_path))
    names, seen = ["contrast", "saturate"], []
    (with_it,) = with_robustness(
        [analysis], tmp_path, corruptions=names, severities=[1, 5], progress=lambda *at: seen.append(at)
    )
    found = with_it.robustness
    config = analysis.config
    benchmark = BENCHMARKS["tiny"](config, tmp_path)
    model = build_model(config, benchmark)
    model.load_state_dict(results.read_tensors(analysis.folder, results.WEIGHTS))
    images, labels = exam_images(benchmark)
    assert found == robustness(lambda x: predict(model, x, benchmark.normalize), images, labels, names, [1, 5])
    assert found is not None
    assert found.clean == pytest.approx(analysis.result.accuracy)
    assert found.source == "generated"
    assert len(seen) == 4
    summary = summarize("er", [with_it])
    assert summary.robustness == found
    assert summary.mra is None


@pytest.mark.usefixtures("tiny")
def test_runs_tested_on_the_same_images_share_the_corrupted_ones(tmp_path: Path, monkeypatch) -> None:
    made = []
    module = sys.modules["holdfast.analysis.robustness"]  # the package has a function of that name
    monkeypatch.setattr(module, "corrupt", lambda *args: made.append(args[1:]) or corrupt(*args))
    folders = [trained(tmp_path, seed=seed) for seed in (0, 1)]
    bare = stored(tmp_path / "elsewhere")
    runs = [analyze_run(folder) for folder in (folders[0], bare, folders[1])]
    options = {"corruptions": ["contrast", "fog"], "severities": [1, 5]}
    together = with_robustness(runs, tmp_path, **options)
    assert len(made) == 4
    assert [run.robustness is None for run in together] == [False, True, False]
    for number in (0, 2):
        (alone,) = with_robustness([runs[number]], tmp_path, **options)
        assert together[number] == alone


@pytest.mark.usefixtures("tiny")
def test_the_benchmark_of_a_run_is_made_once(tmp_path: Path, monkeypatch) -> None:
    analysis, made, build = analyze_run(trained(tmp_path)), [], BENCHMARKS["tiny"]
    monkeypatch.setitem(BENCHMARKS._entries, "tiny", lambda *args: made.append(args) or build(*args))
    with_robustness([analysis], tmp_path, corruptions=["contrast"], severities=[1])
    assert len(made) == 1


@pytest.mark.usefixtures("tiny")
def test_weights_of_another_model_are_told(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    weights = load_file(folder / results.WEIGHTS)
    save_file({**weights, "classifier.weight": torch.zeros(3, 100)}, folder / results.WEIGHTS)
    analysis = analyze_run(folder)
    with pytest.raises(DataError, match="does not fit the model") as caught:
        final_model(folder, analysis.config, results.read_tensors(folder, results.WEIGHTS), tmp_path)
    assert "\n" not in str(caught.value)
    (evaluated,) = with_robustness([analysis], tmp_path)
    assert evaluated.robustness is None
    assert evaluated.notes == (f"no robustness: {caught.value}",)


def test_grey_images_leave_out_saturate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained_on_mnist(tmp_path)
    monkeypatch.setattr("holdfast.analysis.runs.exam_images", lambda *_: ImageSet(*few_digits()))
    (analysis,) = with_robustness([analyze_run(folder)], tmp_path, corruptions=["contrast", "saturate"], severities=[1])
    assert analysis.robustness is not None
    assert list(analysis.robustness.accuracy) == ["contrast"]


def trained_on_mnist(folder: Path) -> Path:
    config = RunConfig.preset("seq-mnist", "er", train_limit=64)
    return results.save(run(config, device="cpu"), folder)


def few_digits() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (20, 1, 28, 28), dtype=torch.uint8), torch.arange(20) % 10


def test_cifar10_runs_use_the_published_images_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.arange(10_000) % 10
    test = ImageSet(torch.zeros(10_000, 3, 32, 32, dtype=torch.uint8), labels)
    cifar10 = Dataset(ImageSet(test.images[:100], labels[:100]), test, 10)
    monkeypatch.setattr("holdfast.benchmarks.class_incremental.shared_dataset", lambda *_: cifar10)
    changes = {"model": "mlp", "epochs": 1, "precision": "float32"}
    config = RunConfig.preset("seq-cifar10", "er", **changes)
    analysis = analyze_run(results.save(run(config, data=tmp_path, device="cpu"), tmp_path / "runs"))
    options = {"corruptions": ["fog"], "severities": [2]}
    generated = with_robustness([analysis], tmp_path, **options)[0].robustness
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(labels.numpy(), 5))
    np.lib.format.open_memmap(folder / "fog.npy", "w+", np.uint8, PublishedCorruptions.SHAPE).flush()
    published = with_robustness([analysis], tmp_path, **options)[0].robustness
    assert (generated and generated.source, published and published.source) == ("generated", "published")
    assert published is not None
    assert published.accuracy["fog"] == [published.clean]
