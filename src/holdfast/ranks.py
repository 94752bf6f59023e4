"""The processes of one job: they compare counts, send rows to each other, and fail together."""

import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast import errors
from holdfast.errors import HoldfastError, TrainingError, UsageError
from holdfast.rng import derive_seed, restore

__all__ = ["Meeting", "Ranks", "to_device"]

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a rank waits for the others before it says so."""

TAG = int.from_bytes(b"hold")
"""Marks our messages between the hosts, so that they are not taken for the program's own."""


@dataclass
class Meeting:
    """What a rank tells the others in `Ranks.together`, and what it learns from them."""

    count: int = 0
    """How many samples this rank has, or asks for."""
    form: str = ""
    """A text that must be the same on all ranks."""
    counts: list[int] = field(default_factory=list)
    """After the block: the count of every rank, in order."""


class Ranks:
    """The processes of one job, as torchrun starts them.

    Rows are sent through the given process group (NCCL between GPUs). Counts and errors are sent through another one
    between the hosts (gloo), so that no step has to wait for a GPU to learn them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or (dist.group.WORLD if dist.is_available() else None)
        if group is None or not dist.is_initialized():
            raise UsageError(
                "there is no process group: start the program with torchrun, and call "
                "torch.distributed.init_process_group() first."
            )
        self.group = group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.hosts = self.group
        if "cpu:" not in dist.get_backend_config(self.group):
            self.hosts = dist.new_group(dist.get_process_group_ranks(self.group), backend="gloo")
        self._since: float | None = None
        """When (time.monotonic) this rank began to wait for others."""
        if self.size > 1:
            Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say so if what is done in the block, with the other ranks, takes longer than `PATIENCE`."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    @contextmanager
    def together(self, action: str) -> Iterator[Meeting]:
        """Each rank does its own part in the block; then all of them continue, or all of them raise.

        They raise if one rank raised, if their actions differ, or if their forms differ. Do not wait for another rank
        inside the block. The rank that failed raises its own error, the others one of its type that names the rank.
        """
        meeting, problem = Meeting(), None
        try:
            yield meeting
        except HoldfastError as error:
            problem = error
        # Texts are compared by their hashes.
        numbers = [problem is not None, derive_seed(0, action), derive_seed(0, meeting.form), meeting.count]
        failed, actions, forms, counts = torch.stack(self._gather(torch.tensor(numbers))).T.tolist()
        if any(failed):
            culprit = failed.index(1)
            kind, _, message = self._texts(f"{type(problem).__name__}\n{problem}")[culprit].partition("\n")
            raise problem or getattr(errors, kind, HoldfastError)(f"rank {culprit} failed: {message}")
        for what, hashes, text in (("what they do", actions, action), ("what they bring", forms, meeting.form)):
            if len(set(hashes)) > 1:
                told = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(self._texts(text)))
                raise UsageError(
                    f"the ranks differ in {what}: {told}. "
                    "Give all of them the same settings, the same steps, and data of one form."
                )
        meeting.counts = counts

    def ship(self, rows: Tensor, origin: Tensor, destination: Tensor) -> Tensor:
        """Send rows between ranks: row i of a list that all ranks know goes from rank origin[i] to rank destination[i].

        `rows` (B, bytes) uint8 are the rows that start here; the rows that end here are returned, both in the order of
        the list. `origin` and `destination` are int64 in host memory.
        """
        leaving, coming = destination[origin == self.rank], origin[destination == self.rank]
        arrived = rows.new_empty(len(coming), rows.shape[1])
        if len(origin) == 0:  # the same on every rank, so no rank waits
            return arrived
        sorted_rows = rows[to_device(leaving.argsort(stable=True), rows.device)]
        sent, received = (ends.bincount(minlength=self.size).tolist() for ends in (leaving, coming))
        if rows.device.type == "cpu":
            self._exchange(torch.split(sorted_rows, sent), torch.split(arrived, received))
        else:
            with self._contact():
                dist.all_to_all_single(arrived, sorted_rows, received, sent, group=self.group)
        # The rows arrive rank by rank. The second argsort inverts the first.
        return arrived[to_device(coming.argsort(stable=True).argsort(), rows.device)]

    def gather(self, data: Tensor) -> list[Tensor]:
        """Every rank's bytes, (any length,) uint8 in host memory."""
        lengths = [int(length) for length in self._gather(torch.tensor([len(data)]))]
        padded = data.new_zeros(max(lengths))
        padded[: len(data)] = data
        return [row[:length] for row, length in zip(self._gather(padded), lengths, strict=True)]

    def restore(self, generator: torch.Generator, states: Sequence[Tensor]) -> None:
        """Set this rank's generator to the saved state of the same rank; `states` has one state for every rank then.

        A rank that did not exist then begins a sequence of its own.
        """
        if self.rank < len(states):
            restore(generator, states[self.rank])
        else:
            generator.manual_seed(derive_seed(self.rank, bytes(states[0].tolist()).hex()))

    def _gather(self, numbers: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of one shape and type."""
        gathered = [torch.empty_like(numbers) for _ in range(self.size)]
        self._exchange([numbers] * self.size, gathered)
        return gathered

    def _exchange(self, leaving: Sequence[Tensor], coming: Sequence[Tensor]) -> None:
        """Send leaving[i] to rank i and fill coming[i] with what rank i sends; all tensors are in host memory.

        Single messages instead of a collective, because gloo runs collectives in threads that release the tensors only
        after the collective has returned, and need the interpreter for that. A program that ends right after one would
        sometimes abort, with all its work done (https://github.com/pytorch/pytorch/issues/190489).
        """
        coming[self.rank].copy_(leaving[self.rank])
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._contact():
            messages = [
                *(self.hosts.recv([coming[i]], i, TAG) for i in others if coming[i].numel()),
                *(self.hosts.send([leaving[i]], i, TAG) for i in others if leaving[i].numel()),
            ]
            for message in messages:
                message.wait()

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """Turn an error of the network into a message that says what happened: a rank is gone."""
        try:
            with self.waiting():
                yield
        except RuntimeError as error:
            raise TrainingError(
                f"lost contact with the other ranks ({error}). One of them ended or took fewer steps than this one; "
                "its own output says why. Start the job again from its last checkpoint."
            ) from error

    def _texts(self, text: str) -> list[str]:
        rows = self.gather(torch.tensor(list(text.encode()), dtype=torch.uint8))
        return [bytes(row.tolist()).decode() for row in rows]


def to_device(index: Tensor, device: torch.device) -> Tensor:
    """A tensor in host memory, copied to `device` without waiting for it."""
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)


def _watch(ranks: weakref.ref[Ranks]) -> None:
    """Tell of each wait that is too long, once; a thread that ends with its ranks."""
    told = None
    while (found := ranks()) is not None:
        rank, since = found.rank, found._since
        del found
        if since is not None and since != told and time.monotonic() - since > PATIENCE:
            told = since
            log.warning(
                "rank %d has waited %.0f seconds for the other ranks. One of them was stopped, takes fewer steps, or "
                "computes for long: its own output may say why. The process group's time limit ends the wait.",
                rank,
                PATIENCE,
            )
        time.sleep(min(1.0, PATIENCE / 4))
