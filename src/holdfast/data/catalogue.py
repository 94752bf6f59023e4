"""The data sets by name: load one, ask where it is, fetch it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.data.files import data_root
from holdfast.errors import DataError
from holdfast.registry import Registry

__all__ = ["DATASETS", "Dataset", "ImageSet", "Reporter", "Source", "Status", "fetch", "load", "reporting", "status"]

Reporter = Callable[[str, int, int], None]
"""Called with the name of an activity, how much of it is done, and how much there is in all."""

State = Literal["bundled", "verified", "present", "missing", "damaged"]


class ImageSet(NamedTuple):
    """`images`: uint8 (N, C, H, W); `labels`: int64 (N,)."""

    images: Tensor
    labels: Tensor

    def select(self, index: Tensor | slice) -> ImageSet:
        """The samples at these places."""
        return ImageSet(self.images[index], self.labels[index])

    @staticmethod
    def joined(parts: Iterable[ImageSet]) -> ImageSet:
        """Several sets, one after the other."""
        images, labels = zip(*parts, strict=True)
        return ImageSet(torch.cat(images), torch.cat(labels))


class Dataset(NamedTuple):
    """Training and test images whose labels lie in [0, classes)."""

    train: ImageSet
    test: ImageSet
    classes: int
    class_names: tuple[str, ...] = ()


class Status(NamedTuple):
    """Whether a data set is there. `detail` is a sentence for people; `size` is in bytes, 0 if missing or not counted.

    "present" means that the files are there; "verified", that their checksums were compared just now.
    """

    state: State
    path: Path
    detail: str
    size: int


class Source(Protocol):
    """What a registered data set must have. `root` is the data root, which may not exist yet.

    A data set that cannot be loaded says why in an attribute `refusal`; `load` then does not fetch it.
    """

    def load(self, root: Path, progress: Reporter | None) -> Dataset:
        """The data set from its files; a DataError if they are missing or damaged."""
        ...

    def status(self, root: Path, verify: bool) -> Status:
        """Where the files are; with `verify`, whether they are the published ones."""
        ...

    def fetch(self, root: Path, progress: Reporter | None) -> Path:
        """Download and verify the files unless they are in order; returns where they are."""
        ...


DATASETS: Registry[Source] = Registry("data set")

_reporter: ContextVar[Reporter | None] = ContextVar("reporter", default=None)


@contextmanager
def reporting(progress: Reporter) -> Iterator[None]:
    """Inside the block, all downloads and all decoding report to `progress`."""
    token = _reporter.set(progress)
    try:
        yield
    finally:
        _reporter.reset(token)


def load(name: str, root: Path | str | None = None, *, download: bool = True) -> Dataset:
    """The data set `name` as CPU tensors. If it is missing, it is fetched first, unless `download` is False."""
    source, folder, progress = DATASETS[name], data_root(root), _reporter.get()
    if refusal := getattr(source, "refusal", None):
        raise DataError(refusal)
    if download and source.status(folder, verify=False).state == "missing":
        source.fetch(folder, progress)
    return source.load(folder, progress)


def status(name: str, root: Path | str | None = None, verify: bool = False) -> Status:
    """Where the data set `name` is. `verify` reads every file; otherwise this only looks whether they are there."""
    return DATASETS[name].status(data_root(root), verify)


def fetch(name: str, root: Path | str | None = None) -> Path:
    """Download and verify the data set `name`, unless it is there already; returns its file or folder."""
    return DATASETS[name].fetch(data_root(root), _reporter.get())
