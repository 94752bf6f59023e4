"""Where data files lie and whether they are the published ones."""

from __future__ import annotations

import hashlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import DataError

__all__ = ["Archive", "checked", "data_root", "map_array", "matches"]


@dataclass(frozen=True)
class Archive:
    """A published file: its name, where it is published, its checksum as "algorithm:hex", its size in bytes."""

    name: str
    url: str
    checksum: str
    size: int

    def by_hand(self, root: Path) -> str:
        """What to tell someone who has to put the file in place themselves."""
        return f"Download it yourself from {self.url} and put it at {root / self.name}."


def data_root(root: Path | str | None = None) -> Path:
    """The folder that holds the data sets: `root`, else $HOLDFAST_DATA, else `holdfast` in the user's cache folder."""
    chosen = root or os.environ.get("HOLDFAST_DATA")
    return Path(chosen).expanduser() if chosen else _user_cache() / "holdfast"


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def matches(stream: io.BufferedReader | io.BytesIO, checksum: str) -> bool:
    """Whether what is left of `stream` has the checksum "algorithm:hex"."""
    algorithm, _, digest = checksum.partition(":")
    # MD5 guards against damage here, not against an adversary; without the flag FIPS builds refuse it.
    found = hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return found.hexdigest() == digest


def checked(content: bytes, checksum: str, path: Path) -> bytes:
    """`content` itself if it has the checksum; `path` names it in the error otherwise."""
    if not matches(io.BytesIO(content), checksum):
        raise DataError(
            f"{path} is damaged or altered: its checksum is not {checksum}. Delete it and put the published file there."
        )
    return content


def map_array(path: Path) -> NDArray[Any]:
    """The array in a .npy file, read-only and not yet read: only what is looked at comes into memory.

    Whatever the file announces, no more than it holds is mapped, and nothing in it is executed.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a broken header may raise anything
        raise DataError(f"{path} cannot be read as a NumPy array ({error}). Fetch it again.") from None
