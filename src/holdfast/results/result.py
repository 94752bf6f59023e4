"""What a run gave, and how it came about."""

from __future__ import annotations

import math
import platform
import subprocess
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from holdfast import metrics
from holdfast.config import PROTOCOL, RunConfig
from holdfast.schema import validated

__all__ = ["RunResult", "environment"]


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
            "accuracy": _plain(self.accuracy),
            "task_il_accuracy": _plain(self.task_il_accuracy),
            "forward_transfer": _plain(self.forward_transfer),
            "backward_transfer": _plain(self.backward_transfer),
            "forgetting": _plain(self.forgetting),
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
    def from_json(cls, values: Any) -> RunResult:
        """The result that `to_json` described, without its tensors; a ValueError for any other values."""
        found: _ResultFile = validated(_ResultFile, values, "result")
        matrix = _percentages(found.accuracy_matrix, "accuracy_matrix")
        task_matrix = _percentages(found.task_il_matrix, "task_il_matrix")
        untrained = _percentages([found.untrained], "untrained", complete=False)[0]
        if task_matrix.shape != matrix.shape or untrained.shape != matrix.shape[1:]:
            raise ValueError("its matrices are not of one shape")
        if found.seconds < 0:
            raise ValueError(f"seconds is {found.seconds}")
        return cls(found.config, matrix, task_matrix, untrained, found.seconds, found.timing, found.environment)


@dataclass(frozen=True)
class _ResultFile:
    """What result.json must hold; its other entries follow from these. None stands for NaN."""

    config: RunConfig
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
    package = Path(__file__).resolve().parents[1]
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
