"""How a step is executed: eagerly, or on a GPU as one captured graph around a compiled network."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from holdfast.data import ImageSet, data_root
from holdfast.errors import TrainingError, UsageError
from holdfast.learners import Learner, Losses

__all__ = ["CapturedEngine", "Engine", "LossLog", "make_engine", "prepare_cuda"]

log = logging.getLogger(__name__)


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

    def _execute(self, indices: Tensor) -> None:
        losses = self.learner.observe(self._images.index_select(0, indices), self._labels.index_select(0, indices))
        self.log.record(losses)


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    indices: Tensor
    """Where a replay looks for the samples of its step."""


class CapturedEngine(Engine):
    """Executes each step as one CUDA graph: everything from indexing the data to the buffer's update.

    A graph is captured for every combination of batch size and samples stored that recurs; the first steps of each
    run eagerly, which also warms up what capture needs. The network is compiled for full batches only: the short last
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
        self._compiled = torch.compile(learner.model, dynamic=False) if compiled else None
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
            self._graphs.clear()

    def step(self, indices: Tensor) -> None:
        """One step on these samples."""
        buffer = self.learner.buffer
        key = (len(indices), buffer.stored if buffer else 0)
        captured = self._graphs.get(key)
        if captured is not None:
            captured.indices.copy_(indices)
            captured.graph.replay()
            if buffer:
                buffer.offered += len(indices)  # the host's count, which a replay does not touch
        else:
            self._first_steps(key, indices)
        self.log.steps += 1

    def _first_steps(self, key: tuple[int, int], indices: Tensor) -> None:
        settled = self.learner.buffer is None or self.learner.buffer.stored == self.learner.buffer.capacity
        self.learner.network = self.learner.model
        if self._compiled is not None and settled and len(indices) == self._batch_size:
            self.learner.network = self._compiled
        self._uses[key] += 1
        if self._uses[key] <= self.WARMUP or not self._capturable:
            self._execute(indices)
            return
        try:
            captured = self._capture(indices)
        except RuntimeError as error:
            self._capturable = False
            first_line = str(error).partition("\n")[0]
            log.warning("this model's step cannot be captured in a CUDA graph (%s); it runs eagerly.", first_line)
            torch.cuda.synchronize(self.device)
            self._execute(indices)
            return
        self._graphs[key] = captured
        captured.graph.replay()

    def _capture(self, indices: Tensor) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        static = indices.clone()
        offered = self.learner.buffer.offered if self.learner.buffer else 0
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream(self.device)):
                self._execute(static)
        except RuntimeError:
            if self.learner.buffer:
                self.learner.buffer.offered = offered
            raise
        return _Graph(graph, static)


def make_engine(
    learner: Learner, device: torch.device, generators: Sequence[torch.Generator], batch_size: int
) -> Engine:
    """The engine for a device: eager on a CPU, captured on a GPU; networks with convolutions are compiled there."""
    if device.type != "cuda":
        return Engine(learner, device)
    prepare_cuda()
    convolutions = any(isinstance(module, nn.Conv2d) for module in learner.model.modules())
    return CapturedEngine(learner, device, generators, batch_size=batch_size, compiled=convolutions)


def prepare_cuda() -> None:
    """Process-wide settings: let cuDNN choose its fastest kernels, keep compiled code across processes."""
    torch.backends.cudnn.benchmark = True
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(data_root() / "compiled"))
