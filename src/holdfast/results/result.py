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
    """The final model's logits and labels on each test set; kept in a file of their own."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The final model; kept in a file of its own."""

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
    def from_json(cls, values: dict[str, Any]) -> RunResult:
        """The result that `to_json` described; its tensors are left out."""
        matrix, task_matrix = (_table(values[name], name) for name in ("accuracy_matrix", "task_il_matrix"))
        untrained = _table([values["untrained"]], "untrained")[0]
        if task_matrix.shape != matrix.shape or untrained.shape != matrix.shape[1:]:
            raise ValueError("its matrices are not of one shape")
        return cls(
            config=_config(values["config"]),
            matrix=matrix,
            task_matrix=task_matrix,
            untrained=untrained,
            seconds=float(_number(values["seconds"], "seconds")),
            timing={name: _number(value, name) for name, value in dict(values["timing"]).items()},
            environment=dict(values["environment"]),
        )


def _plain(value: Any) -> Any:
    """NaN, which JSON does not have, as None."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if math.isnan(value) else value


def _table(values: Any, name: str) -> Tensor:
    """Rows of numbers as float64; None, which stands for NaN in JSON, as NaN again."""
    if not isinstance(values, list) or not values or not all(isinstance(row, list) and row for row in values):
        raise ValueError(f"{name} is no table")
    rows = [[math.nan if value is None else _number(value, name) for value in row] for row in values]
    return torch.tensor(rows, dtype=torch.float64)


def _number(value: Any, name: str) -> Any:
    """The number itself; a text that looks like one, or one too large to calculate with, is refused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is no number: {value!r}")
    float(value)
    return value


def _config(values: Any) -> RunConfig:
    config = RunConfig.from_dict(values)
    for name in ("benchmark", "method", "model"):
        if not isinstance(getattr(config, name), str):
            raise ValueError(f"{name} is no text")
    return config


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
