"""Tiny-ImageNet-200, from the published zip or the folder it unpacks to; decoded once, then read from a cache.

The labels of the published test images were never released, so that the validation images are the test set.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.data.catalogue import DATASETS, Dataset, ImageSet, Progress, Status
from holdfast.data.download import archive_status, fetch_archive, missing
from holdfast.data.files import Archive
from holdfast.errors import DataError
from holdfast.files import replacing

__all__ = ["TinyImageNet"]

FOLDER = "tiny-imagenet-200"
CACHE = "tiny-imagenet-200.decoded.safetensors"
SIDE = 64
REPORT_EVERY = 500  # images
LARGEST = 1 << 24
"""Bytes a file of the tree may have; the published ones stay below a hundredth of that."""


class Tree(Protocol):
    """Files by their path inside the folder tiny-imagenet-200, wherever that is."""

    path: Path

    def sizes(self) -> dict[str, int]:
        """Every file and its size in bytes."""
        ...

    def read(self, name: str) -> bytes:
        """The content of one file."""
        ...


class _Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def sizes(self) -> dict[str, int]:
        files = (Path(parent, name) for parent, _, names in os.walk(self.path) for name in names)
        return {file.relative_to(self.path).as_posix(): file.stat().st_size for file in files if file.is_file()}

    def read(self, name: str) -> bytes:
        _check_size(self.path / name, (self.path / name).stat().st_size)
        return (self.path / name).read_bytes()


class _Zip:
    def __init__(self, path: Path, opened: zipfile.ZipFile) -> None:
        self.path, self._zip = path, opened

    def sizes(self) -> dict[str, int]:
        prefix = FOLDER + "/"
        return {
            entry.filename.removeprefix(prefix): entry.file_size
            for entry in self._zip.infolist()
            if entry.filename.startswith(prefix) and not entry.is_dir()
        }

    def read(self, name: str) -> bytes:
        entry = self._zip.getinfo(f"{FOLDER}/{name}")
        _check_size(self.path / name, entry.file_size)
        return self._zip.read(entry)


def _check_size(path: Path, size: int) -> None:
    if size > LARGEST:
        raise ValueError(f"{path.name} claims to be of {size} bytes")


class Contents(NamedTuple):
    """What a tree holds: image files and labels of both splits, and a key that no other contents share."""

    wnids: tuple[str, ...]
    train: list[str]
    train_labels: list[int]
    test: list[str]
    test_labels: list[int]
    key: str


@dataclass(frozen=True)
class TinyImageNet:
    """The data set, with the numbers of classes and images that it must have."""

    archive: Archive
    classes: int = 200
    train_per_class: int = 500
    test_images: int = 10_000

    def load(self, root: Path, progress: Progress | None) -> Dataset:
        """The data set, 3 x 64 x 64, classes in the order of wnids.txt; the first time, this decodes every image."""
        with self._open(root) as tree:
            contents = self._survey(tree)
            images = _read_cache(root / CACHE, contents) or self._decode(tree, contents, root, progress)
        train, test = images
        return Dataset(
            ImageSet(train, torch.tensor(contents.train_labels)),
            ImageSet(test, torch.tensor(contents.test_labels)),
            self.classes,
            contents.wnids,
        )

    def status(self, root: Path, verify: bool) -> Status:
        """Where the folder or, failing that, the archive is."""
        folder = root / FOLDER
        if not folder.is_dir():
            return archive_status(self.archive, root, verify)
        if not verify:
            return Status("present", folder, "The folder is there; the images in it were not counted.", 0)
        tree = _Folder(folder)
        size = sum(tree.sizes().values())
        try:
            self._survey(tree)
        except DataError as error:
            return Status("damaged", folder, str(error), size)
        detail = "Every image is there; there are no checksums for single images, they are checked when decoded."
        return Status("present", folder, detail, size)

    def fetch(self, root: Path, progress: Progress | None) -> Path:
        """The folder or archive, the latter downloaded if need be."""
        return fetch_archive(self.archive, self.status(root, verify=True), root, progress)

    @contextmanager
    def _open(self, root: Path) -> Iterator[Tree]:
        folder, archive = root / FOLDER, root / self.archive.name
        if folder.is_dir():
            yield _Folder(folder)
        elif archive.is_file():
            try:
                opened = zipfile.ZipFile(archive)
            except Exception:  # a broken zip may raise anything
                raise DataError(f"{archive} is not a whole zip file. Delete it. {self.archive.by_hand(root)}") from None
            with opened:
                yield _Zip(archive, opened)
        else:
            raise missing(self.archive, root)

    def _survey(self, tree: Tree) -> Contents:
        sizes = tree.sizes()
        wnids = tuple(_text(tree, "wnids.txt").split())
        if len(set(wnids)) != self.classes:
            raise DataError(f"{tree.path / 'wnids.txt'} names {len(set(wnids))} classes; {self.classes} expected.")
        train = _images_by_folder(sizes)
        for wnid in wnids:
            found = len(train.get(f"train/{wnid}/images", ()))
            if found != self.train_per_class:
                where = tree.path / "train" / wnid / "images"
                raise DataError(f"{where} holds {found} images; {self.train_per_class} expected. Unpack it again.")
        test = _annotations(tree, {wnid: label for label, wnid in enumerate(wnids)})
        self._match_annotations(tree, test, train.get("val/images", []))
        files = [name for wnid in wnids for name in train[f"train/{wnid}/images"]]
        labels = [label for label in range(self.classes) for _ in range(self.train_per_class)]
        key = _key([*zip(files, labels, strict=True), *test.items()], sizes)
        return Contents(wnids, files, labels, list(test), list(test.values()), key)

    def _match_annotations(self, tree: Tree, annotated: dict[str, int], found: list[str]) -> None:
        annotations = tree.path / "val" / "val_annotations.txt"
        for name in found:
            if name not in annotated:
                raise DataError(f"{annotations} says nothing about {name}, which is there. Unpack it again.")
        for name in annotated.keys() - set(found):
            raise DataError(f"{tree.path / name} is not there, but {annotations} lists it. Unpack it again.")
        if len(found) != self.test_images:
            raise DataError(f"{tree.path / 'val'} holds {len(found)} images; {self.test_images} expected.")

    def _decode(self, tree: Tree, contents: Contents, root: Path, progress: Progress | None) -> tuple[Tensor, Tensor]:
        if tree.path.is_file():
            found = archive_status(self.archive, root, verify=True)
            if found.state == "damaged":
                raise DataError(f"{found.detail} Delete it. {self.archive.by_hand(root)}")
        images = _decode_all(tree, contents.train + contents.test, progress)
        train, test = images[: len(contents.train)], images[len(contents.train) :]
        _write_cache(root / CACHE, contents.key, train, test)
        return train, test


def _text(tree: Tree, name: str) -> str:
    try:
        return tree.read(name).decode("utf-8", "replace")
    except Exception as error:  # a broken zip may raise anything
        raise DataError(f"{tree.path / name} is missing or cannot be read ({error}). Unpack it again.") from None


def _images_by_folder(names: dict[str, int]) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".JPEG"):
            folders.setdefault(name.rpartition("/")[0], []).append(name)
    return folders


def _annotations(tree: Tree, label_of: dict[str, int]) -> dict[str, int]:
    """Image file -> label, in the order of val_annotations.txt, whose lines are "file, wnid, box", tab-separated."""
    name = "val/val_annotations.txt"
    labels: dict[str, int] = {}
    for number, line in enumerate(_text(tree, name).splitlines(), start=1):
        file, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in label_of:
            raise DataError(f"{tree.path / name}, line {number}: '{wnid}' is not a class of wnids.txt.")
        labels[f"val/images/{file}"] = label_of[wnid]
    return labels


def _key(labelled: list[tuple[str, int]], sizes: dict[str, int]) -> str:
    """A digest of every image's name, label and size, which the zip and its unpacked folder share."""
    lines = "\n".join(f"{name} {label} {sizes[name]}" for name, label in labelled)
    return hashlib.sha256(lines.encode()).hexdigest()


def _decode_all(tree: Tree, names: list[str], progress: Progress | None) -> Tensor:
    """uint8 (N, 3, 64, 64). One thread: images this small spend their time where the interpreter lock is held."""
    pixels = np.empty((len(names), 3, SIDE, SIDE), np.uint8)
    for done, name in enumerate(names, start=1):
        pixels[done - 1] = _decode_image(tree, name)
        if progress and (done % REPORT_EVERY == 0 or done == len(names)):
            progress(f"decode {FOLDER}", done, len(names))
    return torch.from_numpy(pixels)


def _decode_image(tree: Tree, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8 (3, 64, 64); a grey image has its one channel thrice."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(tree.read(name)), formats=("JPEG",)) as image:
            if image.size != (SIDE, SIDE):  # before anything of that size is made
                width, height = image.size
                raise DataError(f"{tree.path / name} is {width} x {height} pixels; 64 x 64 expected.")
            pixels = np.asarray(image.convert("RGB"))
    except DataError:
        raise
    except Exception as error:  # a broken image may raise anything
        raise DataError(f"{tree.path / name} is not a whole JPEG ({error}). Unpack it again.") from None
    return pixels.transpose(2, 0, 1)


def _read_cache(path: Path, contents: Contents) -> tuple[Tensor, Tensor] | None:
    """The decoded images if `path` holds those of these contents, whole; mapped from the file, not copied."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") != contents.key:
                return None
            train, test = file.get_tensor("train"), file.get_tensor("test")
    except (OSError, SafetensorError):
        return None
    wanted = [(len(names), 3, SIDE, SIDE) for names in (contents.train, contents.test)]
    whole = [tuple(part.shape) for part in (train, test)] == wanted
    return (train, test) if whole and train.dtype == test.dtype == torch.uint8 else None


def _write_cache(path: Path, key: str, train: Tensor, test: Tensor) -> None:
    """A failure costs time, no result."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with replacing(path) as part:
            save_file({"train": train, "test": test}, part, metadata={"key": key})
            part.chmod(0o644)  # safetensors leaves it private; a data root may be shared
    except (OSError, SafetensorError) as error:
        warnings.warn(f"The decoded images could not be kept at {path} ({error}).", stacklevel=2)


DATASETS.register("tinyimagenet", "100,000 + 10,000 colour 64 x 64 photographs, 200 classes")(
    TinyImageNet(
        Archive(
            "tiny-imagenet-200.zip",
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "md5:90528d7ca1a48142e341f4ef8d21d0de",
            248_100_043,
        )
    )
)
