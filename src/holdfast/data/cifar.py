"""CIFAR-10 and CIFAR-100, from the published "python version": the archive, or the folder it unpacks to."""

import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from holdfast.data.catalogue import DATASETS, Dataset, ImageSet, Reporter, Status
from holdfast.data.download import ArchivedSource, files_status
from holdfast.data.files import Archive, checked, read_all_checked
from holdfast.errors import DataError

__all__ = ["Cifar", "unpickle"]


class _Code:
    """Replaces numpy.dtype in a file: it only notes whether the type is "bytes"."""

    def __init__(self, code: object, *flags: object) -> None:
        self.is_bytes = code in (b"u1", "u1")

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment, which bytes do not have."""


class _Array:
    """Replaces numpy.ndarray in a file; only its bytes are copied, and no function of NumPy is called.

    The real class would build an array of any size, or of objects at addresses that the file gives.
    """

    array: np.ndarray[Any, np.dtype[np.uint8]]

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Code, object, bytes]) -> None:
        _, shape, code, by_column, content = state
        if not code.is_bytes or by_column or math.prod(shape) != len(content):
            raise DataError("its arrays are not rows of bytes")
        # A copy, because torch needs writable memory.
        self.array = np.frombuffer(content, np.uint8).reshape(shape).copy()


# Everything that the published files refer to, by the names of an old numpy.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Code,
}


# Python's own unpickler, because the one in C allocates as much memory as a file asks for.
class _ArrayUnpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(f"it refers to {module}.{name}, which no CIFAR file does")
        return _ALLOWED[module, name]


def unpickle(content: bytes, path: Path) -> dict[bytes, Any]:
    """The dictionary in a CIFAR file. Only plain values and arrays of bytes are built; errors name `path`."""
    try:
        loaded = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a broken pickle may raise anything
        raise DataError(f"{path} is not a CIFAR file: {error}. It was not loaded.") from None
    if not isinstance(loaded, dict):
        raise DataError(f"{path} is not a CIFAR file: it holds no dictionary.")
    return {key: getattr(value, "array", None) if isinstance(value, _Array) else value for key, value in loaded.items()}


@dataclass(frozen=True)
class Cifar(ArchivedSource):
    """One of the two data sets. `train`, `test` and `meta` map the names of files to their checksums."""

    train: Mapping[str, str]
    test: Mapping[str, str]
    meta: Mapping[str, str]
    label_key: bytes
    names_key: bytes

    @property
    def checksums(self) -> dict[str, str]:
        """The checksum of every file."""
        return {**self.train, **self.test, **self.meta}

    def load(self, root: Path, progress: Reporter | None) -> Dataset:
        """The data set, 3 x 32 x 32, in the published order; each file's checksum is verified before it is loaded."""
        folder = root / self.folder
        files = self._read_folder(folder) if folder.is_dir() else self._read_archive(root)
        names = self._class_names(files, folder)
        train, test = (
            ImageSet.joined(self._batch(files[name], folder / name, len(names)) for name in split)
            for split in (self.train, self.test)
        )
        return Dataset(train, test, len(names), names)

    def _folder_status(self, folder: Path, verify: bool) -> Status:
        return files_status(folder, self.checksums, self._read_folder if verify else None)

    def _read_folder(self, folder: Path) -> dict[str, bytes]:
        return read_all_checked(folder, self.checksums, "Unpack the archive again.")

    def _read_archive(self, root: Path) -> dict[str, bytes]:
        files: dict[str, bytes] = {}

        def read(name: str, stream: IO[bytes]) -> None:
            files[name] = checked(stream.read(), self.checksums[name], root / self.archive.name / name)

        self._each_member(root, self.checksums, read)
        return files

    def _class_names(self, files: Mapping[str, bytes], folder: Path) -> tuple[str, ...]:
        (name,) = self.meta
        names = unpickle(files[name], folder / name).get(self.names_key)
        if not isinstance(names, list) or not names or not all(isinstance(entry, bytes) for entry in names):
            raise DataError(f"{folder / name} does not hold the names of the classes.")
        return tuple(entry.decode("utf-8", "replace") for entry in names)

    def _batch(self, content: bytes, path: Path, classes: int) -> ImageSet:
        batch = unpickle(content, path)
        images, labels = batch.get(b"data"), batch.get(self.label_key)
        if not isinstance(images, np.ndarray) or images.shape[1:] != (3072,):
            raise DataError(f"{path} holds no rows of 3 x 32 x 32 bytes.")
        labels = labels if isinstance(labels, list) else [None]
        if len(labels) != len(images) or not all(isinstance(label, int) and 0 <= label < classes for label in labels):
            raise DataError(f"{path} does not hold one label from 0 to {classes - 1} for each image.")
        return ImageSet(torch.from_numpy(images).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64))


_HOME = "https://www.cs.toronto.edu/~kriz/"

DATASETS.register("cifar10", "50,000 + 10,000 colour 32 x 32 photographs, 10 classes")(
    Cifar(
        archive=Archive(_HOME + "cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a", 170_498_071),
        folder="cifar-10-batches-py",
        train={
            "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
            "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
            "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "md5:40351d587109b95175f43aff81a1287e"},
        meta={"batches.meta": "md5:5ff9c542aee3614f3951f8cda6e48888"},
        label_key=b"labels",
        names_key=b"label_names",
    )
)

DATASETS.register("cifar100", "50,000 + 10,000 colour 32 x 32 photographs, 100 classes (the fine labels)")(
    Cifar(
        archive=Archive(_HOME + "cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85", 169_001_437),
        folder="cifar-100-python",
        train={"train": "md5:16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc"},
        meta={"meta": "md5:7973b15100ade9c7d40fb424638fde48"},
        label_key=b"fine_labels",
        names_key=b"fine_label_names",
    )
)
