"""MNIST, from the four canonical files, which ship inside the package."""

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.data.catalogue import DATASETS, Dataset, ImageSet, Reporter, Status
from holdfast.data.download import files_status
from holdfast.data.files import read_all_checked
from holdfast.errors import DataError

__all__ = ["Mnist", "parse_idx"]

CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "sha256:0b367032e93c5d0cea0925647cfdb18614af8ee15f83e6f2fc2ad904a6835971",
    "train-labels-idx1-ubyte.gz": "sha256:1787548bbe0bff1ec2ecdc0ef292b02df999e2d1a6002d27500982c652b17203",
    "t10k-images-idx3-ubyte.gz": "sha256:1a1a05eab793c14bb050b398624a11b0ffd1a2953baed553b1b9bd079e2a20be",
    "t10k-labels-idx1-ubyte.gz": "sha256:b91679a0acfe4ba0e50a2437a903084cba1f5f92592b016a25a7dfd00455798b",
}


def parse_idx(content: bytes, rank: int, path: Path) -> Tensor:
    """The uint8 array of an unpacked IDX file, which must have `rank` dimensions; errors name `path`."""
    header = 4 + 4 * rank
    if content[:4] != bytes([0, 0, 8, rank]) or len(content) < header:
        raise DataError(f"{path} is not an IDX file of bytes in {rank} dimensions.")
    shape = struct.unpack(f">{rank}I", content[4:header])
    if len(content) - header != math.prod(shape) or 0 in shape:
        announced = " x ".join(map(str, shape))
        raise DataError(f"{path} announces {announced} values and holds {len(content) - header}.")
    # A copy, because torch needs writable memory.
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy())


@dataclass(frozen=True)
class Mnist:
    """The four files in `folder`, with the checksums they must have."""

    folder: Path
    checksums: Mapping[str, str] = field(default_factory=lambda: CHECKSUMS)

    def load(self, root: Path, progress: Reporter | None) -> Dataset:
        """MNIST, 1 x 28 x 28; `root` is not used."""
        files = self._read(self.folder)
        train, test = (self._split(files, prefix) for prefix in ("train", "t10k"))
        return Dataset(train, test, 10, tuple("0123456789"))

    def status(self, root: Path, verify: bool) -> Status:
        """Bundled, unless files were removed or, with `verify`, changed."""
        found = files_status(self.folder, self.checksums, self._read if verify else None)
        return found if found.state == "damaged" else found._replace(state="bundled", detail="Ships with Holdfast.")

    def fetch(self, root: Path, progress: Reporter | None) -> Path:
        """The bundled folder: there is nothing to download."""
        found = self.status(root, verify=True)
        if found.state != "bundled":
            raise DataError(f"{found.detail} MNIST is a part of Holdfast; installing Holdfast again restores it.")
        return self.folder

    def _read(self, folder: Path) -> dict[str, bytes]:
        return read_all_checked(folder, self.checksums, "Install Holdfast again.")

    def _split(self, files: Mapping[str, bytes], prefix: str) -> ImageSet:
        images, labels = (
            parse_idx(_unzipped(files[name], self.folder / name), rank, self.folder / name)
            for name, rank in ((f"{prefix}-images-idx3-ubyte.gz", 3), (f"{prefix}-labels-idx1-ubyte.gz", 1))
        )
        if len(images) != len(labels) or bool((labels > 9).any()):
            raise DataError(f"MNIST '{prefix}' in {self.folder}: images and labels do not belong together.")
        return ImageSet(images.unsqueeze(1), labels.long())


def _unzipped(content: bytes, path: Path) -> bytes:
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}). Install Holdfast again.") from None


DATASETS.register("mnist", "60,000 + 10,000 grey 28 x 28 digits, 10 classes; ships with Holdfast")(
    Mnist(Path(__file__).parent / "files" / "mnist")
)
