"""Published archives onto this machine: downloaded through pooch, or found where someone put them."""

from __future__ import annotations

from pathlib import Path

from holdfast.data.catalogue import Progress, Status
from holdfast.data.files import Archive, matches
from holdfast.errors import DataError

__all__ = ["archive_status", "download", "fetch_archive", "missing"]


def missing(archive: Archive, root: Path) -> DataError:
    """The error for an archive that is not there."""
    return DataError(f"{archive.name} is not in {root}. {archive.by_hand(root)}")


def archive_status(archive: Archive, root: Path, verify: bool) -> Status:
    """Whether the archive is in `root` and, with `verify`, whether it is the published one."""
    path = root / archive.name
    if not path.is_file():
        return Status("missing", path, f"Not there; {archive.size / 1e6:.0f} MB to fetch from {archive.url}.", 0)
    size = path.stat().st_size
    if not verify:
        return Status("present", path, "The archive is there; its checksum was not looked at.", size)
    with path.open("rb") as stream:
        if not matches(stream, archive.checksum):
            detail = f"{path} is not the published file: its checksum is not {archive.checksum}."
            return Status("damaged", path, detail, size)
    return Status("verified", path, "The archive is the published one.", size)


def fetch_archive(archive: Archive, found: Status, root: Path, progress: Progress | None) -> Path:
    """Where the data is, downloading the archive if it was `found` missing or damaged."""
    if found.state in ("verified", "present"):
        return found.path
    if found.path != root / archive.name:
        # A folder someone unpacked: not ours to delete, and it would go on hiding the archive.
        raise DataError(f"{found.detail} Delete the folder {found.path}, then fetch again.")
    return download(archive, root, progress)


def download(archive: Archive, root: Path, progress: Progress | None = None, *, retries: int = 3) -> Path:
    """The path of the archive in `root`, downloaded and verified. Only a complete, right file ever gets that name."""
    try:
        import pooch
        from requests.exceptions import ChunkedEncodingError, ConnectionError, RequestException, Timeout
    except ImportError:
        raise DataError(
            f"Fetching {archive.name} needs pooch: pip install 'holdfast[download]'. Or: {archive.by_hand(root)}"
        ) from None
    pooch.get_logger().setLevel("WARNING")  # it would announce each download on standard error
    bar = _Bar(f"download {archive.name}", progress) if progress else False
    shelf = pooch.create(
        path=root,
        base_url="",
        registry={archive.name: archive.checksum},
        urls={archive.name: archive.url},
        retry_if_failed=retries,
    )
    try:
        # pooch's chunks of 1 KiB would mean a progress call each.
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
    """A progress bar as pooch drives one, passing on to our callback."""

    def __init__(self, what: str, progress: Progress) -> None:
        self._what, self._progress = what, progress
        self._total = self._done = 0

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, size: int) -> None:
        self._total = size
        self.reset()  # pooch says the total anew for each attempt, and nothing else

    def update(self, size: int) -> None:
        self._done = min(self._done + size, self._total)  # pooch counts the last chunk as a full one
        self._progress(self._what, self._done, self._total)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        pass
