"""How a step is executed: eagerly, or on a GPU as one captured graph around a compiled network."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.data import ImageSet, data_root
from holdfast.errors import TrainingError, UsageError
from holdfast.learners import BfloatTwin, Learner, Losses, PlainSgd
from holdfast.rng import global_generators, renew

__all__ = ["CapturedEngine", "Engine", "LossLog", "make_engine", "prepare_cuda"]

log = logging.getLogger(__name__)

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters in malloc.h


class LossLog:
    """The loss terms of the last steps, kept on the device and read every `interval` steps in one go.

    A loss that is not finite is therefore noticed at the next reading, with the exact step at which it arose.
    """

    def __init__(self, device: torch.device, interval: int) -> None:
        self.interval = interval
        self.steps = 0
        self._rows = torch.zeros(interval, len(Losses._fields), device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)

    def record(self, losses: Losses) -> None:
        """Keep one step's terms. Device work only, so that it can be part of a captured step."""
        self._rows.index_copy_(0, self._at, torch.stack(losses)[None])
        self._at.add_(1).remainder_(self.interval)

    def state_dict(self) -> dict[str, Any]:
        """The terms not yet read and how many steps there were; the tensors are the log's own."""
        return {"steps": self.steps, "rows": self._rows, "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another log was; in place, since captured steps write to fixed addresses."""
        self.steps = state["steps"]
        self._rows.copy_(state["rows"])
        self._at.copy_(state["at"])

    def due(self) -> bool:
        """Whether the log is full and waits to be read."""
        return self.steps % self.interval == 0

    def read(self) -> dict[str, float]:
        """Mean of each term since the last reading; raises if one was not finite. Waits for the device."""
        fresh = (self.steps - 1) % self.interval + 1 if self.steps else 0
        rows = self._rows[:fresh].tolist()
        for offset, row in enumerate(rows):
            if not all(map(math.isfinite, row)):
                terms = ", ".join(f"{name} {value:.4g}" for name, value in zip(Losses._fields, row, strict=True))
                raise TrainingError(
                    f"the loss is no longer finite at step {self.steps - fresh + offset + 1} ({terms}). "
                    "Try a smaller learning rate."
                )
        means = [sum(column) / fresh for column in zip(*rows, strict=True)] if fresh else []
        return dict(zip(Losses._fields, means, strict=False))


class Engine:
    """Executes the steps of one run eagerly, on any device."""

    def __init__(self, learner: Learner, device: torch.device, *, interval: int = 50) -> None:
        self.learner, self.device = learner, device
        self.log = LossLog(device, interval)
        self.at_full_speed: float | None = None
        """When (time.perf_counter) steps began to run as fast as they will: nothing left to compile or capture."""
        self._images = self._labels = torch.empty(0)

    def load(self, data: ImageSet, classes: int) -> None:
        """Make `data` the training data of the steps that follow."""
        if len(data.labels) and (data.labels.min() < 0 or data.labels.max() >= classes):
            raise UsageError(f"training labels lie outside the model's outputs 0..{classes - 1}.")
        self._images, self._labels = data.images.to(self.device), data.labels.to(self.device)

    def step(self, indices: Tensor) -> None:
        """One step on these samples."""
        self._execute(indices)
        self.log.steps += 1
        self.at_full_speed = self.at_full_speed or time.perf_counter()

    def _execute(self, indices: Tensor) -> None:
        losses = self.learner.observe(self._images.index_select(0, indices), self._labels.index_select(0, indices))
        self.log.record(losses)


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    indices: Tensor
    """Where a replay looks for the samples of its step."""


class _Part(NamedTuple):
    """A pure function that a step calls, as attribute `name` of `owner`, and its compiled form."""

    owner: object
    name: str
    plain: Callable[..., Any]
    compiled: Callable[..., Any]


class CapturedEngine(Engine):
    """Executes each step as one CUDA graph: everything from indexing the data to the buffer's update.

    A graph is captured for every combination of batch size and samples stored that recurs; the first steps of each
    run eagerly, which also warms up what capture needs. With `compiled`, the network (unless it has an attribute
    `compiles` that is False) and the other pure functions of a step are compiled, for full batches only: the short last
    batch of an epoch is too rare to pay for it. Runs on the current stream, which must not be the default one.
    """

    WARMUP = 3

    def __init__(
        self,
        learner: Learner,
        device: torch.device,
        generators: Sequence[torch.Generator],
        *,
        batch_size: int,
        compiled: bool,
        interval: int = 250,
    ) -> None:
        super().__init__(learner, device, interval=interval)
        self._generators = generators
        self._batch_size = batch_size
        self._parts = _compile(learner) if compiled else []
        self._uses: Counter[tuple[int, int]] = Counter()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._capturable = True

    def load(self, data: ImageSet, classes: int) -> None:
        """Make `data` the training data of the steps that follow."""
        images, labels = self._images, self._labels
        super().load(data, classes)
        if images.shape == self._images.shape:
            # Captured steps read from the addresses they were captured with.
            self._images, self._labels = images.copy_(self._images), labels.copy_(self._labels)
        else:
            # A pool whose graphs are gone cannot be captured into again.
            self._graphs.clear()
            self._uses.clear()
            self._pool = torch.cuda.graph_pool_handle()

    def step(self, indices: Tensor) -> None:
        """One step on these samples."""
        buffer = self.learner.buffer
        key = (len(indices), 0 if buffer is None else buffer.stored)
        captured = self._graphs.get(key)
        if captured is not None:
            captured.indices.copy_(indices)
            captured.graph.replay()
            if buffer is not None:
                buffer.recount(buffer.offered + len(indices))  # the host's count, which a replay does not touch
        else:
            self._first_steps(key, indices)
        self.log.steps += 1

    def _first_steps(self, key: tuple[int, int], indices: Tensor) -> None:
        """A step of a kind that has not been captured: eagerly, or by capturing it now."""
        buffer = self.learner.buffer
        usual = len(indices) == self._batch_size and (buffer is None or buffer.stored == buffer.capacity)
        for part in self._parts:
            setattr(part.owner, part.name, part.compiled if usual else part.plain)
        self._uses[key] += 1
        if self._uses[key] <= self.WARMUP or not self._capturable:
            self._execute(indices)
            return
        try:
            self._graphs[key] = self._capture(indices)
        except RuntimeError as error:
            self._capturable = False
            self._graphs.clear()  # they draw from the generators' states before the attempt
            log.warning("this step cannot be captured in a CUDA graph, it runs eagerly: %s", str(error).split("\n")[0])
            self._execute(indices)
        else:
            self._graphs[key].graph.replay()
            self.at_full_speed = self.at_full_speed or (time.perf_counter() if usual else None)

    def _capture(self, indices: Tensor) -> _Graph:
        """Record a step without executing it."""
        drawn = [*self._generators, *global_generators(self.device).values()]
        states = [(each, each.get_state()) for each in drawn if each.device.type == "cuda"]
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        static = indices.clone()
        buffer = self.learner.buffer
        offered = 0 if buffer is None else buffer.offered
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream(self.device)):
                self._execute(static)
        except RuntimeError:
            torch.cuda.synchronize(self.device)
            for generator, state in states:
                renew(generator, state)
            if buffer is not None:
                buffer.recount(offered)
            raise
        return _Graph(graph, static)


def _compile(learner: Learner) -> list[_Part]:
    """The pure functions of a learner's step with their compiled forms; a bfloat16 network becomes a twin first."""
    if learner.reduced and isinstance(learner.optimizer, PlainSgd):
        twin = BfloatTwin(learner.model, learner.optimizer.lr)
        learner.optimizer, learner.network = twin, twin.network
    named: list[tuple[object, str]] = [(learner, "network")] if getattr(learner.model, "compiles", True) else []
    for owner in (learner, learner.optimizer, learner.buffer, learner.augment):
        named += [(owner, name) for name in getattr(owner, "compilable", ())]
    plain = [(owner, name, getattr(owner, name)) for owner, name in named]
    return [_Part(owner, name, part, torch.compile(part, dynamic=False)) for owner, name, part in plain]


def make_engine(
    learner: Learner, device: torch.device, generators: Sequence[torch.Generator], batch_size: int
) -> Engine:
    """The engine for a device: eager on a CPU, captured on a GPU; networks with convolutions are compiled there."""
    if device.type != "cuda":
        prepare_cpu()
        return Engine(learner, device)
    prepare_cuda()
    convolutions = any(isinstance(module, nn.Conv2d) for module in learner.model.modules())
    return CapturedEngine(learner, device, generators, batch_size=batch_size, compiled=convolutions)


@cache
def prepare_cpu() -> None:
    """Process-wide: keep freed memory instead of handing it back to the system and faulting it in again.

    A step allocates and frees a few megabytes; by default glibc returns them every time, which cost 200 page faults
    and an eighth of the time of a rot-mnist step.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)


def prepare_cuda() -> None:
    """Process-wide settings: let cuDNN choose its fastest kernels, keep compiled code across runs and processes."""
    torch.backends.cudnn.benchmark = True
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(data_root() / "compiled"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(data_root() / "compiled" / "triton"))
    # Advice on matrix products in float32, of which the networks that are compiled have one.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    # Every method of a fleet compiles the same functions for other constants; the default keeps only eight.
    torch._dynamo.config.recompile_limit = 64
