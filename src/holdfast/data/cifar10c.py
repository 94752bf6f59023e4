"""CIFAR-10-C: the published corrupted test images of CIFAR-10. They are for analyses; nothing trains on them."""

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.catalogue import DATASETS, Dataset, Reporter, Status
from holdfast.data.download import ArchivedSource, files_status
from holdfast.data.files import Archive, map_array
from holdfast.errors import DataError, UsageError

__all__ = ["FOLDER", "Cifar10C", "PublishedCorruptions"]

FOLDER = "CIFAR-10-C"
CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    *("snow", "frost", "fog", "brightness", "spatter"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression", "saturate"),
)


@dataclass(frozen=True)
class PublishedCorruptions:
    """The published CIFAR-10-C folder: a file NAME.npy per corruption and labels.npy, read as plain arrays only.

    Each file holds the 10,000 test images five times, severity 1 first, as uint8 (50000, 32, 32, 3).
    """

    folder: Path

    PER_SEVERITY = 10_000
    SHAPE = (50_000, 32, 32, 3)

    @classmethod
    def find(cls, path: Path) -> Self | None:
        """The set in `path` or in its subfolder CIFAR-10-C; None if neither has a labels.npy."""
        for folder in (path, path / FOLDER):
            if (folder / "labels.npy").is_file():
                return cls(folder)
        return None

    def check(self, images: Tensor, labels: Tensor, names: Iterable[str]) -> None:
        """Raise an error unless the set belongs to these images and labels and has every corruption in `names`."""
        if tuple(images.shape) != (self.PER_SEVERITY, 3, 32, 32):
            raise UsageError(
                f"the published CIFAR-10-C corrupts the {self.PER_SEVERITY:,} CIFAR-10 test images, "
                f"got images of shape {tuple(images.shape)}; leave `published` out to generate corruptions of your own."
            )
        if not np.array_equal(self.array("labels", self.SHAPE[:1]), np.tile(labels.cpu().numpy(), 5)):
            raise DataError(
                f"{self.folder / 'labels.npy'} does not hold the labels of these test images five times over; "
                "the test set must be that of CIFAR-10 in its original order."
            )
        for name in names:
            self.array(name, self.SHAPE)

    def images(self, name: str, severity: int) -> Tensor:
        """The test images under one corruption, uint8 (10000, 3, 32, 32); other severities are not read."""
        start = (severity - 1) * self.PER_SEVERITY
        stored = self.array(name, self.SHAPE)[start : start + self.PER_SEVERITY]
        return torch.from_numpy(np.array(stored)).permute(0, 3, 1, 2).contiguous()

    def array(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The array in NAME.npy, which must hold integers of this shape. Its numbers are read when they are used."""
        file = self.folder / f"{name}.npy"
        if not file.is_file():
            raise DataError(f"{file} is missing; the published CIFAR-10-C folder has one .npy file per corruption.")
        stored = map_array(file)
        if stored.shape != shape or not np.issubdtype(stored.dtype, np.integer):
            found = f"it holds {stored.dtype} {stored.shape}, expected integers {shape}"
            raise DataError(f"{file} is not as published: {found}. Fetch it again.")
        return stored


@dataclass(frozen=True)
class Cifar10C(ArchivedSource):
    """The published archive, and the folder of .npy files unpacked from it, which analyses read."""

    folder: str = FOLDER
    images: int = 50_000
    """Rows of every file: the test images at five severities."""
    largest: ClassVar[int] = 4 << 30
    refusal: ClassVar[str] = (
        "cifar10-c is test data only: it has no training images to load. "
        "'holdfast analyze RUN --corruptions' uses it for runs on CIFAR-10."
    )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every file of the folder with the shape of its array."""
        arrays = {f"{name}.npy": (self.images, 32, 32, 3) for name in CORRUPTIONS}
        return {**arrays, "labels.npy": (self.images,)}

    def load(self, root: Path, progress: Reporter | None) -> Dataset:
        """Raises a DataError: there are no training images."""
        raise DataError(self.refusal)

    def fetch(self, root: Path, progress: Reporter | None) -> Path:
        """The folder, unpacked from the archive, which is downloaded if necessary and stays there."""
        path = super().fetch(root, progress)
        return path if path == root / FOLDER else self._unpack(root, progress)

    def _folder_status(self, folder: Path, verify: bool) -> Status:
        found = files_status(folder, self.shapes, self._check if verify else None)
        if found.state != "verified":
            return found
        # Only the archive has a published checksum, so a folder is never more than "present".
        return found._replace(state="present", detail="Every file has the published shape; there are no checksums.")

    def _check(self, folder: Path) -> None:
        for name, shape in self.shapes.items():
            PublishedCorruptions(folder).array(name.removesuffix(".npy"), shape)

    def _unpack(self, root: Path, progress: Reporter | None) -> Path:
        """Make the complete folder in `root`, or nothing."""
        written: list[Path] = []

        def write(name: str, stream: IO[bytes]) -> None:
            written.append(made / name)
            with written[-1].open("wb") as file:
                shutil.copyfileobj(stream, file, 1 << 22)
            if progress:
                progress(f"unpack {self.archive.name}", len(written), len(self.shapes))

        try:
            with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=root) as scratch:
                made = Path(scratch, FOLDER)
                made.mkdir()
                self._each_member(root, self.shapes, write)
                made.rename(root / FOLDER)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{root / self.archive.name} could not be unpacked in {root}: {reason}.") from None
        return root / FOLDER


DATASETS.register("cifar10-c", "CIFAR-10's test images under 19 corruptions at 5 severities, for 'holdfast analyze'")(
    Cifar10C(
        Archive(
            "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
            "md5:56bf5dcef84df0e2308c6dcbcbbd8499",
            2_918_471_680,
        )
    )
)
