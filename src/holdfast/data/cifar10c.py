"""CIFAR-10-C: the CIFAR-10 test images, corrupted, as published. Test data for analyses; nothing trains on it."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

import numpy as np

from holdfast.data.catalogue import DATASETS, Dataset, Progress, Status
from holdfast.data.download import archive_status, fetch_archive
from holdfast.data.files import Archive, map_array
from holdfast.errors import DataError

__all__ = ["FOLDER", "Cifar10C"]

FOLDER = "CIFAR-10-C"
CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    *("snow", "frost", "fog", "brightness", "spatter"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression", "saturate"),
)


@dataclass(frozen=True)
class Cifar10C:
    """The published archive, and the folder of .npy files it unpacks to, which is what analyses read."""

    archive: Archive
    images: int = 50_000
    """Rows of every file: the test images at five severities."""
    refusal: ClassVar[str] = (
        "cifar10-c is test data only: it has no training images to load. "
        "'holdfast analyze RUN --corruptions' uses it for runs on seq-cifar10."
    )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every file of the folder with the shape of its array."""
        arrays = {f"{name}.npy": (self.images, 32, 32, 3) for name in CORRUPTIONS}
        return {**arrays, "labels.npy": (self.images,)}

    def load(self, root: Path, progress: Progress | None) -> Dataset:
        """A DataError: there are no training images."""
        raise DataError(self.refusal)

    def status(self, root: Path, verify: bool) -> Status:
        """Where the folder or, failing that, the archive is. `verify` looks into the folder's files.

        A checksum is published for the archive only, so that a folder is never more than "present".
        """
        folder = root / FOLDER
        if not folder.is_dir():
            return archive_status(self.archive, root, verify)
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        wrong = [name for name in self.shapes if not (folder / name).is_file()]
        if wrong:
            return Status("damaged", folder, f"{folder} is incomplete: {', '.join(wrong)} not there.", size)
        if not verify:
            return Status("present", folder, "Every file is there; what is in them was not looked at.", size)
        wrong = [name for name, shape in self.shapes.items() if not _holds(folder / name, shape)]
        if wrong:
            return Status("damaged", folder, f"{folder} is damaged: {', '.join(wrong)} not as published.", size)
        return Status("present", folder, "Every file has the published shape; only the archive has a checksum.", size)

    def fetch(self, root: Path, progress: Progress | None) -> Path:
        """The folder, unpacked from the archive, which is downloaded if need be and kept."""
        path = fetch_archive(self.archive, self.status(root, verify=True), root, progress)
        return path if path == root / FOLDER else self._unpack(path, root, progress)

    def _unpack(self, archive: Path, root: Path, progress: Progress | None) -> Path:
        """The folder `root` / CIFAR-10-C; whole or not at all."""
        scratch = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=root))
        try:
            with tarfile.open(archive, "r:") as tar:
                missing = set(self.shapes)
                for member in tar:
                    # Only the names we know, written where we say: no path inside the archive is ever followed.
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
                self._refuse(archive, f"it does not contain {', '.join(sorted(missing))}")
            scratch.chmod(0o755)
            scratch.rename(root / FOLDER)
        except (tarfile.TarError, EOFError, ValueError) as error:
            self._refuse(archive, str(error))
        except OSError as error:
            raise DataError(f"{archive} could not be unpacked in {root}: {error.strerror or error}.") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return root / FOLDER

    def _refuse(self, archive: Path, reason: str) -> NoReturn:
        raise DataError(f"{archive} is damaged ({reason}). Delete it. {self.archive.by_hand(archive.parent)}") from None


def _holds(file: Path, shape: Iterable[int]) -> bool:
    """Whether the file is a plain array of integers of that shape; its numbers are not read."""
    try:
        stored = map_array(file)
    except DataError:
        return False
    return stored.shape == tuple(shape) and np.issubdtype(stored.dtype, np.integer)


DATASETS.register("cifar10-c", "CIFAR-10's test images under 19 corruptions at 5 severities, for 'holdfast analyze'")(
    Cifar10C(
        Archive(
            "CIFAR-10-C.tar",
            "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
            "md5:56bf5dcef84df0e2308c6dcbcbbd8499",
            2_918_471_680,
        )
    )
)
