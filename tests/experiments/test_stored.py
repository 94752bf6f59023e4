"""Reading folders of results: by fingerprint, and whatever is no result is named and left alone."""

import json
import os
import shutil
from dataclasses import replace
from math import isnan

import pytest
import torch

from holdfast.analysis import Robustness
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.experiments import MEASURES, add_robustness, condensed, load_results, measure_robustness
from holdfast.report import gather_analyses, render_report, write_report

CONFIG = RunConfig.preset("seq-mnist", "mse", buffer_size=200, tasks=2)
LOGITS = {
    "logits.0": torch.tensor([[4.0, 0.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]]),
    "labels.0": torch.tensor([0, 1]),
    "logits.1": torch.tensor([[0.0, 0.0, 4.0, 0.0], [0.0, 0.0, 4.0, 0.0]]),
    "labels.1": torch.tensor([2, 3]),
}


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_finds_folders_and_single_files(out, store, tmp_path):
    store(CONFIG, 60.0)
    folder = store(CONFIG.change(seed=1), 70.0)
    kept = tmp_path / "kept" / "deeper"
    kept.mkdir(parents=True)
    (folder / "result.json").rename(kept / "seed-1.json")
    found = load_results(out, tmp_path / "kept")
    assert len(found) == 2
    assert found.skipped == []
    assert found.get(CONFIG.change(seed=1)).result.accuracy == 70.0
    assert found.seeds_of(CONFIG.change(seed=9)) == [0, 1]
    assert CONFIG.change(lr=0.5) not in found
    assert found.get(CONFIG.change(seed=2)) is None


def test_first_folder_counts(out, store, tmp_path):
    store(CONFIG, 60.0)
    other = tmp_path / "other"
    other.mkdir()
    (other / "same.json").write_text((out / CONFIG.fingerprint / "result.json").read_text().replace("55.0", "50.0"))
    assert load_results(out, other).get(CONFIG).path.parent.parent == out
    assert load_results(other, out).get(CONFIG).path.name == "same.json"


def test_links_to_results_are_followed(out, store, tmp_path):
    """Only `run` and `analyze` followed them: a sweep said that the runs were there, and a report that none was."""
    store(CONFIG)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / CONFIG.fingerprint).symlink_to(out / CONFIG.fingerprint)
    (linked / "circle").symlink_to(linked)
    (out / "notes.txt").write_text("")
    (linked / "all").symlink_to(out)
    found = load_results(linked)
    assert [stored.config for stored in found] == [CONFIG]
    assert [path.name for path, _ in found.skipped] == ["notes.txt"]


def test_folder_that_is_not_there(tmp_path):
    assert len(load_results(tmp_path / "nowhere")) == 0


def change(folder, **values):
    path = folder / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "result.json").write_text('{"config": '), "damaged"),
        (lambda folder: (folder / "result.json").write_bytes(b"\xff\x00"), "damaged"),
        (lambda folder: (folder / "result.json").write_text("[1, 2]"), "not a result"),
        (lambda folder: change(folder, accuracy_matrix=[[1.0], [2.0, 3.0]]), "damaged"),
        (lambda folder: change(folder, config={"benchmark": "seq-mnist"}), "damaged"),
        (lambda folder: change(folder, measures=3), "damaged"),
        (lambda folder: change(folder, protocol=0), "of protocol 0; this version computes protocol"),
        (lambda folder: change(folder, config={**CONFIG.to_dict(), "lr": 9.0}), "do not belong to its fingerprint"),
    ],
)
def test_damaged_and_foreign_results_are_named_and_kept(out, store, damage, reason):
    store(CONFIG.change(seed=1))
    damage(store(CONFIG))
    before = snapshot(out)
    found = load_results(out)
    assert [stored.config.seed for stored in found] == [1]
    ((path, why),) = found.skipped
    assert path == out / CONFIG.fingerprint / "result.json"
    assert reason in why
    assert snapshot(out) == before


@pytest.mark.parametrize(
    "values",
    [
        {"accuracy_matrix": [[80.0, 20.0], [-50.0, 55.0]]},
        {"accuracy_matrix": [[80.0, 20.0], [None, None]]},
        {"untrained": [10.0, 10**400]},
        {"timing": {"steps": "many"}},
        {"measures": {"mra": 10**400}},
        {"measures": {"mra": None}},
        {"seconds": None},
        {"environment": {"device": "\udcff"}},
    ],
)
def test_numbers_that_cannot_be_are_damage(out, store, values):
    """An accuracy of -50 % was accepted; a number of 400 digits ended in a traceback."""
    store(CONFIG.change(seed=1))
    change(store(CONFIG), **values)
    found = load_results(out)
    assert [stored.config.seed for stored in found] == [1]
    assert "damaged: " in found.skipped[0].reason


@pytest.mark.parametrize("name", ["result.json", "notes.json", "measures.json", "analysis.json"])
def test_neither_fifos_nor_devices_are_waited_for(out, store, name):
    folder = store(CONFIG.change(seed=1))
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (out / "other").mkdir()
        make(out / "other" / name)
        make(folder / "pipe.json")
        (stored,) = load_results(out)
        assert stored.config.seed == 1
        gather_analyses([out], load_results(out))
        shutil.rmtree(out / "other")
        (folder / "pipe.json").unlink()
    os.mkfifo(folder / "measures.json")
    assert stored.measures == {}
    with pytest.raises(HoldfastError, match=r"measures\.json is not readable: it is not a regular file"):
        stored.check()


def test_names_that_are_no_text_are_spelled_out(out, store, tmp_path):
    """A report could not be written: their bytes are not UTF-8. Escape sequences reached the terminal."""
    store(CONFIG)
    (out / os.fsdecode(b"caf\xe9.json")).write_text("{")
    (out / "\x1b[31mred.json").write_text("{")
    found = load_results(out)
    names = sorted(path.name for path, _ in found.skipped)
    assert names == ["\\x1b[31mred.json", "caf\\udce9.json"]
    assert "caf" in write_report(render_report(found), tmp_path / "report.html").read_text("utf-8")


def test_damaged_logits_are_skipped_and_named_and_their_run_stays(out, store):
    folder = store(CONFIG, logits=LOGITS)
    store(CONFIG.change(seed=1), logits=LOGITS)
    (folder / "logits.safetensors").write_bytes(b"nothing")
    found = load_results(out)
    assert found.skipped == [], "they are read when they are asked for"
    assert [stored.config.seed for stored in found if stored.analysis] == [1]
    assert len(found) == 2
    ((path, reason),) = found.skipped
    assert path == folder / "logits.safetensors"
    assert "logits.safetensors is not readable" in reason


def test_measures_from_logits_leave_the_weights_alone(out, store):
    """Reading logits loaded every run's weights."""
    folder = store(CONFIG, logits=LOGITS)
    (folder / "weights.safetensors").write_text("not even weights")
    (stored,) = load_results(out)
    assert MEASURES["ece"].of(stored) > 0


def test_what_is_named_and_what_is_not(out, store):
    store(CONFIG, logits=LOGITS)
    for name in ("notes.txt", "other.json", ".hidden.json", "report.html", "README.md"):
        (out / name).write_text("{}")
    for ending in ("csv", "json", "png", "svg"):  # a figure with its numbers, as `holdfast analyze` writes them
        (out / f"recency.{ending}").write_text("[]")
    (out / "failed").mkdir()
    (out / "failed" / "0123456789abcdef.json").write_text("{}")
    (out / f".{CONFIG.fingerprint}-scratch").mkdir()
    (out / f".{CONFIG.fingerprint}-scratch" / "result.json").write_text("{")
    assert sorted(path.name for path, _ in load_results(out).skipped) == ["notes.txt", "other.json"]


def test_measures_from_logits(out, store):
    store(CONFIG, logits=LOGITS)
    (stored,) = load_results(out)
    values = {name: MEASURES[name].of(stored) for name in MEASURES}
    top = torch.softmax(torch.tensor([4.0, 0.0, 0.0, 0.0]), 0)[0].item()
    assert values["ece"] == pytest.approx(100 * abs(0.75 - top), abs=1e-4)
    first, last = (2 * top + 2 * (1 - top) / 3) / 4 + (1 - top) / 3, (2 * top + 2 * (1 - top) / 3) / 4 + (1 - top) / 3
    assert values["task_probability_1"] == pytest.approx(first, abs=1e-6)
    assert values["last_task_probability"] == values["task_probability_2"] == pytest.approx(last, abs=1e-6)
    assert values["recency_gap"] == pytest.approx(last - first, abs=1e-6)
    assert values["task_probability_3"] != values["task_probability_3"]  # there is no such task
    assert values["mra"] != values["mra"]  # not computed


def test_recency_means_nothing_where_tasks_share_classes(out, store):
    store(CONFIG, logits={**LOGITS, "labels.1": torch.tensor([0, 1])})
    (stored,) = load_results(out)
    assert MEASURES["recency_gap"].of(stored) != MEASURES["recency_gap"].of(stored)
    assert MEASURES["ece"].of(stored) > 0


def test_measures_are_kept(out, store, tmp_path):
    store(CONFIG, logits=LOGITS)
    (stored,) = load_results(out)
    stored.add_measures({"mra": 41.5})
    (again,) = load_results(out)
    assert MEASURES["mra"].of(again) == 41.5

    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "small.json").write_text(json.dumps(condensed(again)))
    (small,) = load_results(kept)
    assert small.analysis is None
    for name in ("accuracy", "ece", "recency_gap", "mra"):
        assert MEASURES[name].of(small) == pytest.approx(MEASURES[name].of(again), abs=1e-6)


def test_measures_that_cannot_be_kept_are_there_all_the_same(out, store, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    store(CONFIG, logits=LOGITS)
    (stored,) = load_results(out)
    monkeypatch.setattr(type(stored.path), "write_text", refuse)
    stored.add_measures({"mra": 41.5})
    assert MEASURES["mra"].of(stored) == 41.5


def test_robustness_is_computed_once_and_kept(out, store, monkeypatch):
    categories = dict.fromkeys(("noise", "blur", "weather", "digital"), 40.0)
    calls = []

    def evaluate(runs, root, **_):
        (run,) = runs
        calls.append(run.folder)
        found = Robustness("generated", (1, 2, 3, 4, 5), 60.0, {}, {}, {**categories, "blur": 44.0}, 41.0)
        return [replace(run, robustness=found)]

    monkeypatch.setattr("holdfast.experiments.measures.with_robustness", evaluate)
    folder = store(CONFIG)
    for _ in range(2):
        (stored,) = load_results(out)
        found = measure_robustness(stored, device="cpu")
        assert found == {**{f"robust_{name}": 40.0 for name in categories}, "robust_blur": 44.0, "mra": 41.0}
        assert MEASURES["robust_blur"].of(stored) == 44.0
    assert calls == [folder]


@pytest.mark.parametrize(("severities", "mra"), [((1,), 41.0), ((1, 2, 3, 4, 5), None)])
def test_a_partial_evaluation_is_not_kept(out, store, severities, mra):
    store(CONFIG)
    (stored,) = load_results(out)
    categories = dict.fromkeys(("noise", "blur", "weather", "digital"), 40.0)
    assert add_robustness(stored, Robustness("generated", severities, 60.0, {}, {}, categories, mra)) == {}
    assert "mra" not in load_results(out).by_fingerprint[CONFIG.fingerprint].measures


def test_robustness_of_a_result_kept_without_weights(out, store, tmp_path):
    (store(CONFIG) / "result.json").rename(tmp_path / "small.json")
    (small,) = load_results(tmp_path)
    assert measure_robustness(small, device="cpu") == {}
    store(CONFIG)
    (stored,) = load_results(out)
    assert measure_robustness(stored, device="cpu") == {}


def test_damaged_weights_are_named_and_count_as_missing(out, store):
    """They ended `reproduce` before it could show its table; so did damaged logits, which robustness does not need."""
    folder = store(CONFIG, logits=LOGITS)
    for name in ("logits.safetensors", "weights.safetensors"):
        (folder / name).write_bytes(b"half")
    results = load_results(out)
    (stored,) = results
    assert measure_robustness(stored, device="cpu") == {}
    (skipped,) = results.skipped
    assert skipped.path == folder / "weights.safetensors"
    assert "weights.safetensors is not readable" in skipped.reason


def test_damaged_measures(out, store):
    (store(CONFIG) / "measures.json").write_text("{")
    (stored,) = load_results(out)
    assert isnan(MEASURES["mra"].of(stored))
    for use in (measure_robustness, condensed, lambda stored: stored.add_measures({"mra": 50.0})):
        with pytest.raises(HoldfastError, match=r"measures.json is not readable.* Remove it"):
            use(stored)
    assert (out / CONFIG.fingerprint / "measures.json").read_text() == "{"
