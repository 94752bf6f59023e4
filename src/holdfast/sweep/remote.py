"""A folder of results behind an address such as s3://..., with a copy of its numbers on this machine.

One sweep at a time has the place: leases of single runs need a file system. The file `.sweep.json` there says which.
"""

import json
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast import results
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, UsageError
from holdfast.files import replacing
from holdfast.schema import parse_json, validated, write_json
from holdfast.sweep.leases import HEARTBEAT, SILENCE, Signature, is_gone, signature

__all__ = ["Remote"]

SWEEP = ".sweep.json"
SETTLING = 2.0
"""Seconds after which a sweep that began at the same moment has written its name as well."""
FINGERPRINT = re.compile("[0-9a-f]{16}")


@dataclass
class _Owner(Signature):
    """Which sweep has the place, and when it last gave a sign of life."""

    sweep: str
    time: float


class Remote:
    """Results behind an address that fsspec knows, mirrored without their tensors in the folder `mirror`."""

    def __init__(self, url: str, mirror: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.folder = mirror
        self.sweep = secrets.token_hex(8)
        """Distinguishes this sweep from all others."""
        self.signed = 0.0
        """When (time.monotonic) it last gave a sign of life."""
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{url} cannot be used for results: {error}.") from error

    def fetch(self) -> None:
        """Copy the numbers of all results there into the mirror."""
        assert self.folder is not None
        for path in self._files.glob(f"{self._root}/*/{results.RESULT}"):
            fingerprint = path.rsplit("/", 2)[1]
            # Keys in a store may be anything, `..` included, and must not decide where we write.
            if FINGERPRINT.fullmatch(fingerprint):
                target = self.folder / fingerprint / results.RESULT
                if not target.exists():
                    with replacing(target) as scratch:
                        scratch.write_bytes(self._files.cat_file(path))

    def save(self, folder: Path) -> None:
        """Upload a result folder. Its result.json comes last, so that half an upload is never read as a result."""
        target = f"{self._root}/{folder.name}"
        self._files.makedirs(target, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == results.RESULT):
            self._files.put_file(str(path), f"{target}/{path.name}")

    def mirror(self, config: RunConfig, values: dict[str, object]) -> None:
        """Write the numbers of a result that a node has uploaded into the mirror."""
        assert self.folder is not None
        write_json(self.folder / config.fingerprint / results.RESULT, values)

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Be the only sweep that carries out runs for this place; a HoldfastError if another sweep does.

        Inside, the mirror has all results that are there. A sweep that is gone, or on another host has been silent
        for ten minutes, no longer has the place.
        """
        self._check_free()
        self._sign()
        # Not every store can create a file exclusively. Of two sweeps that looked at the same moment, the one that
        # wrote last has the place.
        time.sleep(SETTLING)
        self._check_free()
        try:
            self.fetch()
            yield
        finally:
            if (owner := self._owner()) and owner.sweep == self.sweep:
                self._files.rm_file(f"{self._root}/{SWEEP}")

    def renew(self) -> None:
        """Give a sign of life once a minute; a HoldfastError if another sweep has taken the place over."""
        if time.monotonic() - self.signed > HEARTBEAT:
            self._check_free()
            self._sign()

    def _sign(self) -> None:
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/{SWEEP}", self._signature().encode())
        self.signed = time.monotonic()

    def _signature(self) -> str:
        return json.dumps(signature() | {"sweep": self.sweep, "time": time.time()})

    def _owner(self) -> _Owner | None:
        """The sweep that has the place; None if there is none that can be read."""
        self._files.invalidate_cache()
        with suppress(FileNotFoundError, ValueError):
            found: _Owner = validated(_Owner, parse_json(self._files.cat_file(f"{self._root}/{SWEEP}")), "owner")
            return found
        return None

    def _check_free(self) -> None:
        """Raise if another sweep has the place."""
        owner = self._owner()
        if owner and owner.sweep != self.sweep and not is_gone(owner, time.time() - owner.time):
            raise HoldfastError(
                f"{self.url} is in use by another sweep, process {owner.pid} on {owner.host}: wait for it to "
                f"end. If it was killed, the place is free {SILENCE / 60:.0f} minutes after its last sign of life."
            )
