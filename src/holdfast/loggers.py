"""Loggers for the numbers of a run while it goes on: TensorBoard, Weights & Biases, MLflow. Each needs its extra.

    with open_logger("tensorboard:logs") as logger:
        for step, (x, y) in enumerate(stream):
            losses = learner.observe(x, y)
            if step % 50 == 0:                # reading the losses waits for the device
                logger.log(step, losses)

`hf.run(config, on_step=watch(logger))` logs a run; so does `holdfast run --log tensorboard:logs`.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol, Self

from holdfast.errors import HoldfastError, UsageError, needing
from holdfast.learners import Losses
from holdfast.registry import Registry
from holdfast.training import Progress

__all__ = ["LOGGERS", "Logger", "MLflow", "TensorBoard", "WeightsAndBiases", "open_logger", "watch"]

log = logging.getLogger(__name__)

Values = Mapping[str, Any] | Losses
"""Named numbers: floats or 0-d tensors. None stands for a missing number and is left out."""


class Logger(Protocol):
    """The interface of a logger; write your own with these two methods."""

    def log(self, step: int, values: Values) -> None:
        """Log named numbers of one step."""

    def close(self) -> None:
        """Write what is not yet written; nothing is logged afterwards."""


LOGGERS: Registry[Callable[..., Logger]] = Registry("logger")
"""Constructors (where, name of the run, its settings) -> logger."""


def open_logger(
    target: str, *, name: str = "", config: Mapping[str, Any] | None = None, run_id: str | None = None
) -> Any:
    """The logger for `target`, KIND:WHERE, for instance `tensorboard:logs`; also a context manager.

    The run appears there with the name `name` and the settings `config`. With `run_id`, the logger continues the run of
    MLflow or Weights & Biases whose `logger.run_id` that was; so does the target KIND:WHERE#RUN_ID.
    """
    make, kind, where = _parse(target)
    if run_id is None and kind in ("mlflow", "wandb"):
        where, _, run_id = where.partition("#")
    continued = {"run_id": run_id} if run_id else {}
    return make(where, name=name, config=dict(config or {}), **continued)


def check_targets(targets: Iterable[str]) -> None:
    """Raise unless all are of the form KIND:WHERE, with a known KIND; nothing is opened."""
    for target in targets:
        _parse(target)


def _parse(target: str) -> tuple[Callable[..., Logger], str, str]:
    """The constructor, KIND and WHERE."""
    kind, _, where = target.partition(":")
    make = LOGGERS[kind]
    if not where:
        raise UsageError(f"'{target}' does not say where to log: write {kind}:WHERE. {LOGGERS.describe(kind)}")
    return make, kind, where


def watch(logger: Logger) -> Callable[[Progress], None]:
    """A callback for `run(on_step=...)` that logs mean losses when they were read, and accuracies after every task."""
    seen: list[Any] = []

    def on_step(progress: Progress) -> None:
        now = (progress.losses, progress.row)
        before = seen[-1] if seen else now  # the numbers that a continued run starts with were logged before it stopped
        seen[:] = [now]
        values: dict[str, float] = {}
        if progress.losses is not None and progress.losses is not before[0]:
            values |= {f"loss/{term}": value for term, value in progress.losses.items()}
        if progress.row is not None and progress.row is not before[1]:
            known = progress.row[: progress.task + 1] if progress.task + 1 < progress.stages else progress.row
            values |= {f"accuracy/task {number}": value for number, value in enumerate(known, start=1)}
            values["accuracy/mean"] = sum(known) / len(known)
        if values:
            logger.log(progress.step, values)

    return on_step


class _Friend:
    """A logger of another package. If a number cannot be written, it warns once and learning goes on."""

    kind, name = "", ""
    """The name in `LOGGERS`, which is also that of the extra, and the package's own name."""
    advice = "Choose another place."
    run_id: str | None = None
    """By which a later logger can continue the run; None if the package has no such name."""
    _warned = False

    def __init__(
        self, where: str, *, name: str = "", config: Mapping[str, Any] | None = None, run_id: str | None = None
    ) -> None:
        self.run_id = run_id
        try:
            with needing(self.kind, f"logging to {self.name} needs a package that is not installed"):
                self._open(where, name, dict(config or {}))
        except HoldfastError:
            raise
        except Exception as error:  # the packages raise errors of their own
            reason = str(getattr(error, "strerror", None) or error).rstrip(".")
            raise HoldfastError(f"nothing can be logged to {where}: {reason}. {self.advice}") from error

    def log(self, step: int, values: Values) -> None:
        """Log named numbers of one step; tensors are read, which waits for the device."""
        named = values.as_dict() if isinstance(values, Losses) else values
        numbers = {key: float(value) for key, value in named.items() if value is not None}
        self._guarded(lambda: self._write(step, numbers))

    def close(self) -> None:
        """Write what is not yet written."""
        self._guarded(self._close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if not self._warned:
                log.warning("learning goes on, but %s cannot be written to: %s", self.name, error)
            self._warned = True

    _open: Callable[[str, str, dict[str, Any]], None]
    _write: Callable[[int, dict[str, float]], None]
    _close: Callable[[], None]


@LOGGERS.register("tensorboard", "tensorboard:DIR writes event files to DIR.")
class TensorBoard(_Friend):
    """Event files in the folder `where`; those of a named run in a subfolder of that name."""

    kind, name = "tensorboard", "TensorBoard"

    def _open(self, where: str, name: str, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.run_id:
            raise UsageError("TensorBoard has no run_id: the same folder and name continue a run.")
        self._writer = SummaryWriter(str(Path(where) / name))
        if config:
            text = json.dumps(config, indent=1, default=str)
            self._writer.add_text("config", indent(text, "    "))  # shown as a block of code

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def _close(self) -> None:
        self._writer.close()


@LOGGERS.register("wandb", "wandb:PROJECT makes a run in PROJECT; with WANDB_MODE=offline, in the folder wandb.")
class WeightsAndBiases(_Friend):
    """A run in the project `where`. W&B's own settings decide whether it is sent; WANDB_MODE=offline does not send."""

    kind, name = "wandb", "Weights & Biases"
    advice = "Log in with 'wandb login', or leave the run on this machine with WANDB_MODE=offline."

    def _open(self, where: str, name: str, config: dict[str, Any]) -> None:
        import wandb

        continued: dict[str, Any] = {"id": self.run_id, "resume": "must"} if self.run_id else {}
        self._run = wandb.init(project=where, name=name or None, config=config, reinit="create_new", **continued)
        self.run_id = self._run.id

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def _close(self) -> None:
        self._run.finish()


@LOGGERS.register(
    "mlflow", "mlflow:DIR writes runs to DIR/mlflow.db; an address such as http://HOST:PORT is used as is."
)
class MLflow(_Friend):
    """A run of the experiment "holdfast": in a database in the folder `where`, or on the server at that address.

    `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db` shows the database.
    """

    kind, name = "mlflow", "MLflow"

    def _open(self, where: str, name: str, config: dict[str, Any]) -> None:
        local = "://" not in where
        folder = Path(where).resolve()
        if local and (odd := set("?%#").intersection(str(folder))):
            raise UsageError(
                f"the name of the folder {folder} has {' and '.join(sorted(odd))}, which mean something else in the "
                f"address of MLflow's database. {self.advice}"
            )
        if local:
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow reports its use by default
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        if local:
            Path(where).mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}" if local else where)
        found = self._client.get_experiment_by_name("holdfast")
        artifacts = (folder / "artifacts").as_uri() if local else None
        experiment = found.experiment_id if found else self._client.create_experiment("holdfast", artifacts)
        if self.run_id is None:
            self.run_id = self._client.create_run(experiment, run_name=name or None).info.run_id
        else:
            self._client.update_run(self.run_id, status="RUNNING")
        known = self._client.get_run(self.run_id).data.params  # MLflow refuses to change a setting
        params = [Param(key, json.dumps(value, default=str)) for key, value in config.items() if key not in known]
        self._client.log_batch(self.run_id, params=params)

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        now = int(1000 * time.time())
        # MLflow takes no other characters in names.
        metrics = [self._metric(re.sub(r"[^\w\-. /:]", "_", key), value, now, step) for key, value in numbers.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _close(self) -> None:
        self._client.set_terminated(self.run_id)
