"""Where data files lie and whether they are the published ones."""

import hashlib
import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import DataError, UsageError

__all__ = ["Archive", "checked", "data_root", "map_array", "matches", "read_all_checked"]


@dataclass(frozen=True)
class Archive:
    """A published file: its address, its checksum as "algorithm:hex", its size in bytes."""

    url: str
    checksum: str
    size: int

    @property
    def name(self) -> str:
        """The name of the file, in a data root too."""
        return self.url.rpartition("/")[2]

    def by_hand(self, root: Path) -> str:
        """A sentence for people who must put the file in place themselves."""
        return f"Download it yourself from {self.url} and put it at {root / self.name}."

    def missing(self, root: Path) -> DataError:
        """The error for an archive that is not there."""
        return DataError(f"{self.name} is not in {root}. {self.by_hand(root)}")

    def damaged(self, root: Path, reason: object) -> DataError:
        """The error for an archive that is there, but cannot be used."""
        return DataError(f"{root / self.name} is damaged ({reason}). Delete it. {self.by_hand(root)}")


def data_root(root: Path | str | None = None) -> Path:
    """The folder that holds the data sets: `root`, else $HOLDFAST_DATA, else `holdfast` in the user's cache folder."""
    chosen = root or os.environ.get("HOLDFAST_DATA")
    try:
        return Path(chosen).expanduser() if chosen else _user_cache() / "holdfast"
    except RuntimeError as error:  # `~name` of nobody
        raise UsageError(f"{chosen or 'the home folder'} cannot be found: {error} Name a folder with --data.") from None


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def matches(stream: io.BufferedReader | io.BytesIO, checksum: str) -> bool:
    """Whether the rest of `stream` has the checksum "algorithm:hex"."""
    algorithm, _, digest = checksum.partition(":")
    # MD5 detects damage here, not attacks; without this flag, FIPS builds refuse it.
    found = hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return found.hexdigest() == digest


def checked(content: bytes, checksum: str, path: Path) -> bytes:
    """`content`, if it has the checksum; otherwise an error that names `path`."""
    if not matches(io.BytesIO(content), checksum):
        remedy = "Delete it and put the published file there."
        raise DataError(f"{path} is damaged or altered: its checksum is not {checksum}. {remedy}")
    return content


def read_all_checked(folder: Path, checksums: Mapping[str, str], remedy: str) -> dict[str, bytes]:
    """The contents of files that must have these checksums; `remedy` says what to do if one cannot be read."""
    contents = {}
    for name, checksum in checksums.items():
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise DataError(f"{folder / name} cannot be read ({error.strerror}). {remedy}") from None
        contents[name] = checked(content, checksum, folder / name)
    return contents


def map_array(path: Path) -> NDArray[Any]:
    """The array in a .npy file, mapped read-only: only the parts in use are read into memory.

    Nothing in the file is executed, and a header that announces more than the file holds raises.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a broken header may raise anything
        raise DataError(f"{path} cannot be read as a NumPy array ({error}). Fetch it again.") from None
