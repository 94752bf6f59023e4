"""Several processes that act as one: what each of them brings, rows that travel, errors that all of them see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast import errors
from holdfast.errors import HoldfastError, TrainingError, UsageError
from holdfast.rng import derive_seed, restore

__all__ = ["Meeting", "Ranks", "to_device"]

TAG = int.from_bytes(b"hold")
"""Keeps messages between the hosts apart from those that a program sends itself."""


@dataclass
class Meeting:
    """What a rank brings to one, and what it learns there."""

    count: int = 0
    """How many samples this rank brings, or asks for."""
    form: str = ""
    """What must be the same on all ranks, in words."""
    counts: list[int] = field(default_factory=list)
    """Once all have met: every rank's count, in the order of the ranks."""


class Ranks:
    """The processes of one job, as torchrun starts them.

    Rows travel by the process group they are given (NCCL between GPUs); counts and errors by one between the hosts
    (gloo), so that nothing a step asks of the other ranks waits for a GPU.
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

    @contextmanager
    def together(self, action: str) -> Iterator[Meeting]:
        """Each rank does its own part inside; all go on, or all raise.

        They raise if one of them did, if they do not all do the same `action`, or if the forms they bring differ.
        Nothing inside may wait for another rank.
        """
        meeting, problem = Meeting(), None
        try:
            yield meeting
        except HoldfastError as error:
            problem = error
        brought = [problem is not None, derive_seed(0, action), derive_seed(0, meeting.form), meeting.count]
        failed, actions, forms, counts = torch.stack(self._gather(torch.tensor(brought))).T.tolist()
        if any(failed):
            self._raise(failed.index(1), problem)
        for what, told, words in (("what they do", actions, action), ("what they bring", forms, meeting.form)):
            if len(set(told)) > 1:
                raise UsageError(
                    f"the ranks differ in {what}: {self._each(words)}. "
                    "Give all of them the same settings, the same steps, and data of one form."
                )
        meeting.counts = counts

    def ship(self, rows: Tensor, origin: Tensor, destination: Tensor) -> Tensor:
        """Send rows of a list that all ranks know: row i goes from rank origin[i] to rank destination[i].

        `rows` (B, bytes) uint8 are those that start at this rank, in the list's order. Returned are those that end
        here, in the list's order too. `origin` and `destination` are int64 in host memory.
        """
        leaving, coming = destination[origin == self.rank], origin[destination == self.rank]
        arrived = rows.new_empty(len(coming), rows.shape[1])
        if len(origin) == 0:  # which every rank knows
            return arrived
        sorted_rows = rows[to_device(leaving.argsort(stable=True), rows.device)]
        sent, received = (ends.bincount(minlength=self.size).tolist() for ends in (leaving, coming))
        if rows.device.type == "cpu":
            self._exchange(torch.split(sorted_rows, sent), torch.split(arrived, received))
        else:
            with _contact():
                dist.all_to_all_single(arrived, sorted_rows, received, sent, group=self.group)
        # They come rank by rank; the second argsort inverts the first.
        return arrived[to_device(coming.argsort(stable=True).argsort(), rows.device)]

    def gather(self, data: Tensor) -> list[Tensor]:
        """Every rank's bytes, (any length,) uint8 in host memory."""
        lengths = [int(length) for length in self._gather(torch.tensor([len(data)]))]
        padded = data.new_zeros(max(lengths))
        padded[: len(data)] = data
        return [row[:length] for row, length in zip(self._gather(padded), lengths, strict=True)]

    def restore(self, generator: torch.Generator, states: Sequence[Tensor]) -> None:
        """Put this rank's generator where that of the same rank was; `states` are those of all ranks there were.

        A rank that was not there begins a sequence of its own.
        """
        if self.rank < len(states):
            restore(generator, states[self.rank])
        else:
            generator.manual_seed(derive_seed(self.rank, bytes(states[0].tolist()).hex()))

    def _gather(self, numbers: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of one shape and type."""
        told = [torch.empty_like(numbers) for _ in range(self.size)]
        self._exchange([numbers] * self.size, told)
        return told

    def _exchange(self, leaving: Sequence[Tensor], coming: Sequence[Tensor]) -> None:
        """Send leaving[i] to rank i and fill coming[i] by what rank i sends, all of it in host memory.

        By messages, since gloo carries out collectives in threads of its own. These let go of the tensors after the
        collective has returned, and need the interpreter for it: a program whose last act is one would now and then
        abort, with all its work done (https://github.com/pytorch/pytorch/issues/190489).
        """
        coming[self.rank].copy_(leaving[self.rank])
        others = [rank for rank in range(self.size) if rank != self.rank]
        with _contact():
            messages = [
                *(self.hosts.recv([coming[i]], i, TAG) for i in others if coming[i].numel()),
                *(self.hosts.send([leaving[i]], i, TAG) for i in others if leaving[i].numel()),
            ]
            for message in messages:
                message.wait()

    def _texts(self, text: str) -> list[str]:
        told = self.gather(torch.tensor(list(text.encode()), dtype=torch.uint8))
        return [bytes(row.tolist()).decode() for row in told]

    def _each(self, text: str) -> str:
        return "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(self._texts(text)))

    def _raise(self, culprit: int, problem: HoldfastError | None) -> None:
        """On the rank that failed, its own error; on the others one of the same type that says whose it is."""
        kind, _, message = self._texts(f"{type(problem).__name__}\n{problem}")[culprit].partition("\n")
        raise problem or getattr(errors, kind, HoldfastError)(f"rank {culprit} failed: {message}")


def to_device(index: Tensor, device: torch.device) -> Tensor:
    """`index`, which is in host memory, on `device`, without waiting for it."""
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)


@contextmanager
def _contact() -> Iterator[None]:
    """Collectives fail with what the network says; people need to know that a rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            f"lost contact with the other ranks ({error}). One of them ended or took fewer steps than this one; "
            "its own output says why. Start the job again from its last checkpoint."
        ) from error
