"""Every kind of file that is read: a sound one, and what reads it."""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import holdfast as hf
from holdfast import checkpoint, results
from holdfast.analysis.findings import read_findings
from holdfast.analysis.runs import analyze_run
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.experiments import load_results
from holdfast.schema import read_json, validated
from holdfast.sweep import agenda, leases

from . import test_checkpoints, test_folders, test_results, test_sweep
from .hunt import outcome

ROOT = Path(__file__).parents[2]
CONFIG = test_results.CONFIG


class Reader(NamedTuple):
    """A kind of file."""

    path: str
    """Where it lies in the folder that is read."""
    sound: bytes
    read: Callable[[Path], Any]
    """Reads it in that folder, and uses what it read."""
    writes: bool = False
    """Whether reading may write as well, as to open a folder of samples locks it."""

    def outcome(self, content: bytes, place: Path) -> Any:
        """What came of reading a file of that content: a value, or an error for people; all else raises."""
        path = place / self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if not self.writes:
            return outcome(self.read, place)
        try:
            return self.read(place)
        except HoldfastError as error:
            return error


# --- states ---


def _written(write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "file")
        return (Path(folder) / "file").read_bytes()


def _buffer() -> hf.Reservoir:
    buffer = hf.Reservoir(5)
    buffer.add({"a": torch.ones(3, 2), "b": torch.arange(3)}, torch.arange(3), torch.ones(3, 4))
    return buffer


def _use_buffer(place: Path) -> Any:
    buffer = hf.Reservoir(5)
    buffer.load_state_dict(checkpoint.read(place / "file", "buffer").state)
    return buffer.sample(2) if buffer.stored else None


def _estimator() -> Any:
    from holdfast.estimators import ReplayClassifier

    made = ReplayClassifier(buffer_size=3, random_state=0)
    return made.partial_fit([[0.0, 1.0], [1.0, 0.0]], ["a", "b"], classes=["a", "b"])


def _use_estimator(place: Path) -> Any:
    from holdfast.estimators import ReplayClassifier

    return ReplayClassifier.load(place / "file").predict([[0.0, 1.0]])


def _use_folder(place: Path) -> Any:
    """The sound folder with one file changed."""
    for path in test_folders.GOOD.iterdir():
        if not (place / "folder" / path.name).exists():
            shutil.copy(path, place / "folder" / path.name)
    return test_folders.use(place / "folder")


# --- the files of results ---


def _use_results(place: Path) -> Any:
    (place / CONFIG.fingerprint / "result.json").write_bytes(test_results.TEXT)
    return [stored.measures for stored in load_results(place)], results.find(place, CONFIG)


def _use_logits(place: Path) -> Any:
    (place / CONFIG.fingerprint / "result.json").write_bytes(test_results.TEXT)
    return analyze_run(place / CONFIG.fingerprint)


# --- settings, queues, studies ---


def _queue(place: Path) -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from work_off import read_queue
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return read_queue(place / "queue.toml")


def _settings(place: Path) -> Any:
    try:
        return validated(RunConfig, read_json(place / "file"), "settings").fingerprint
    except ValueError as error:
        raise HoldfastError(f"refused: {error}") from error


QUEUE = """[[runs]]
what = "two runs"
experiment = "table1"
only = ["benchmark=rot-mnist", "method=er", "buffer_size=200"]
seeds = 2
set = ["lr=0.1"]
"""

LEASE = {"pid": os.getpid(), "host": socket.gethostname(), "started": "123"}

READERS = {
    "learner": Reader("file", test_checkpoints.LEARNER, lambda place: test_checkpoints.load(place / "file")),
    "run": Reader("file", test_checkpoints.RUN, lambda place: test_checkpoints.continue_run(place / "file")),
    "buffer": Reader(
        "file", _written(lambda path: checkpoint.write(path, "buffer", _buffer().state_dict())), _use_buffer
    ),
    "estimator": Reader("file", _written(lambda path: _estimator().save(path)), _use_estimator),
    "folder": Reader("folder/buffer.json", test_folders.FILES["buffer.json"], _use_folder, writes=True),
    "folder-state": Reader(
        "folder/state.safetensors", test_folders.FILES["state.safetensors"], _use_folder, writes=True
    ),
    "result": Reader("result.json", test_results.TEXT, lambda place: results.read(place).to_json()),
    "results": Reader("any.json", test_results.TEXT, lambda place: [each.config.title for each in load_results(place)]),
    "measures": Reader(f"{CONFIG.fingerprint}/measures.json", b'{"mra": 50.0}', _use_results, writes=True),
    "logits": Reader(f"{CONFIG.fingerprint}/logits.safetensors", test_results.LOGITS, _use_logits, writes=True),
    "analysis": Reader(
        "analysis.json",
        json.dumps(test_results.analysis()).encode(),
        lambda place: [found.to_json() for found in read_findings(place / "analysis.json")],
    ),
    "settings": Reader("file", json.dumps(CONFIG.to_dict()).encode(), _settings),
    "lease": Reader("lease", json.dumps(LEASE).encode(), lambda place: leases._is_abandoned(place / "lease")),
    "failure": Reader(
        f"failed/{CONFIG.fingerprint}.json",
        json.dumps(test_sweep.FAILURE).encode(),
        lambda place: agenda._recorded_error(place, CONFIG),
    ),
    "queue": Reader("queue.toml", QUEUE.encode(), _queue),
}
