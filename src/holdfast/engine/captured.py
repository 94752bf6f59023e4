"""Steps executed as CUDA graphs, around compiled functions."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.data import ImageSet
from holdfast.engine.eager import Engine
from holdfast.learners import Learner
from holdfast.pure import compiled_calls
from holdfast.rng import global_generators, renew

__all__ = ["CapturedEngine"]

log = logging.getLogger(__name__)


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    indices: Tensor
    """Where a replay looks for the samples of its step."""
    offered: int
    """How many samples a replay offers to the buffer."""


class CapturedEngine(Engine):
    """Executes each step as one CUDA graph: everything from indexing the data to the buffer's update.

    A graph is captured for every combination of batch size and number of stored samples that recurs. Its first steps
    run eagerly, which also warms up what the capture needs. With `compiled`, pure functions of a step run compiled, for
    full batches only: the short last batch of an epoch is too rare to pay for it. Runs on the current stream, which
    must not be the default one.
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
    ) -> None:
        super().__init__(learner, device, interval=250)
        extra = [each for each in learner.extra_state().values() if isinstance(each, torch.Generator)]
        self._generators = [*generators, *extra]
        self._batch_size = batch_size
        self._compiled = compiled
        self._uses: Counter[tuple[int, int]] = Counter()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._capturable = learner.capturable

    def load(self, data: ImageSet, classes: int) -> None:
        """Make `data` the training data of the steps that follow."""
        images, labels = self._images, self._labels
        super().load(data, classes)
        if images.shape == self._images.shape:
            # Captured steps read from the addresses they were captured with.
            self._images, self._labels = images.copy_(self._images), labels.copy_(self._labels)
        else:
            # Memory of the engine's own: the next task is copied into it, and `data` may belong to the benchmark.
            self._images, self._labels = self._images.clone(), self._labels.clone()
            self.learner_changed()

    def unload(self) -> None:
        """Nothing: captured steps read from this memory, and the next task is copied into it."""

    def learner_changed(self) -> None:
        """Drop the graphs: they execute the learner as it was, on the data that it had."""
        self._graphs.clear()
        self._uses.clear()
        self._pool = torch.cuda.graph_pool_handle()  # a pool whose graphs are gone cannot be captured into again

    def step(self, indices: Tensor) -> None:
        """One step on these samples."""
        buffer = self.learner.buffer
        key = (len(indices), 0 if buffer is None else buffer.stored)
        captured = self._graphs.get(key)
        if captured is not None:
            captured.indices.copy_(indices)
            captured.graph.replay()
            if buffer is not None:
                buffer.offered += captured.offered  # the host's count: the replay moved the device's alone
        else:
            self._first_steps(key, indices)
        self.log.steps += 1

    def _first_steps(self, key: tuple[int, int], indices: Tensor) -> None:
        """A step of a kind that has not been captured: eagerly, or by capturing it now."""
        buffer = self.learner.buffer
        usual = len(indices) == self._batch_size and (buffer is None or buffer.stored == buffer.capacity)
        self._uses[key] += 1
        with compiled_calls(usual and self._compiled):
            if self._uses[key] <= self.WARMUP or not self._capturable:
                self._execute(indices)
                return
            try:
                self._graphs[key] = self._capture(indices)
            except RuntimeError as error:
                self._capturable = False
                self._graphs.clear()  # they draw from the generators' states before the attempt
                reason = str(error).split("\n")[0]
                log.warning("this step cannot be captured in a CUDA graph, it runs eagerly: %s", reason)
                self._execute(indices)
                return
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
                buffer.offered = offered  # nothing was executed, but the host has counted
            raise
        return _Graph(graph, static, 0 if buffer is None else buffer.offered - offered)
