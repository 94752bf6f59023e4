"""result.json, logits, weights, measures: a folder of results may come from anywhere."""

import functools
import json
import math
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from holdfast import results
from holdfast.analysis.findings import read_findings
from holdfast.analysis.runs import analyze_run
from holdfast.config import RunConfig
from holdfast.experiments import load_results
from holdfast.report import gather, render_report
from holdfast.results import RunResult

from .hunt import altered, damaged, fuzz, outcome

CONFIG = RunConfig.preset("seq-mnist", "linf", buffer_size=200, tasks=2)


@functools.cache
def example():
    """A small result with all that belongs to one."""
    draw = torch.Generator().manual_seed(0)
    logits = {f"logits.{task}": torch.randn(6, 10, generator=draw) for task in range(2)}
    labels = {f"labels.{task}": torch.arange(6) % 2 + 2 * task for task in range(2)}
    return RunResult(
        config=CONFIG,
        matrix=torch.tensor([[90.0, math.nan], [70.5, 80.0]], dtype=torch.float64),
        task_matrix=torch.tensor([[95.0, math.nan], [90.0, 99.0]], dtype=torch.float64),
        untrained=torch.tensor([10.0, 12.0], dtype=torch.float64),
        seconds=3.25,
        timing={"training": 2.0, "steps": 10, "steps_per_second": 5.0},
        environment={"torch": "2", "device_type": "cpu"},
        logits=logits | labels,
    )


VALUES = example().to_json()
TEXT = json.dumps(VALUES).encode()
LOGITS = save(example().logits)
WEIGHTS = save({"weight": torch.ones(3, 2), "bias": torch.zeros(3)})


def folder_with(place, **contents):
    folder = place / CONFIG.fingerprint
    folder.mkdir(exist_ok=True)
    for name, content in {"result.json": TEXT, **contents}.items():
        (folder / name).write_bytes(content)
    return folder


def is_result(value):
    """Whether a value read is a result that the rest of the program can work with."""
    numbers = (value.accuracy, value.task_il_accuracy, value.forward_transfer, value.backward_transfer)
    assert all(isinstance(number, float) for number in (*numbers, value.forgetting, value.seconds))
    assert 0 <= value.accuracy <= 100
    assert 0 <= value.seconds < math.inf
    assert value.matrix.dim() == 2
    assert value.matrix.dtype == torch.float64
    assert len(value.config.fingerprint) == 16
    assert hash(value.config) == hash(value.config)
    json.dumps(value.to_json())


@fuzz(damaged(TEXT) | altered(VALUES))
def test_result(content, place):
    folder = folder_with(place, **{"result.json": content})
    value = outcome(results.read, folder)
    if isinstance(value, RunResult):
        is_result(value)
    found = outcome(results.find, place, CONFIG)
    assert not isinstance(found, RunResult) or found.config == CONFIG


@fuzz(damaged(TEXT) | altered(VALUES))
def test_folders_of_results(content, place):
    """A damaged file is named and left out; what is read can be drawn."""
    folder_with(place, **{"result.json": content})
    (place / "other.json").write_bytes(content)
    found = outcome(load_results, place)
    assert len(found) + len(found.skipped) >= 1
    for stored in found:
        is_result(stored.result)


@fuzz(damaged(TEXT) | altered(VALUES), examples=15)
def test_a_report_can_be_made_of_whatever_is_left(content, place):
    folder_with(place, **{"result.json": content})
    found = outcome(gather, [place])
    if len(found):
        assert "<html" in render_report(found)


@fuzz(damaged(json.dumps({"mra": 50.0}).encode()) | altered({"mra": 50.0, "robust_noise": 40}))
def test_measures(content, place):
    folder = folder_with(place, **{"measures.json": content})
    (stored,) = load_results(folder)
    value = outcome(getattr, stored, "measures")
    if isinstance(value, dict):
        assert all(isinstance(number, int | float) for number in value.values())


@fuzz(damaged(LOGITS) | damaged(WEIGHTS))
def test_tensors(content, place):
    for name in ("logits", "weights"):
        folder = folder_with(place, **{f"{name}.safetensors": content})
        outcome(results.read, folder, tensors=True)
        (folder / f"{name}.safetensors").unlink()


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 7), max_size=3)
tensors = st.tuples(shapes, st.sampled_from(DTYPES)).map(lambda made: torch.ones(made[0]).to(made[1]))
names = st.sampled_from(["logits.0", "labels.0", "logits.1", "labels.1", "logits.x", "", "other"])


@fuzz(damaged(LOGITS) | st.dictionaries(names, tensors).map(lambda made: save(example().logits | made)))
def test_analysis_of_stored_logits(content, place):
    """Whole files whose tensors are of other shapes, types and names are refused as damaged ones are."""
    outcome(analyze_run, folder_with(place, **{"logits.safetensors": content}))


ANALYSIS = Path(__file__).parents[2] / "results" / "seq-cifar10" / "analysis" / "analysis.json"


@functools.cache
def analysis():
    """A real analysis of two methods."""
    values = json.loads(ANALYSIS.read_text("utf-8"))
    del values["comparisons"][0]["methods"][2:]
    return values


@fuzz(damaged(json.dumps(analysis()).encode()) | altered(analysis()))
def test_analysis_json(content, place):
    """Whatever is read is whole: its gains and claims can be computed, and it can be written again."""
    (place / "analysis.json").write_bytes(content)
    found = outcome(read_findings, place / "analysis.json")
    if isinstance(found, list):
        for one in found:
            json.dumps(one.to_json(), allow_nan=False)
