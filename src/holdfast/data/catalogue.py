"""The data sets by name: load one, ask where it is, fetch it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from holdfast.data.files import data_root
from holdfast.errors import DataError
from holdfast.registry import Registry

__all__ = [
    "DATASETS",
    "Dataset",
    "ImageSet",
    "Progress",
    "Source",
    "State",
    "Status",
    "fetch",
    "load",
    "reporting",
    "status",
]

Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much is done, and how much there is in all."""

State = Literal["bundled", "verified", "present", "missing", "damaged"]


class ImageSet(NamedTuple):
    """`images`: uint8 (N, C, H, W); `labels`: int64 (N,)."""

    images: Tensor
    labels: Tensor


class Dataset(NamedTuple):
    """Training and test images whose labels lie in [0, classes)."""

    train: ImageSet
    test: ImageSet
    classes: int
    class_names: tuple[str, ...] = ()


class Status(NamedTuple):
    """How a data set stands: `detail` is a sentence for people, `size` is in bytes, 0 if missing or not counted.

    "present" means that the files are there; "verified", that their checksums were right just now.
    """

    state: State
    path: Path
    detail: str
    size: int


class Source(Protocol):
    """What a data set must offer to be registered. `root` is the data root; it need not exist.

    One that cannot be loaded says why in an attribute `refusal`, which keeps `load` from fetching it.
    """

    def load(self, root: Path, progress: Progress | None) -> Dataset:
        """The data set, from the files that are there; a DataError if they are missing or damaged."""
        ...

    def status(self, root: Path, verify: bool) -> Status:
        """Where the files are; with `verify`, whether they are the published ones."""
        ...

    def fetch(self, root: Path, progress: Progress | None) -> Path:
        """Download and verify the files unless they are in order; returns where they are."""
        ...


DATASETS: Registry[Source] = Registry("data set")


_reporter: ContextVar[Progress | None] = ContextVar("reporter", default=None)


@contextmanager
def reporting(progress: Progress) -> Iterator[None]:
    """Inside the block, downloads and decoding report to `progress`, however deep the call."""
    token = _reporter.set(progress)
    try:
        yield
    finally:
        _reporter.reset(token)


def load(
    name: str, root: Path | str | None = None, *, download: bool = True, progress: Progress | None = None
) -> Dataset:
    """The data set `name` as CPU tensors; a missing one is fetched first, unless `download` is off."""
    source, folder, progress = DATASETS[name], data_root(root), progress or _reporter.get()
    if refusal := getattr(source, "refusal", None):
        raise DataError(refusal)
    if download and source.status(folder, verify=False).state == "missing":
        source.fetch(folder, progress)
    return source.load(folder, progress)


def status(name: str, root: Path | str | None = None, verify: bool = False) -> Status:
    """Where the data set `name` is. `verify` reads every file; without it, this only looks whether they are there."""
    return DATASETS[name].status(data_root(root), verify)


def fetch(name: str, root: Path | str | None = None, progress: Progress | None = None) -> Path:
    """Download and verify the data set `name` unless it is there already; returns its file or folder."""
    return DATASETS[name].fetch(data_root(root), progress or _reporter.get())
