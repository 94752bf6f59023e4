"""Stored samples of different length, in memory or in a folder: each takes as much room as it has content."""
# ruff: noqa: D102 (`Storage` explains the methods)

import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast.buffer.base import Storage
from holdfast.buffer.folder import ADVICE, Array, OwnedFolder, checksums, damaged, preallocate, write_at
from holdfast.buffer.layout import Column, Layout, affordable, layout_of_state, unaffordable
from holdfast.buffer.packing import Packing
from holdfast.errors import StorageError
from holdfast.files import flush

__all__ = ["RaggedFolder", "RaggedMemory"]


class RaggedMemory(Storage):
    """Samples in the memory of `home`, each in bytes of its own. Steps wait for the device.

    `padding` says which columns vary in length, and how draws are padded.
    """

    def __init__(self, capacity: int, device: torch.device, home: torch.device, padding: Mapping[str, float]) -> None:
        Storage.__init__(self, capacity, device, home)
        self.padding = padding
        self._packing = Packing({}, padding)
        self._samples: dict[int, Any] = {}
        """What is in each slot: the bytes of a sample or, in a folder, what tells of the file they are in."""
        self._copies: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()
        """The samples of minibatches that are still to be written, and the tensors they were copied from."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the copies: they are found by tensors that a copy or a pickle of this object never gets."""
        return {name: value for name, value in vars(self).items() if name != "_copies"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _copies=WeakTensorKeyDictionary())

    def _put(self, contents: Sequence[Tensor]) -> list[Any]:
        """Store the bytes of samples; returns what `_samples` has of them."""
        return list(contents)

    def _get(self, entries: Iterable[Any]) -> list[Tensor]:
        """The bytes of stored samples."""
        return list(entries)

    def make(self, layout: Layout) -> None:
        if layout != self.layout:
            self._use(layout, {})

    def reserve(self, parts: Sequence[Tensor], lengths: Sequence[int] | None = None) -> None:
        """Copy the samples now, so that `write` cannot fail; before the first of them, look for room for all slots."""
        copies = self._copied(parts)
        if copies is None:
            copies = self._bytes_of(parts, lengths)
            if not self._samples:
                _check_room(self.capacity * max(map(len, copies), default=0), self.home)
        self._copies[parts[0]] = [(weakref.ref(part), _version(part)) for part in parts], copies

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        copies = self._copied(parts)
        if copies is None:  # with several ranks, those that arrive here are not those that were copied
            self._copies.clear()
            self._store(slots, parts)
        else:
            self._samples |= {slot: copies[i] for i, slot in enumerate(slots.tolist()) if slot < self.capacity}

    def read(self, slots: Tensor) -> list[Tensor]:
        return [part.to(self.device) for part in self._padded(slots.tolist())]

    def first(self, count: int) -> list[Tensor]:
        return self._padded(range(count))

    def change(self, name: str, convert: Callable[[Tensor], Tensor]) -> None:
        columns, lengths = self._packing.join(self._get(self._samples[slot] for slot in range(len(self._samples))))
        number, before = list(self.layout).index(name), self.layout[name]
        columns[number] = after = convert(columns[number])
        shape = (*before.shape[: name in self._packing.fills], *after.shape[1:])
        self._replace(self.layout | {name: Column(shape, after.dtype)}, columns, lengths)

    def state(self, count: int) -> dict[str, Any]:
        """The columns without padding, on the host."""
        return self._packing.state([self._samples[slot] for slot in range(count)])

    def load(self, state: dict[str, Any]) -> None:
        self._replace(layout_of_state(state), state["columns"], state["lengths"].tolist())

    def _use(self, layout: Layout, samples: dict[int, Any]) -> None:
        """Let these be the columns, and what is in the slots."""
        self.layout, self._packing, self._samples = layout, Packing(layout, self.padding), samples

    def _replace(self, layout: Layout, columns: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """Store these samples and no others, in slot order. If there is no room for them, nothing changes."""
        with affordable(sum(column.nbytes for column in columns), f"the memory of {self.home}"):
            samples = Packing(layout, self.padding).divide([column.to(self.home) for column in columns], lengths)
        self._use(layout, dict(enumerate(self._put(samples))))

    def _store(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """Put samples of which there are no copies into slots."""
        accepted = (slots < self.capacity).nonzero().squeeze(1)
        entries = self._put(self._bytes_of([part[accepted.to(part.device)] for part in parts]))
        self._samples |= zip(slots[accepted].tolist(), entries, strict=True)

    def _bytes_of(self, parts: Sequence[Tensor], lengths: Sequence[int] | None = None) -> list[Tensor]:
        """The bytes of each sample of a minibatch."""
        with affordable(sum(part.nbytes for part in parts), f"the memory of {self.home}"):
            return self._packing.split([part.detach().to(self.home) for part in parts], lengths)

    def _padded(self, slots: Iterable[int]) -> list[Tensor]:
        return self._packing.stack(self._get(self._samples[slot] for slot in slots))

    def _copied(self, parts: Sequence[Tensor]) -> list[Tensor] | None:
        """Hand out the copies that `reserve` made of these very tensors, once; None if a tensor has changed since."""
        tensors, copies = self._copies.pop(parts[0], ([], None))
        same = len(tensors) == len(parts) and all(
            tensor() is part and version == _version(part)
            for (tensor, version), part in zip(tensors, parts, strict=True)
        )
        return copies if same else None


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


class RaggedFolder(RaggedMemory, OwnedFolder):
    """Samples in a folder, each in a file of its own, `NUMBER.sample`.

    No number is used twice. A file that a saved state refers to is neither changed nor removed before a later state is
    on the disk, so the process may be killed at any moment. A state has a checksum of each file.
    """

    def __init__(self, path: Path, capacity: int, device: torch.device, padding: Mapping[str, float]) -> None:
        RaggedMemory.__init__(self, capacity, device, torch.device("cpu"), padding)
        OwnedFolder.__init__(self, path, capacity, device)
        self._referenced: set[int] = set()
        """Files that a saved state refers to."""
        self._unflushed: set[int] = set()
        """Files that may not be on the disk yet."""
        self._spares: dict[int, int] = {}
        """Files for samples to come, and how many bytes there is room for in each."""
        self._verified: list[_Sample] = []
        """Samples that were last found to be correct."""

    def reserve(self, parts: Sequence[Tensor], lengths: Sequence[int] | None = None) -> None:
        """Make sure of room for these samples; before the first of them, look for room for all slots."""
        lengths = self._packing.lengths(parts).tolist() if lengths is None else lengths
        size = self._packing.size(max(lengths, default=0))
        with self._access():
            if not self._samples:
                _check_room(self.capacity * size, self.path)
            size = max(size, *self._spares.values(), 0)  # any of them may take any sample
            short = self._announce(parts) - len(self._spares)
            self._spares |= dict.fromkeys(self._numbers(max(0, short)), 0)
            for number, room in self._spares.items():
                if room < size:
                    with self._opened(number) as file:
                        preallocate(file.fileno(), room, size)
                    self._spares[number] = size

    def write(self, slots: Tensor, parts: Sequence[Tensor]) -> None:
        self._announced.pop(parts[0], None)
        before = [self._samples[slot] for slot in slots.tolist() if slot in self._samples]
        self._store(slots, parts)
        for sample in before:
            if sample.number not in self._referenced:
                with suppress(OSError):  # then the next commit removes it
                    self._path(sample.number).unlink()

    def state(self, count: int) -> dict[str, Any]:
        """The files are on the disk, and stay there until a later `commit`."""
        samples = [self._samples[slot] for slot in range(count)]
        numbers = {sample.number for sample in samples}
        with self._access():
            self._check_place()
            for number in numbers & self._unflushed:
                flush(self._path(number))
            flush(self.path)
        self._unflushed -= numbers
        self._referenced |= numbers
        lengths = [self._packing.length(sample.size) for sample in samples]
        return {
            "folder": str(self.path),
            "columns": self._packing.join([])[0] if count else [],
            "lengths": torch.tensor(lengths, dtype=torch.int64),
            "padding": self._packing.fills if count else {},
            "stamps": torch.tensor([sample.number for sample in samples], dtype=torch.int64),
            "sums": torch.tensor([[sample.checksum for sample in samples]], dtype=torch.int32)[: bool(count)],
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise if files of the state were removed or damaged; all of them are read, once."""
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
        if "folder" not in state:
            super().load(state)
            return
        samples = _stated(state)
        self._use(layout_of_state(state), dict(enumerate(samples)))
        self._referenced |= {sample.number for sample in samples}

    def commit(self, state: dict[str, Any]) -> None:
        """Write `state` to the folder; files that only other states refer to are removed then."""
        super().commit(state)
        self._referenced = {sample.number for sample in _stated(state)}
        present = {sample.number for sample in self._samples.values()}
        with self._access():
            self._discard(map(self._path, {*self._referenced, *present, *self._spares}))

    def close(self) -> None:
        with suppress(StorageError), self._access():
            for number in self._spares:
                self._path(number).unlink(missing_ok=True)
        super().close()

    def _put(self, contents: Sequence[Tensor]) -> list[_Sample]:
        numbers: list[int] = []
        try:
            with self._access():
                for content in contents:
                    numbers.append(self._spares.popitem()[0] if self._spares else self._numbers(1)[0])
                    with self._opened(numbers[-1]) as file:
                        write_at(file.fileno(), content.numpy().data, 0)
                        file.truncate(len(content))
        except StorageError:
            self._spares |= dict.fromkeys(numbers, 0)
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
        used = {self._path(sample.number) for sample in self._samples.values()}
        return super()._in_place() and used <= set(self.path.iterdir())

    def _path(self, number: int) -> Path:
        return self.path / f"{number}.sample"

    def _opened(self, number: int) -> FileIO:
        """The file, with what is in it already; a new one if there is none."""
        return FileIO(self._path(number), "r+", opener=lambda path, flags: os.open(path, flags | os.O_CREAT, 0o666))


def _stated(state: dict[str, Any]) -> list[_Sample]:
    """The samples of a state that was taken in a folder."""
    sizes = map(Packing(layout_of_state(state), state["padding"]).size, state["lengths"].tolist())
    return list(map(_Sample, state["stamps"].tolist(), sizes, *state["sums"].tolist()))


def _described(content: Array) -> tuple[int, int]:
    """The size of a sample and its checksum."""
    return len(content), int(checksums([content])[0])


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
