"""Results of runs: what a run gave and how it came about, and how that is written to files and read again.

A result is a folder of files. Wherever a writer is killed, the folder has a whole result or does not exist.
"""

import json
import math
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast import metrics
from holdfast.config import PROTOCOL, RunConfig
from holdfast.errors import HoldfastError
from holdfast.files import ABANDONED, flush, locked, telling
from holdfast.schema import read_json, validated

__all__ = ["FROM_MATRICES", "LOGITS", "RESULT", "WEIGHTS", "RunResult", "check_writable", "environment", "find"]
__all__ += ["read", "read_tensors", "remove_scratch", "save"]

RESULT, LOGITS, WEIGHTS = "result.json", "logits.safetensors", "weights.safetensors"
FROM_MATRICES = ("accuracy", "task_il_accuracy", "forward_transfer", "backward_transfer", "forgetting")
"""The numbers of a result that are computed from its matrices."""

ADVICE = "Choose another folder with --out."


@dataclass(frozen=True)
class RunResult:
    """What a run gave, and how it came about. Matrices are in percent, NaN where not measured."""

    config: RunConfig
    matrix: Tensor
    """R (stages, T): Class-IL accuracy on task j after stage i."""
    task_matrix: Tensor
    """The same for Task-IL."""
    untrained: Tensor
    """b (T,): Class-IL accuracy of the untrained network."""
    seconds: float
    """Wall time of the whole run."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds by what they were spent on, and steps per second."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions, commit, device."""
    logits: dict[str, Tensor] = field(default_factory=dict)
    """The final model's logits and labels on each test set; stored in a file of their own."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The final model's weights by name; stored in a file of their own."""

    @property
    def accuracy(self) -> float:
        """Mean Class-IL accuracy over tasks at the end, in percent."""
        return metrics.accuracy(self.matrix)

    @property
    def task_il_accuracy(self) -> float:
        """Mean Task-IL accuracy over tasks at the end, in percent."""
        return metrics.accuracy(self.task_matrix)

    @property
    def forward_transfer(self) -> float:
        """Forward transfer in points; NaN with one task."""
        return metrics.forward_transfer(self.matrix, self.untrained)

    @property
    def shares_classes(self) -> bool:
        """Whether all tasks have the same classes (Domain-IL): then knowing the task tells nothing about the class.

        Forward transfer means something only there. Of classes that come later, a network cannot know anything yet.
        """
        return torch.equal(self.matrix.nan_to_num(-1), self.task_matrix.nan_to_num(-1))

    @property
    def backward_transfer(self) -> float:
        """Backward transfer in points; NaN with one task."""
        return metrics.backward_transfer(self.matrix)

    @property
    def forgetting(self) -> float:
        """Forgetting in points; NaN with one task."""
        return metrics.forgetting(self.matrix)

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values, without tensors: what `--json` prints and result.json holds."""
        return {
            "benchmark": self.config.benchmark,
            "method": self.config.method,
            "buffer_size": self.config.buffer_size,
            "seed": self.config.seed,
            **{name: _plain(getattr(self, name)) for name in FROM_MATRICES},
            "seconds": round(self.seconds, 3),
            "fingerprint": self.config.fingerprint,
            "protocol": PROTOCOL,
            "config": self.config.to_dict(),
            "accuracy_matrix": _plain(self.matrix.tolist()),
            "task_il_matrix": _plain(self.task_matrix.tolist()),
            "untrained": _plain(self.untrained.tolist()),
            "timing": self.timing,
            "environment": self.environment,
        }

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """The result that `to_json` described, without its tensors; a ValueError for any other values.

        A HoldfastError for a result of another protocol, or of other settings than its fingerprint says.
        """
        if isinstance(values, dict) and values.get("protocol", PROTOCOL) != PROTOCOL:
            raise HoldfastError(f"of protocol {values['protocol']}; this version computes protocol {PROTOCOL}")
        found: _ResultFile = validated(_ResultFile, values, "result")
        matrix = _percentages(found.accuracy_matrix, "accuracy_matrix")
        task_matrix = _percentages(found.task_il_matrix, "task_il_matrix")
        untrained = _percentages([found.untrained], "untrained", complete=False)[0]
        if task_matrix.shape != matrix.shape or untrained.shape != matrix.shape[1:]:
            raise ValueError("its matrices are not of one shape")
        if found.seconds < 0:
            raise ValueError(f"seconds is {found.seconds}")
        if found.fingerprint != found.config.fingerprint:
            raise HoldfastError("its settings do not belong to its fingerprint; it was edited or is of another version")
        return cls(found.config, matrix, task_matrix, untrained, float(found.seconds), found.timing, found.environment)


@dataclass(frozen=True)
class _ResultFile:
    """What result.json must hold; its other entries follow from these. None stands for NaN."""

    config: RunConfig
    fingerprint: str
    accuracy_matrix: list[list[float | None]]
    task_il_matrix: list[list[float | None]]
    untrained: list[float | None]
    seconds: float
    timing: dict[str, float]
    environment: dict[str, str | bool | float | None]


def _plain(value: Any) -> Any:
    """NaN, which JSON does not have, as None."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if math.isnan(value) else value


def _percentages(rows: list[list[float | None]], name: str, *, complete: bool = True) -> Tensor:
    """Rows of accuracies as float64, NaN for None. After the last task, every task was measured."""
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"{name} is no table")
    table = torch.tensor([[math.nan if value is None else value for value in row] for row in rows], dtype=torch.float64)
    if bool(((table < 0) | (table > 100)).any()):
        raise ValueError(f"{name} holds numbers that are no percentages")
    if complete and bool(table[-1].isnan().any()):
        raise ValueError(f"the last row of {name} is incomplete")
    return table


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, commit and device, for the record."""
    return {
        "holdfast": _version(),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
    }


def _version() -> str:
    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "source tree"


@cache
def _commit() -> str | None:
    """The commit of the checkout this package runs from, if it runs from one; "-dirty" follows if files differ."""
    package = Path(__file__).resolve().parent
    git = ["git", "-C", str(package)]
    try:
        answer = subprocess.run(
            [*git, "rev-parse", "--show-toplevel", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.split("\n")
        # An installed package may lie inside somebody else's checkout.
        if Path(answer[0]) / "src" / "holdfast" != package:
            return None
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", str(package)], timeout=5).returncode
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[1] + ("-dirty" if changed else "")


def save(result: RunResult, out: Path) -> Path:
    """Write the result under `out` in a folder named by its fingerprint, which is returned.

    A result of the same fingerprint is replaced. What was saved survives a power failure.
    """
    with telling(HoldfastError, f"the result could not be written to {out}", ADVICE):
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):  # Two processes that save one run would trip over each other.
            remove_scratch(out, age=ABANDONED)
            return _write(result, out)


def _write(result: RunResult, out: Path) -> Path:
    target = out / result.config.fingerprint
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=out))
    try:
        for name, tensors in ((WEIGHTS, result.weights), (LOGITS, result.logits)):
            if tensors:
                save_file(tensors, scratch / name)
        (scratch / RESULT).write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)  # Scratch folders and safetensors files start out private.
            flush(file)
        flush(scratch)
        if target.is_dir():
            _replace_files(scratch, target)
        else:
            scratch.rename(target)
        flush(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _replace_files(scratch: Path, target: Path) -> None:
    """Replace the files of an old result one by one, so that a result is there at every moment.

    result.json comes last: a writer killed in between leaves the old numbers beside new tensors of the same config.
    Whatever else is in the folder goes first, since it was computed from the old result.
    """
    names = [name for name in (WEIGHTS, LOGITS, RESULT) if (scratch / name).exists()]
    for path in target.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in names:
            path.unlink()
    for name in names:
        (scratch / name).replace(target / name)
    flush(target)


def remove_scratch(out: Path, fingerprint: str = 16 * "?", *, age: float = 0.0) -> None:
    """Remove the scratch folders of processes that were killed while they saved, from `age` seconds on.

    `out` must be locked.
    """
    for folder in out.glob(f".{fingerprint}-*"):
        if time.time() - folder.lstat().st_mtime >= age:
            shutil.rmtree(folder, ignore_errors=True)


def check_writable(out: Path) -> None:
    """Raise now rather than after hours of training if nothing can be written to `out`; creates the folder."""
    with telling(HoldfastError, f"nothing can be written to {out}", ADVICE):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()


def read(folder: Path, *, tensors: bool = False) -> RunResult:
    """The result in `folder`; with `tensors`, its logits and weights as well."""
    try:
        result = RunResult.from_json(read_json(folder / RESULT))
    except FileNotFoundError:
        raise HoldfastError(f"{folder} holds no result: {RESULT} is missing.") from None
    except (OSError, ValueError, HoldfastError) as error:
        raise HoldfastError(f"{folder / RESULT} is not a readable result: {str(error).rstrip('.')}.") from error
    if not tensors:
        return result
    return replace(result, logits=read_tensors(folder, LOGITS), weights=read_tensors(folder, WEIGHTS))


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The final model's LOGITS, with labels, or its WEIGHTS by name; empty if the result in `folder` has none."""
    path = folder / name
    if not path.exists():
        return {}
    with telling(HoldfastError, f"{path} is not readable"):
        if not path.is_file():
            raise OSError("it is not a regular file")
        return load_file(path)


def find(out: Path, config: RunConfig) -> RunResult | None:
    """The result of `config` under `out`, or None. The fingerprint decides, never a name."""
    folder = out / config.fingerprint
    if not (folder / RESULT).exists():
        return None
    try:
        found = read(folder)
    except HoldfastError as error:
        raise HoldfastError(f"{error} Move it away, or have the run carried out again with --force.") from error
    if found.config != config:
        raise HoldfastError(f"{folder / RESULT} was altered: it is the result of another run. Move it away.")
    return found
