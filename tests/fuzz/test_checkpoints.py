"""Checkpoints of learners and of runs: continue exactly, or say what is wrong; never in between."""

import copy
import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

import holdfast as hf
from holdfast import checkpoint
from holdfast.benchmarks import make_benchmark
from holdfast.data import data_root
from holdfast.run_state import Checkpointer
from holdfast.training import train

from .hunt import altered, damaged, fuzz, outcome

CPU = torch.device("cpu")
CONFIG = hf.RunConfig.preset("seq-mnist", "linf", buffer_size=10, train_limit=200)
BENCHMARK = make_benchmark(CONFIG, data_root())


def learner():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hf.ConsistencyReplay(model, optimizer, buffer_size=5)


def load(path):
    made = learner()
    return made.load(path), made.model.weight


def save_learner(path):
    made = learner()
    for step in range(3):
        made.observe(torch.full((4, 3), float(step)), torch.arange(4) % 2)
    made.save(path, extra={"step": 3})
    return made.model.weight.detach().clone()


def save_run(path):
    steps = train(CONFIG, BENCHMARK, CPU, Checkpointer(path, CONFIG, CPU, every=0))
    for _ in range(3):
        next(steps)


def continue_run(path):
    steps = train(CONFIG, BENCHMARK, CPU, Checkpointer(path, CONFIG, CPU, every=1e9))
    return next(steps).step


with tempfile.TemporaryDirectory() as scratch:
    WEIGHT = save_learner(Path(scratch) / "learner")
    save_run(Path(scratch) / "run")
    LEARNER, RUN = ((Path(scratch) / name).read_bytes() for name in ("learner", "run"))


@fuzz(damaged(LEARNER))
def test_damaged_checkpoints_of_learners(content, place):
    (place / "kept").write_bytes(content)
    value = outcome(load, place / "kept")
    if not isinstance(value, hf.HoldfastError):
        assert value[0] == {"step": 3}
        assert torch.equal(value[1], WEIGHT)
    else:
        assert isinstance(value, hf.CheckpointError)


@fuzz(damaged(RUN), examples=20)
def test_damaged_checkpoints_of_runs(content, place):
    (place / "kept").write_bytes(content)
    value = outcome(continue_run, place / "kept")
    assert value == 4 or isinstance(value, hf.CheckpointError)


def test_whole_checkpoints_are_read(tmp_path):
    """Else the tests above would pass with a reader that refuses everything."""
    (tmp_path / "learner").write_bytes(LEARNER)
    (tmp_path / "run").write_bytes(RUN)
    assert torch.equal(load(tmp_path / "learner")[1], WEIGHT)
    assert continue_run(tmp_path / "run") == 4


def parts(content, place):
    """The JSON inside a checkpoint, and its tensors."""
    (place / "kept").write_bytes(content)
    with safe_open(place / "kept", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        return json.loads(json.loads(file.metadata()["holdfast"])["content"]), tensors


def forged(text, tensors):
    """A checkpoint with that content and a checksum to match."""
    header = {"version": checkpoint.VERSION, "checksum": checkpoint._checksum(text, tensors), "content": text}
    return save(tensors, {"holdfast": json.dumps(header)})


with tempfile.TemporaryDirectory() as scratch:
    CONTENT, TENSORS = parts(LEARNER, Path(scratch))


@fuzz(altered(CONTENT))
def test_forged_checkpoints(text, place):
    """What the file holds is not what a learner saves: it is taken over where it can be, or refused."""
    (place / "kept").write_bytes(forged(text.decode(), TENSORS))
    outcome(load, place / "kept")


with tempfile.TemporaryDirectory() as scratch:
    RUN_CONTENT, RUN_TENSORS = parts(RUN, Path(scratch))


@fuzz(altered(RUN_CONTENT), examples=15)
def test_forged_checkpoints_of_runs(text, place):
    """No step of the run that continues from it may fail either."""
    (place / "kept").write_bytes(forged(text.decode(), RUN_TENSORS))
    outcome(continue_run, place / "kept")


def test_a_checkpoint_of_a_run_with_labels_of_another_type(tmp_path):
    tensors = {name: each.to(torch.int8) if name.endswith("columns.1") else each for name, each in RUN_TENSORS.items()}
    (tmp_path / "kept").write_bytes(forged(json.dumps(RUN_CONTENT), tensors))
    assert isinstance(outcome(continue_run, tmp_path / "kept"), hf.CheckpointError)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("progress", "task", -1),
        ("progress", "task", 10**6),
        ("progress", "step", "3"),
        ("progress", "losses", [1]),
        ("progress", "row", {"dict": []}),
        ("log", "steps", [1]),
        ("log", "steps", 2**40),
        (None, "seconds", []),
        (None, "total", {"float": "nan"}),
        (None, "untrained", "none"),
    ],
)
def test_a_checkpoint_of_a_run_with_one_wrong_number(part, name, value, tmp_path):
    content = copy.deepcopy(RUN_CONTENT)
    fields = content["state"]["dict"]
    if part is not None:
        fields = next(inner for key, inner in fields if key == part)["dict"]
    next(pair for pair in fields if pair[0] == name)[1] = value
    (tmp_path / "kept").write_bytes(forged(json.dumps(content), RUN_TENSORS))
    assert isinstance(outcome(continue_run, tmp_path / "kept"), hf.CheckpointError)
