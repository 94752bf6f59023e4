"""Tiny-ImageNet-200, from the published zip or the folder unpacked from it; decoded once, then read from a cache.

The labels of the published test images were never released, so the validation images are the test set.
"""

import hashlib
import io
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.data.catalogue import DATASETS, Dataset, ImageSet, Reporter, Status
from holdfast.data.download import ArchivedSource, archive_status
from holdfast.data.files import Archive
from holdfast.errors import DataError
from holdfast.files import replacing

__all__ = ["TinyImageNet"]

FOLDER = "tiny-imagenet-200"
CACHE = "tiny-imagenet-200.decoded.safetensors"
SIDE = 64
REPORT_EVERY = 500  # images
LARGEST = 1 << 24
"""Limit on the size of one file in bytes; the published ones have less than a hundredth of it."""


class Tree(NamedTuple):
    """The files of the folder tiny-imagenet-200, unpacked or in the zip, by their path inside the folder."""

    path: Path
    """The folder or the zip."""
    sizes: dict[str, int]
    """Every file and its size in bytes."""
    open: Callable[[str], bytes]
    """The content of a file."""

    def read(self, name: str) -> bytes:
        """The content of a file; one that is too large raises."""
        if self.sizes.get(name, 0) > LARGEST:
            raise ValueError(f"{Path(name).name} claims to be of {self.sizes[name]} bytes")
        return self.open(name)


class Contents(NamedTuple):
    """What the folder holds; the zip and its unpacked folder hold the same."""

    wnids: tuple[str, ...]
    """The names of the classes."""
    train: dict[str, int]
    """Image file -> label, as in `test`."""
    test: dict[str, int]
    key: str
    """A hash of every image's name, label and size."""


@dataclass(frozen=True)
class TinyImageNet(ArchivedSource):
    """The data set, with the numbers of classes and images that it must have."""

    folder: str = FOLDER
    classes: int = 200
    train_per_class: int = 500
    test_images: int = 10_000

    def load(self, root: Path, progress: Reporter | None) -> Dataset:
        """The data set, 3 x 64 x 64, classes in the order of wnids.txt; the first time, this decodes every image."""
        with self._open(root) as tree:
            contents = self._survey(tree)
            train, test = _read_cache(root / CACHE, contents) or self._decode(tree, contents, root, progress)
        labels = [torch.tensor(list(split.values())) for split in (contents.train, contents.test)]
        return Dataset(ImageSet(train, labels[0]), ImageSet(test, labels[1]), self.classes, contents.wnids)

    def _folder_status(self, folder: Path, verify: bool) -> Status:
        if not verify:
            return Status("present", folder, "The folder is there; its images were not counted.", 0)
        detail = "Every image is there; no checksums of single images are published."
        with self._open(folder.parent) as tree:
            found = Status("present", folder, detail, sum(tree.sizes.values()))
            try:
                self._survey(tree)
            except DataError as error:
                found = found._replace(state="damaged", detail=str(error))
        return found

    @contextmanager
    def _open(self, root: Path) -> Iterator[Tree]:
        folder, archive, prefix = root / self.folder, root / self.archive.name, f"{FOLDER}/"
        if folder.is_dir():
            files = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
            sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files if file.is_file()}
            yield Tree(folder, sizes, lambda name: (folder / name).read_bytes())
        elif archive.is_file():
            try:
                opened = zipfile.ZipFile(archive)
            except Exception:  # a broken zip may raise anything
                raise self.archive.damaged(root, "it is not a whole zip file") from None
            with opened:
                entries = (each for each in opened.infolist() if each.filename.startswith(prefix) and not each.is_dir())
                sizes = {entry.filename.removeprefix(prefix): entry.file_size for entry in entries}
                yield Tree(archive, sizes, lambda name: opened.read(prefix + name))
        else:
            raise self.archive.missing(root)

    def _survey(self, tree: Tree) -> Contents:
        """The contents of a complete tree; anything that is missing raises."""
        wnids = tuple(_text(tree, "wnids.txt").split())
        if not len(wnids) == len(set(wnids)) == self.classes:
            raise DataError(f"{tree.path / 'wnids.txt'} does not name {self.classes} different classes.")
        images: dict[str, list[str]] = {}  # by folder
        for name in sorted(tree.sizes):
            if name.endswith(".JPEG"):
                images.setdefault(name.rpartition("/")[0], []).append(name)
        train: dict[str, int] = {}
        for label, wnid in enumerate(wnids):
            folder = f"train/{wnid}/images"
            train |= dict.fromkeys(_counted(tree, folder, images.get(folder, []), self.train_per_class), label)
        test = _annotations(tree, wnids, images.get("val/images", []))
        _counted(tree, "val/images", list(test), self.test_images)
        lines = "\n".join(f"{name} {label} {tree.sizes[name]}" for name, label in {**train, **test}.items())
        return Contents(wnids, train, test, hashlib.sha256(lines.encode()).hexdigest())

    def _decode(self, tree: Tree, contents: Contents, root: Path, progress: Reporter | None) -> tuple[Tensor, Tensor]:
        if tree.path.is_file() and archive_status(self.archive, root, verify=True).state == "damaged":
            raise self.archive.damaged(root, "it is not the published file")
        images = _decode_all(tree, [*contents.train, *contents.test], progress)
        train, test = images[: len(contents.train)], images[len(contents.train) :]
        _write_cache(root / CACHE, contents.key, train, test)
        return train, test


def _text(tree: Tree, name: str) -> str:
    try:
        return tree.read(name).decode("utf-8", "replace")
    except Exception as error:  # a broken zip may raise anything
        raise DataError(f"{tree.path / name} is missing or cannot be read ({error}). Unpack it again.") from None


def _counted(tree: Tree, folder: str, images: list[str], expected: int) -> list[str]:
    """The images of a folder, if they are as many as expected."""
    if len(images) != expected:
        raise DataError(f"{tree.path / folder} holds {len(images)} images; {expected} expected. Unpack it again.")
    return images


def _annotations(tree: Tree, wnids: tuple[str, ...], found: list[str]) -> dict[str, int]:
    """Image file -> label, in the order of val_annotations.txt, which must list the images found.

    Its lines are "file, wnid, box", tab-separated.
    """
    annotations, label_of = tree.path / "val" / "val_annotations.txt", {wnid: at for at, wnid in enumerate(wnids)}
    labels: dict[str, int] = {}
    for number, line in enumerate(_text(tree, "val/val_annotations.txt").splitlines(), start=1):
        file, wnid = (line + "\t").split("\t")[:2]
        if wnid not in label_of:
            raise DataError(f"{annotations}, line {number}: '{wnid}' is not a class of wnids.txt.")
        labels[f"val/images/{file}"] = label_of[wnid]
    for name in labels.keys() ^ set(found):
        raise DataError(f"{annotations} and the images that are there differ in {name}. Unpack it again.")
    return labels


def _decode_all(tree: Tree, names: list[str], progress: Reporter | None) -> Tensor:
    """uint8 (N, 3, 64, 64). One thread, because decoding images this small mostly holds the interpreter lock."""
    pixels = np.empty((len(names), 3, SIDE, SIDE), np.uint8)
    for done, name in enumerate(names, start=1):
        pixels[done - 1] = _decode_image(tree, name)
        if progress and (done % REPORT_EVERY == 0 or done == len(names)):
            progress(f"decode {FOLDER}", done, len(names))
    return torch.from_numpy(pixels)


def _decode_image(tree: Tree, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8 (3, 64, 64); a grey image gets three equal channels."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(tree.read(name)), formats=("JPEG",))
        # Pixels of other images are never decoded: they may need any amount of memory.
        pixels = np.asarray(image.convert("RGB")) if image.size == (SIDE, SIDE) else None
    except Exception as error:  # a broken image may raise anything
        raise DataError(f"{tree.path / name} is not a whole JPEG ({error}). Unpack it again.") from None
    if pixels is None:
        raise DataError(f"{tree.path / name} is {image.width} x {image.height} pixels; {SIDE} x {SIDE} expected.")
    return pixels.transpose(2, 0, 1)


def _read_cache(path: Path, contents: Contents) -> tuple[Tensor, Tensor] | None:
    """The decoded images, if the file `path` is complete and was made from these contents; mapped, not copied."""
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
    """Store the decoded images. If that fails, they are only decoded again next time."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with replacing(path) as part:
            save_file({"train": train, "test": test}, part, metadata={"key": key})
            part.chmod(0o644)  # safetensors makes it private; a data root may be shared
    except (OSError, SafetensorError) as error:
        warnings.warn(f"The decoded images could not be stored at {path} ({error}).", stacklevel=2)


DATASETS.register("tinyimagenet", "100,000 + 10,000 colour 64 x 64 photographs, 200 classes")(
    TinyImageNet(
        Archive("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de", 248_100_043)
    )
)
