"""CIFAR-10-C: the published corrupted test images of CIFAR-10. They are for analyses; nothing trains on them."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from holdfast.data.catalogue import DATASETS, Dataset, Reporter, Status
from holdfast.data.download import ArchivedSource, files_status
from holdfast.data.files import Archive, map_array
from holdfast.errors import DataError

__all__ = ["FOLDER", "Cifar10C", "published_array"]

FOLDER = "CIFAR-10-C"
CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    *("snow", "frost", "fog", "brightness", "spatter"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression", "saturate"),
)


def published_array(file: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """The array in a file of the published folder. Its numbers are read when they are used."""
    if not file.is_file():
        raise DataError(f"{file} is missing; the published CIFAR-10-C folder has one .npy file per corruption.")
    stored = map_array(file)
    if stored.shape != shape or not np.issubdtype(stored.dtype, np.integer):
        raise DataError(
            f"{file} is not as published: it holds {stored.dtype} {stored.shape}, expected integers {shape}. "
            "Fetch it again."
        )
    return stored


@dataclass(frozen=True)
class Cifar10C(ArchivedSource):
    """The published archive, and the folder of .npy files unpacked from it, which analyses read."""

    folder: str = FOLDER
    images: int = 50_000
    """Rows of every file: the test images at five severities."""
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
        return path if path == root / FOLDER else self._unpack(path, root, progress)

    def _folder_status(self, folder: Path, verify: bool) -> Status:
        found = files_status(folder, self.shapes, self._check if verify else None)
        if found.state != "verified":
            return found
        # Only the archive has a published checksum, so that a folder is never more than "present".
        return found._replace(state="present", detail="Every file has the published shape; there are no checksums.")

    def _check(self, folder: Path) -> None:
        for name, shape in self.shapes.items():
            published_array(folder / name, shape)

    def _unpack(self, archive: Path, root: Path, progress: Reporter | None) -> Path:
        """Make the complete folder in `root`, or nothing."""
        scratch = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=root))
        try:
            with tarfile.open(archive, "r:") as tar:
                missing = set(self.shapes)
                for member in tar:
                    # Only known names are written, to our own folder: paths inside the archive are never followed.
                    name = member.name.removeprefix(f"{FOLDER}/")
                    stream = tar.extractfile(member) if name in missing and member.isreg() else None
                    if stream is None:
                        continue
                    with (scratch / name).open("wb") as file:
                        shutil.copyfileobj(stream, file, 1 << 22)
                    missing.remove(name)
                    if progress:
                        progress(f"unpack {archive.name}", len(self.shapes) - len(missing), len(self.shapes))
            if missing:
                raise ValueError(f"it does not contain {', '.join(sorted(missing))}")
            scratch.chmod(0o755)
            scratch.rename(root / FOLDER)
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise self.archive.damaged(root, error) from None
        except OSError as error:
            raise DataError(f"{archive} could not be unpacked in {root}: {error.strerror or error}.") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
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
