"""Published archives onto this machine: downloaded through pooch, or found where someone put them."""

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from holdfast.data.catalogue import Reporter, Status
from holdfast.data.files import Archive, matches
from holdfast.errors import DataError

__all__ = ["ArchivedSource", "archive_status", "download", "files_status"]


@dataclass(frozen=True)
class ArchivedSource:
    """A data set that is one archive in the data root, or the folder that someone unpacked from it."""

    archive: Archive
    folder: str
    largest: ClassVar[int] = 1 << 30
    """Limit on the unpacked size of a tar archive in bytes."""

    def status(self, root: Path, verify: bool) -> Status:
        """Where the folder is or, if there is none, the archive."""
        folder = root / self.folder
        return self._folder_status(folder, verify) if folder.is_dir() else archive_status(self.archive, root, verify)

    def fetch(self, root: Path, progress: Reporter | None) -> Path:
        """The folder or the archive, which is downloaded if it is missing or damaged."""
        found = self.status(root, verify=True)
        if found.state in ("verified", "present"):
            return found.path
        if found.path == root / self.folder:
            # Someone unpacked it, so we do not delete it. As long as it is there, the archive is not used.
            raise DataError(f"{found.detail} Delete the folder {found.path}, then fetch again.")
        return download(self.archive, root, progress)

    def _folder_status(self, folder: Path, verify: bool) -> Status:
        raise NotImplementedError

    def _each_member(self, root: Path, names: Iterable[str], take: Callable[[str, IO[bytes]], None]) -> None:
        """Call `take` with the name and the content of these files in the folder of the tar archive.

        Members are read, never extracted: no path inside the archive is ever written to.
        """
        path, missing = root / self.archive.name, set(names)
        if not path.is_file():
            raise self.archive.missing(root)
        try:
            with tarfile.open(path, "r:gz" if path.suffix == ".gz" else "r:") as tar:
                for member in tar:
                    if member.offset_data + member.size > self.largest:
                        raise tarfile.ReadError(f"{member.name} claims to be of {member.size} bytes")
                    name = member.name.removeprefix(f"{self.folder}/")
                    stream = tar.extractfile(member) if name in missing and member.isreg() else None
                    if stream is not None:
                        take(name, stream)
                        missing.remove(name)
        except (tarfile.TarError, EOFError, ValueError, gzip.BadGzipFile, zlib.error) as error:
            raise self.archive.damaged(root, error) from None
        if missing:
            raise self.archive.damaged(root, f"it does not contain {', '.join(sorted(missing))}")


def files_status(folder: Path, names: Iterable[str], check: Callable[[Path], object] | None) -> Status:
    """Whether `folder` has all these files. `check(folder)` raises a DataError if they are not the published ones."""
    paths = [folder / name for name in names]
    gone = [path.name for path in paths if not path.is_file()]
    size = sum(path.stat().st_size for path in paths if path.is_file())
    if gone:
        return Status("damaged", folder, f"{folder} is incomplete: {', '.join(gone)} not there.", size)
    if check is None:
        return Status("present", folder, "Every file is there; their contents were not checked.", size)
    try:
        check(folder)
    except DataError as error:
        return Status("damaged", folder, str(error), size)
    return Status("verified", folder, "Every file is the published one.", size)


def archive_status(archive: Archive, root: Path, verify: bool) -> Status:
    """Whether the archive is in `root` and, with `verify`, whether it is the published one."""
    path = root / archive.name
    if not path.is_file():
        return Status("missing", path, f"Not there; {archive.size / 1e6:.0f} MB to fetch from {archive.url}.", 0)
    size = path.stat().st_size
    if not verify:
        return Status("present", path, "The archive is there; its checksum was not compared.", size)
    with path.open("rb") as stream:
        if not matches(stream, archive.checksum):
            detail = f"{path} is not the published file: its checksum is not {archive.checksum}."
            return Status("damaged", path, detail, size)
    return Status("verified", path, "The archive is the published one.", size)


def download(archive: Archive, root: Path, progress: Reporter | None = None, *, retries: int = 3) -> Path:
    """Download and verify the archive; returns its path in `root`. Only a complete and correct file gets that name."""
    try:
        import pooch
        from requests.exceptions import ChunkedEncodingError, ConnectionError, RequestException, Timeout
    except ImportError:
        remedy = f"pip install 'holdfast[download]'. Or: {archive.by_hand(root)}"
        raise DataError(f"Fetching {archive.name} needs pooch: {remedy}") from None
    pooch.get_logger().setLevel("WARNING")  # or it announces each download on standard error
    bar = _Bar(f"download {archive.name}", progress) if progress else False
    shelf = pooch.create(
        path=root,
        base_url="",
        registry={archive.name: archive.checksum},
        urls={archive.name: archive.url},
        retry_if_failed=retries,
    )
    try:
        # With pooch's own chunks of 1 KiB, progress would be reported far too often.
        shelf.fetch(archive.name, downloader=pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 20))
        (root / archive.name).chmod(0o644)  # pooch leaves it private; a data root may be shared
    except Timeout:
        reason = "the server did not answer in time"
    except (ConnectionError, ChunkedEncodingError):
        reason = "no connection to the server, or it broke off"
    except RequestException as error:
        reason = str(error)
    except ValueError:
        reason = f"what arrived does not have the checksum {archive.checksum}"
    except OSError as error:
        reason = f"it could not be written: {error}"
    else:
        return root / archive.name
    raise DataError(f"{archive.name} could not be fetched from {archive.url} ({reason}). {archive.by_hand(root)}")


class _Bar:
    """A progress bar in the form that pooch wants; it calls our reporter."""

    def __init__(self, what: str, progress: Reporter) -> None:
        self._what, self._progress = what, progress

    def _begin(self, total: int) -> None:
        self._total, self._done = total, 0

    total = property(fset=_begin)  # pooch sets it at the beginning of each attempt

    def update(self, size: int) -> None:
        self._done = min(self._done + size, self._total)  # pooch counts the last chunk as a full one
        self._progress(self._what, self._done, self._total)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        pass
