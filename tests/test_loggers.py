"""Loggers: what was logged is read back from the files the real packages wrote. The network is out of reach."""

import json
import logging
import math
import socket
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.cli import main
from holdfast.loggers import LOGGERS, open_logger, watch

LOSSES = hf.Losses(
    torch.tensor(3.5), current=torch.tensor(1.0), replay=torch.tensor(2.0), consistency=torch.tensor(0.5)
)
QUICK = {"tasks": 2, "train_limit": 2000}
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


class Kept:
    """A logger of one's own: two methods."""

    def __init__(self):
        self.rows = []

    def log(self, step, values):
        self.rows.append((step, dict(values)))

    def close(self):
        self.rows.append("closed")


def scalars(folder):
    """Every scalar in TensorBoard's event files under `folder`: (folder's name, name) -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in folder.rglob("events.out.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            where = found.setdefault((file.parent.name, tag), [])
            where += [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]
    return found


def offline_records(folder):
    """The records of the one offline run under `folder`: blocks of 32 KiB, each record in one or several pieces."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, pieces, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:  # no room for a header: padding
            at += 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            records.append(Record.FromString(pieces))
            pieces = b""
    return records


def offline_history(records):
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    return [(row["_step"], {key: value for key, value in row.items() if not key.startswith("_")}) for row in rows]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """An empty folder, W&B offline, and a network that nobody reaches from this process."""
    connect = socket.socket.connect

    def refuse(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise AssertionError(f"a connection to {address} was tried")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it remembers the folder and the mode for the rest of the process


def test_tensorboard_reads_back_what_was_logged(offline):
    with open_logger("tensorboard:logs", name="first", config={"lr": 0.1}) as logger:
        logger.log(3, LOSSES)
        logger.log(7, {"accuracy": 91.25, "ece": torch.tensor(2.5, dtype=torch.float64), "absent": None})
    found = scalars(offline / "logs")
    assert found == {
        ("first", "total"): [(3, 3.5)],
        ("first", "current"): [(3, 1.0)],
        ("first", "replay"): [(3, 2.0)],
        ("first", "consistency"): [(3, 0.5)],
        ("first", "accuracy"): [(7, 91.25)],
        ("first", "ece"): [(7, 2.5)],
    }


def test_wandb_keeps_an_offline_run(offline):
    pytest.importorskip("wandb")
    with open_logger("wandb:forgetting", name="first", config={"lr": 0.1}) as logger:
        logger.log(3, LOSSES)
        logger.log(7, {"accuracy": 91.25})
    records = offline_records(offline)
    assert offline_history(records) == [
        (3, {name: float(v) for name, v in LOSSES.as_dict().items()}),
        (7, {"accuracy": 91.25}),
    ]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("forgetting", "first")
    assert {item.key: item.value_json for item in run.config.update}["lr"] == "0.1"


# MLflow's models use what SQLAlchemy 2.1 calls deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_reads_back_what_was_logged(offline):
    mlflow = pytest.importorskip("mlflow")
    for name in ("first", "second"):
        with open_logger("mlflow:tracking", name=name, config={"lr": 0.1, "model": "mlp"}) as logger:
            logger.log(3, LOSSES)
            logger.log(7, {"task 1 (old)/accuracy": 91.25})
    client = mlflow.MlflowClient(f"sqlite:///{offline / 'tracking' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("holdfast").experiment_id])
    assert {run.info.run_name for run in runs} == {"first", "second"}
    assert {run.info.status for run in runs} == {"FINISHED"}
    run = runs[0]
    assert run.data.params == {"lr": "0.1", "model": '"mlp"'}
    assert run.data.metrics == {
        **{name: float(v) for name, v in LOSSES.as_dict().items()},
        "task 1 _old_/accuracy": 91.25,
    }
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "replay")] == [(3, 2.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_continues_a_run(offline):
    mlflow = pytest.importorskip("mlflow")
    with open_logger("mlflow:tracking", config={"lr": 0.1}) as logger:
        logger.log(3, {"accuracy": 90.0})
    with open_logger("mlflow:tracking", config={"lr": 0.2, "more": 1}, run_id=logger.run_id) as again:
        again.log(7, {"accuracy": 91.0})
    client = mlflow.MlflowClient(f"sqlite:///{offline / 'tracking' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("holdfast").experiment_id])
    assert run.info.run_id == again.run_id == logger.run_id
    assert run.data.params == {"lr": "0.1", "more": "1"}
    assert [m.step for m in client.get_metric_history(run.info.run_id, "accuracy")] == [3, 7]


STAND_IN = """
class MlflowClient:
    def __init__(self, where):
        self.calls = CALLS.setdefault(where, [])

    def __getattr__(self, name):
        def call(*args, **named):
            self.calls.append((name, *args, *named.items()))
            return Made()
        return call


class Made:
    experiment_id = "1"
    info = property(lambda self: self)
    data = property(lambda self: self)
    run_id = "new"
    params = {"lr": "0.1"}


CALLS = {}
"""


@pytest.mark.parametrize("form", ["keyword", "target"])
def test_the_mlflow_run_that_is_continued(form, tmp_path, monkeypatch):
    """With a stand-in for MLflow: which run is written to, and that its settings are not changed."""
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text(STAND_IN)
    (tmp_path / "mlflow" / "entities.py").write_text("Metric = Param = lambda *parts: parts")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)
    target, named = ("http://there#old", {}) if form == "target" else ("http://there", {"run_id": "old"})
    with open_logger(f"mlflow:{target}", config={"lr": 0.2, "more": 1}, **named) as logger:
        logger.log(7, {"accuracy": 91.0})
    calls = sys.modules["mlflow"].CALLS["http://there"]
    for name in ("mlflow", "mlflow.entities"):
        del sys.modules[name]
    assert logger.run_id == "old"
    assert [call[:2] for call in calls if "run" in call[0] or "log" in call[0]] == [
        *(("update_run", "old"), ("get_run", "old"), ("log_batch", "old"), ("log_batch", "old")),
    ]
    assert ("log_batch", "old", ("params", [("more", "1")])) in calls
    assert calls[-1] == ("set_terminated", "old")


def test_tensorboard_has_no_run_to_continue(offline):
    with pytest.raises(hf.UsageError, match="the same folder and name continue a run"):
        open_logger("tensorboard:logs", run_id="old")


def test_a_run_is_logged_as_it_goes():
    kept = Kept()
    result = hf.run(hf.RunConfig.preset("rot-mnist", "mse", **QUICK), device="cpu", on_step=watch(kept))
    losses = [step for step, values in kept.rows if "loss/total" in values]
    # 16 minibatches a task: the log of 50 steps is never full, so the losses are read at the end of each.
    assert losses == [16, 32]
    assert {"loss/total", "loss/current", "loss/replay", "loss/consistency"} <= set(kept.rows[0][1])
    accuracies = [{key: v for key, v in values.items() if key.startswith("accuracy")} for _, values in kept.rows]
    first, last = result.matrix.tolist()
    assert accuracies == [
        {"accuracy/task 1": first[0], "accuracy/mean": first[0]},
        {"accuracy/task 1": last[0], "accuracy/task 2": last[1], "accuracy/mean": sum(last) / 2},
    ]


def test_a_run_that_continues_does_not_log_what_it_brings_along():
    kept, config = Kept(), hf.RunConfig.preset("rot-mnist", "mse")
    on_step = watch(kept)
    progress = hf.training.Progress(config, stages=3, task=1, step=70, losses={"total": 1.0}, row=[90.0, 10.0])
    on_step(progress)
    assert kept.rows == []
    progress.step, progress.losses = 71, {"total": 1.0}  # read anew, though equal
    on_step(progress)
    on_step(progress)
    assert kept.rows == [(71, {"loss/total": 1.0})]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_command_logs_to_all_places_at_once(offline, monkeypatch):
    targets = {"tensorboard": "logs", "wandb": "forgetting", "mlflow": "tracking"}
    there = [name for name in targets if find_spec(PACKAGES[name])]
    options = [word for name in there for word in ("--log", f"{name}:{targets[name]}")]
    command = ["holdfast", "run", "rot-mnist", "er", "--tasks", "2", "--set", "train_limit=300", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*command, *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    (folder,) = (offline / "runs").iterdir()
    matrix = json.loads((folder / "result.json").read_text())["accuracy_matrix"]
    name = f"rot-mnist-er-{folder.name}"
    found = scalars(offline / "logs")
    assert found[name, "accuracy/task 1"] == [(3, matrix[0][0]), (6, matrix[1][0])]
    assert [step for step, _ in found[name, "loss/total"]] == [3, 6]
    if "wandb" in there:
        history = offline_history(offline_records(offline))
        assert [(step, values["accuracy/task 1"]) for step, values in history] == [(3, matrix[0][0]), (6, matrix[1][0])]
    if "mlflow" in there:
        assert (offline / "tracking" / "mlflow.db").stat().st_size


def test_a_logger_that_fails_later_is_a_warning_and_learning_goes_on(offline, caplog):
    logger = open_logger("tensorboard:logs")
    failing = type(logger._writer)

    def full(self, *_):
        raise OSError(28, "No space left on device")

    original, failing.add_scalar = failing.add_scalar, full
    try:
        with caplog.at_level(logging.WARNING):
            logger.log(1, LOSSES)
            logger.log(2, LOSSES)
    finally:
        failing.add_scalar = original
    logger.log(3, {"total": 1.0})
    logger.close()
    assert [record.getMessage() for record in caplog.records] == [
        "learning goes on, but TensorBoard cannot be written to: [Errno 28] No space left on device"
    ]
    assert scalars(offline / "logs") == {("logs", "total"): [(3, 1.0)]}


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("tensorbord:logs", "did you mean 'tensorboard'"),
        ("tensorboard", "does not say where to log: write tensorboard:WHERE"),
        ("wandb:", "does not say where to log: write wandb:WHERE"),
    ],
)
def test_targets_are_checked(target, says):
    with pytest.raises(hf.UsageError, match=says):
        open_logger(target)


def test_settings_of_any_kind_are_logged_as_text(offline):
    """A path among them was said to be a fault of the place."""
    pytest.importorskip("tensorboard")
    with open_logger("tensorboard:logs", config={"data": Path("/data"), "loss": math.sqrt, "lr": 0.1}) as logger:
        logger.log(0, {"loss": 1.0})
    (file,) = offline.glob("logs/events*")
    assert b'"data": "/data"' in file.read_bytes()


def test_a_folder_that_mlflow_would_take_for_another_is_refused(offline):
    """Of such a folder's name, a question mark ends the path in the address of a database."""
    with pytest.raises(hf.UsageError, match=r"has % and \?, which mean something else .* Choose another place"):
        open_logger("mlflow:what? 100%")
    assert not list(offline.glob("what*"))


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_a_place_that_cannot_be_written_is_found_out_at_once(offline, kind):
    pytest.importorskip(PACKAGES[kind])
    (offline / "taken").write_text("a file")
    with pytest.raises(hf.HoldfastError, match="nothing can be logged to taken"):
        open_logger(f"{kind}:taken", name="first")


def test_wandb_without_an_account_says_how_to_stay_offline(offline, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(offline))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(offline))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(hf.HoldfastError, match="WANDB_MODE=offline"):
        open_logger("wandb:forgetting")


@pytest.mark.parametrize("kind", sorted(LOGGERS))
def test_a_missing_package_is_named_with_its_extra(kind, monkeypatch):
    needed = {"tensorboard": "torch.utils.tensorboard"}.get(kind, PACKAGES[kind])
    monkeypatch.setitem(sys.modules, needed, None)  # importing it fails from now on
    with pytest.raises(hf.HoldfastError, match=rf"pip install 'holdfast\[{kind}\]'"):
        open_logger(f"{kind}:there")
