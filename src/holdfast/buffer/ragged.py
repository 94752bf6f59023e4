"""Stored samples of different length, in memory or in a folder: each takes as much room as it has content."""

from __future__ import annotations

import operator
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor

from holdfast.buffer.layout import Column, Layout, affordable, layout_of_state, unaffordable
from holdfast.buffer.memory import InMemory
from holdfast.buffer.owned import ADVICE, Array, OwnedFolder, damaged
from holdfast.buffer.packing import Packing, ragged_state
from holdfast.buffer.rows import checksums, preallocate, write_at
from holdfast.errors import StorageError
from holdfast.files import flush
from holdfast.nested import fills_of

__all__ = ["RaggedFolder", "RaggedMemory"]

Entry = TypeVar("Entry")
"""Where a sample is: its bytes themselves, or what tells of the file they are in."""


class Ragged(Generic[Entry]):
    """What the storages of such samples share. `padding` says which columns vary in length, and how draws are padded.

    Bytes come from the memory of `home` and go there. Samples are drawn on `device`, for which steps wait.
    """

    def __init__(self, capacity: int, device: torch.device, home: torch.device, padding: Mapping[str, float]) -> None:
        self.capacity, self.device, self.home, self.padding = capacity, device, home, padding
        self.layout: Layout = {}
        self._packing = Packing({}, {})
        self._samples: dict[int, Entry] = {}
        """What is in each slot."""

    def _put(self, contents: Sequence[Tensor]) -> list[Entry]:
        """Store the bytes of samples."""
        raise NotImplementedError

    def _get(self, entries: Iterable[Entry]) -> list[Tensor]:
        """The bytes of stored samples."""
        raise NotImplementedError

    def make(self, layout: Layout) -> None:
        """Expect samples with such columns."""
        if layout != self.layout:
            self._take_over(layout, Packing(layout, fills_of(layout, self.padding)), {})

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part, one for each column, into slot `slots[i]`; `capacity` stands for nowhere."""
        accepted = (slots < self.capacity).nonzero().squeeze(1)
        entries = self._put(self._bytes_of([part[accepted.to(part.device)] for part in parts]))
        self._samples |= zip(slots[accepted].tolist(), entries, strict=True)

    def read(self, slots: Tensor) -> list[Tensor]:
        """Copies of the samples in these slots, on the device, padded to the longest of them."""
        return [part.to(self.device) for part in self._padded(slots.tolist())]

    def first(self, count: int) -> list[Tensor]:
        """Copies of the samples in the first so many slots, where they are stored, padded to the longest of them."""
        return self._padded(range(count))

    def change(self, name: str, convert: Callable[[Tensor], Tensor]) -> None:
        """Put `convert(column)` in the place of a column; of one that varies, a row is a position."""
        columns, lengths = self._packing.join(self._get(self._samples[slot] for slot in range(len(self._samples))))
        number, before = list(self.layout).index(name), self.layout[name]
        columns[number] = after = convert(columns[number])
        shape = (*before.shape[: name in self._packing.fills], *after.shape[1:])
        self._replace(self.layout | {name: Column(shape, after.dtype)}, columns, lengths)

    def load(self, state: dict[str, Any]) -> None:
        """Store the samples of a state from memory, and no others."""
        self._replace(layout_of_state(state), state["columns"], state["lengths"].tolist())

    def _replace(self, layout: Layout, columns: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """Store these samples and no others, in slot order. If there is no room for them, nothing changes."""
        packing = Packing(layout, fills_of(layout, self.padding))
        with affordable(sum(column.nbytes for column in columns), f"the memory of {self.home}"):
            samples = packing.divide([column.to(self.home) for column in columns], lengths)
        entries = self._put(samples)
        self._take_over(layout, packing, dict(enumerate(entries)))

    def _take_over(self, layout: Layout, packing: Packing, samples: dict[int, Entry]) -> None:
        self.layout, self._packing, self._samples = layout, packing, samples

    def _bytes_of(self, parts: Sequence[Tensor], lengths: Sequence[int] | None = None) -> list[Tensor]:
        """The bytes of each sample of a minibatch."""
        with affordable(sum(part.nbytes for part in parts), f"the memory of {self.home}"):
            return self._packing.split([part.detach().to(self.home) for part in parts], lengths)

    def _padded(self, slots: Iterable[int]) -> list[Tensor]:
        return self._packing.stack(self._get(self._samples[slot] for slot in slots))


class RaggedMemory(InMemory, Ragged[Tensor]):
    """Samples in the memory of `home`, each in bytes of its own."""

    def __init__(self, capacity: int, device: torch.device, home: torch.device, padding: Mapping[str, float]) -> None:
        super().__init__(capacity, device, home, padding)
        self._copies: list[tuple[list[tuple[weakref.ref[Tensor], int]], list[Tensor]]] = []
        """The samples of minibatches that are still to be written, and the tensors they were copied from."""

    def reserve(self, parts: Sequence[Tensor], lengths: list[int] | None = None) -> None:
        """Copy the samples now, so that `write` cannot fail; before the first of them, look for room for all slots."""
        if len(parts) < len(self.layout):
            return  # the answers are still to come
        copies = self._copied(parts)
        if copies is None:
            copies = self._bytes_of(parts, lengths)
        if not self._samples:
            _check_room(self.capacity * max(map(len, copies), default=0), self.home)
        self._copies.append(([(weakref.ref(part), _version(part)) for part in parts], copies))

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part, one for each column, into slot `slots[i]`; `capacity` stands for nowhere."""
        copies = self._copied(parts)
        if copies is None:  # samples of other ranks: those that were copied here went to other ranks
            self._copies = []
            super().write(slots, parts)
        else:
            self._samples |= {slot: copies[i] for i, slot in enumerate(slots.tolist()) if slot < self.capacity}

    def state(self, count: int) -> dict[str, Any]:
        """What `load` needs to restore the first `count` slots: the columns without padding, on the host."""
        samples = [self._samples[slot] for slot in range(count)]
        return ragged_state(*(self._packing.join(samples) if count else ([], [])), self._packing)

    def _put(self, contents: Sequence[Tensor]) -> list[Tensor]:
        return list(contents)

    def _get(self, entries: Iterable[Tensor]) -> list[Tensor]:
        return list(entries)

    def _copied(self, parts: Sequence[Tensor]) -> list[Tensor] | None:
        """The copies that were made of these very tensors; they, and those of tensors that died, are forgotten."""
        found, others = None, []
        for tensors, copies in self._copies:
            alive = [tensor() for tensor, _ in tensors]
            if len(alive) == len(parts) and all(map(operator.is_, alive, parts)):
                unchanged = [version for _, version in tensors] == list(map(_version, parts))
                found = copies if unchanged else None
            elif all(tensor is not None for tensor in alive):
                others.append((tensors, copies))
        self._copies = others
        return found


def _version(tensor: Tensor) -> int:
    """A number that changes with the content, as far as PyTorch knows of changes."""
    return 0 if tensor.is_inference() else tensor._version


class _Sample(NamedTuple):
    """A sample in a file."""

    number: int
    """The name of the file."""
    size: int
    """Its bytes."""
    checksum: int


class RaggedFolder(Ragged[_Sample], OwnedFolder):
    """Samples in a folder, each in a file of its own, `NUMBER.sample`.

    No number is used twice. A file that a saved state refers to is neither changed nor removed before a later state is
    on the disk, so the process may be killed at any moment. A state has a checksum of each file.
    """

    def __init__(self, path: Path, capacity: int, device: torch.device, padding: Mapping[str, float]) -> None:
        Ragged.__init__(self, capacity, device, torch.device("cpu"), padding)
        OwnedFolder.__init__(self, path, capacity)
        self._referenced: set[int] = set()
        """Files that a saved state refers to."""
        self._unflushed: set[int] = set()
        """Files that may not be on the disk yet."""
        self._spares: list[tuple[int, int]] = []
        """Files for samples to come, and how many bytes there is room for in each."""
        self._verified: list[_Sample] = []
        """Samples that were last found to be correct."""

    def reserve(self, parts: Sequence[Tensor], lengths: list[int] | None = None) -> None:
        """Make sure of room for these samples; before the first of them, look for room for all slots."""
        if len(parts) < len(self.layout):
            return  # the answers are still to come
        lengths = self._packing.lengths(parts).tolist() if lengths is None else lengths
        size = self._packing.size(max(lengths, default=0))
        with self._access():
            if not self._samples:
                _check_room(self.capacity * size, self.path)
            size = max([size, *(room for _, room in self._spares)])  # any of them may take any sample
            for place in range(self._announce(parts)):
                if place == len(self._spares):
                    self._spares.append((*self._numbers(1), 0))
                number, room = self._spares[place]
                if room < size:
                    with self._opened(number) as handle:
                        preallocate(handle, room, size)
                    self._spares[place] = number, size

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put row i of every part, one for each column, into slot `slots[i]`; `capacity` stands for nowhere."""
        self._withdraw(parts)
        before = [self._samples[slot] for slot in slots.tolist() if slot in self._samples]
        super().write(slots, parts)
        for sample in before:
            if sample.number not in self._referenced:
                with suppress(OSError):  # then the next commit removes it
                    self._path(sample.number).unlink()

    def state(self, count: int) -> dict[str, Any]:
        """Which files the first `count` slots are in. They are on the disk, and stay there until a later `commit`."""
        samples = [self._samples[slot] for slot in range(count)]
        numbers = {sample.number for sample in samples}
        with self._access():
            self._check_place()
            for number in numbers & self._unflushed:
                flush(self._path(number))
            flush(self.path)
        self._unflushed -= numbers
        self._referenced |= numbers
        columns = self._packing.join([])[0] if count else []
        return {
            "folder": str(self.path),
            "stamps": torch.tensor([sample.number for sample in samples], dtype=torch.int64),
            "sums": torch.tensor([[sample.checksum for sample in samples]], dtype=torch.int32)[: bool(count)],
            **ragged_state(columns, [self._packing.length(sample.size) for sample in samples], self._packing),
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise if `state` cannot be loaded: its files were removed or damaged. One from memory always can be."""
        if "folder" not in state or self._verified == (samples := _stated(state)):
            return  # opening a folder and loading its checkpoint check the same state three times
        numbers = {sample.number for sample in samples}
        if len(numbers) < len(samples) or not all(self._path(number).exists() for number in numbers):
            raise self._unknown(state)
        with self._access():
            wrong = sum(sample[1:] != _described(self._content(sample)) for sample in samples)
        if wrong:
            raise damaged(self.path, wrong, len(samples))
        self._verified = samples

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state of this folder, or copy one from memory into files."""
        if "folder" not in state:
            super().load(state)
            return
        layout, samples = layout_of_state(state), _stated(state)
        self._take_over(layout, Packing(layout, state["padding"]), dict(enumerate(samples)))
        self._referenced |= {sample.number for sample in samples}

    def commit(self, state: dict[str, Any]) -> None:
        """Write `state` to the folder; files that only other states refer to are removed then."""
        super().commit(state)
        self._referenced = {sample.number for sample in _stated(state)}
        present = {sample.number for sample in self._samples.values()}
        with self._access():
            self._discard(map(self._path, {*self._referenced, *present, *(number for number, _ in self._spares)}))

    def close(self) -> None:
        """Leave the folder to others; nothing can be read or written any more."""
        with suppress(StorageError), self._access():
            for number, _ in self._spares:
                self._path(number).unlink(missing_ok=True)
        super().close()

    def _put(self, contents: Sequence[Tensor]) -> list[_Sample]:
        numbers: list[int] = []
        try:
            with self._access():
                for content in contents:
                    numbers.append(self._spares.pop()[0] if self._spares else self._numbers(1)[0])
                    with self._opened(numbers[-1]) as handle:
                        write_at(handle, content.numpy().data, 0)
                        os.ftruncate(handle, len(content))
        except StorageError:
            self._spares += [(number, 0) for number in numbers]
            raise
        self._unflushed |= set(numbers)
        return [_Sample(number, *_described(each.numpy())) for number, each in zip(numbers, contents, strict=True)]

    def _get(self, entries: Iterable[_Sample]) -> list[Tensor]:
        contents = []
        with self._access():
            for entry in entries:
                contents.append(torch.from_numpy(self._content(entry)))
                if len(contents[-1]) != entry.size:
                    raise StorageError(f"{self._path(entry.number)} is damaged: it is too short. {ADVICE}")
        return contents

    def _content(self, sample: _Sample) -> Array:
        return numpy.fromfile(self._path(sample.number), numpy.uint8)

    def _in_place(self) -> bool:
        """Whether the files of all samples are in the folder."""
        used = {self._path(sample.number) for sample in self._samples.values()}
        return super()._in_place() and used <= set(self.path.iterdir())

    def _path(self, number: int) -> Path:
        return self.path / f"{number}.sample"

    @contextmanager
    def _opened(self, number: int) -> Iterator[int]:
        handle = os.open(self._path(number), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            yield handle
        finally:
            os.close(handle)


def _stated(state: dict[str, Any]) -> list[_Sample]:
    """The samples of a state that was taken in a folder."""
    sizes = map(Packing(layout_of_state(state), state["padding"]).size, state["lengths"].tolist())
    return list(map(_Sample, state["stamps"].tolist(), sizes, *state["sums"].tolist()))


def _described(content: Array) -> tuple[int, int]:
    """The size of a sample and its checksum."""
    return len(content), int(checksums(torch.from_numpy(content)[None])[0])


def _check_room(wanted: int, place: torch.device | Path) -> None:
    """Raise unless so many bytes are free: in the memory of a device, or on the disk of a folder."""
    free = _free_bytes(place)
    if free is not None and wanted > free:
        where = "the folder" if isinstance(place, Path) else "the memory of"
        raise unaffordable(wanted, f"{where} {place}", f"where {free:,} are free")


def _free_bytes(place: torch.device | Path) -> int | None:
    """The bytes that are free, None if nothing tells."""
    if isinstance(place, Path):
        return shutil.disk_usage(place).free
    if place.type == "cuda":
        # PyTorch retains memory that was freed, and gives it out again.
        retained = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return torch.cuda.mem_get_info(place)[0] + retained
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
