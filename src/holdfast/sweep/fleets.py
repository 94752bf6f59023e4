"""Several runs at once on one device, in this process: their steps take turns, their work on a GPU overlaps."""

import time
from collections.abc import Callable, Generator, Iterator

import torch

from holdfast import checkpoint
from holdfast.benchmarks import Benchmark, make_benchmark
from holdfast.config import RunConfig
from holdfast.data import data_root
from holdfast.devices import choose_device
from holdfast.plugins import import_plugins
from holdfast.results import RunResult
from holdfast.run_state import Checkpointer, Progress
from holdfast.sweep import runner
from holdfast.sweep.deadline import Deadline
from holdfast.sweep.runner import Emit, Event, Job
from holdfast.training import train

__all__ = ["FleetRunner", "Member"]


class Member:
    """One run. On a GPU it has a stream of its own."""

    def __init__(
        self, config: RunConfig, benchmark: Benchmark, device: torch.device, checkpointer: Checkpointer | None = None
    ) -> None:
        self.config = config
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self._steps: Generator[Progress, None, RunResult] = train(config, benchmark, device, checkpointer)

    def step(self) -> Progress | RunResult:
        """Advance by one step; returns the result once the run has ended."""
        with torch.cuda.stream(self.stream):  # without effect on a CPU, where the stream is None
            try:
                return next(self._steps)
            except StopIteration as end:
                result: RunResult = end.value
                return result


class _Size:
    """The number of runs at once: grows by one while that makes all of them together faster."""

    SETTLE, WINDOW, GAIN = 600, 400, 1.05  # steps per run to wait and to measure; gain that is worth another run

    def __init__(self, given: int | None, device: torch.device) -> None:
        self.now, self._device = given or 1, device
        self._growing = given is None
        self._best = 0.0
        self._steps = 0
        self._began = 0.0

    def stepped(self) -> None:
        """Count one step of any run."""
        if not self._growing:
            return
        self._steps += 1
        if self._steps == self.SETTLE * self.now:
            self._began = time.perf_counter()
        elif self._steps == (self.SETTLE + self.WINDOW) * self.now:
            rate = self.WINDOW * self.now / (time.perf_counter() - self._began)
            if rate < self._best * self.GAIN or not self._room():
                self._growing = False
                return
            self._best, self._steps = rate, 0
            self.now += 1

    def _room(self) -> bool:
        """Whether the GPU's memory has room for one more run of the size of the present ones."""
        if self._device.type != "cuda":
            return False  # on a CPU, runs gain nothing from taking turns
        free, total = torch.cuda.mem_get_info(self._device)
        return free > 1.5 * (total - free) / self.now


class FleetRunner:
    """A fleet of `size` runs on one GPU; without `size`, as many as make it faster.

    Each run gives the result it would give alone. A run that fails does not affect the others. If `until` is given, a
    moment of `time.monotonic`, runs that cannot end by then wait for those that can, see `Deadline`; the fleet does not
    stop by itself.
    """

    def __init__(self, size: int | None = None, until: float | None = None) -> None:
        self.size, self.until = size, until
        self._members: dict[Member, Checkpointer] = {}
        self._stopping = False

    def request_stop(self) -> None:
        """Let every run finish its step and write its state; KeyboardInterrupt follows."""
        self._stopping = True
        for checkpointer in list(self._members.values()):
            checkpointer.request_stop()

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """See `Runner`."""
        import_plugins(job.plugins, job.folder)
        device = choose_device(job.device)
        self._members, self._stopping = {}, False
        size, tell, deadline = _Size(self.size, device), runner.throttled(emit), Deadline(self.until)
        more, ask_at = True, 0.0

        def has_room() -> bool:
            return len(self._members) < size.now and not self._stopping and deadline.has_time_for_another()

        def start(config: RunConfig) -> None:
            try:
                benchmark = make_benchmark(config, data_root(job.data), device)
                checkpointer = runner.make_checkpointer(config, job, device)
                self._members[Member(config, benchmark, device, checkpointer)] = checkpointer
            except Exception as error:  # a plugin's benchmark may raise anything
                emit(runner.failure(config, error))
            if self._stopping:
                self.request_stop()  # the signal may have come before this run was among the members

        while self._members or (more and not self._stopping):
            if more and time.monotonic() >= ask_at:
                more = runner.hand_out(configs, has_room, start, emit)
                ask_at = time.monotonic() + runner.POLL if has_room() else 0.0
            if not self._members and more:
                time.sleep(runner.POLL)
                emit(None)
            for member in list(self._members):
                if member in deadline.waiting and not self._stopping:
                    continue
                try:
                    ended = _step(member, size, deadline, tell, job)
                except KeyboardInterrupt as stop:
                    if not stop.args:  # Ctrl-C in the middle of a step has no message, a checkpointer's stop has one
                        raise
                    del self._members[member]
                    continue
                if ended:
                    del self._members[member]
                    deadline.ended(member)
                    emit(ended)
        if self._stopping:
            raise KeyboardInterrupt


def _step(
    member: Member, size: _Size, deadline: Deadline, tell: Callable[[Progress], bool | None], job: Job
) -> Event | None:
    """One step of a run; returns how the run ended, or None if it goes on. A result is saved here."""
    try:
        news = member.step()
        if isinstance(news, RunResult):
            runner.save(news, job)
            return Event("done", member.config, 1.0)
        size.stepped()
        deadline.stepped(member, news)
    except Exception as error:  # a plugin's method may raise anything, a device may be out of memory
        return runner.failure(member.config, error)
    if not tell(news):
        return None
    checkpoint.discard(runner.checkpoint_path(job.out, member.config))
    return Event("abandoned", member.config)
