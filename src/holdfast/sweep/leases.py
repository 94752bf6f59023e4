"""Who carries out which run: files that other processes and hosts see.

A lease is the file `.leases/FINGERPRINT`, with the process that took it, its host and when the process began. It is
created exclusively, so two sweeps never carry out the same run. A lease is free again when its process is gone or, on
another host, has been silent for ten minutes.
"""

import json
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.files import locked, telling
from holdfast.schema import read_json, validated

__all__ = ["HEARTBEAT", "SILENCE", "Leases", "Signature", "is_gone", "signature"]

HEARTBEAT, SILENCE = 60.0, 600.0
"""Seconds between two signs of life, and seconds of silence after which the lease of another host is free."""
WRITING = 5.0
"""Seconds a process may take from creating a lease to writing into it."""


class Leases:
    """The runs of a folder that this process carries out."""

    def __init__(self, out: Path) -> None:
        self._folder = out / ".leases"
        self._mine: dict[RunConfig, Path] = {}
        self._renewed = time.monotonic()

    def acquire(self, config: RunConfig) -> bool:
        """Lease a run; False if a living process has it."""
        path = self._folder / config.fingerprint
        advice = "Make room there, or choose another folder; the same command continues the sweep."
        with telling(HoldfastError, f"the sweep cannot write to {self._folder}", advice):
            self._folder.mkdir(parents=True, exist_ok=True)
            taken = _create(path) or self._take_over(path)
        if taken:
            self._mine[config] = path
        return taken

    def _take_over(self, path: Path) -> bool:
        # Judging and replacing must be one act. Otherwise two sweeps could both take over one lease.
        with locked(self._folder):
            if not _is_abandoned(path):
                return False
            path.unlink(missing_ok=True)
            return _create(path)

    def release(self, config: RunConfig) -> None:
        """Give a run back, done or not."""
        self._mine.pop(config).unlink(missing_ok=True)

    def clear(self, there: Iterable[RunConfig]) -> None:
        """Remove the leases of runs whose result is there: their sweep was killed between saving and releasing."""
        leased = {path.name for path in self._folder.glob("*")}
        for path in (self._folder / config.fingerprint for config in there):
            if path.name in leased:
                with locked(self._folder):
                    if _is_abandoned(path):
                        path.unlink(missing_ok=True)

    def mine(self) -> list[RunConfig]:
        """The runs this process has leased."""
        return list(self._mine)

    def renew(self) -> None:
        """Renew the time stamps once a minute: the sign of life for other hosts."""
        if time.monotonic() - self._renewed > HEARTBEAT:
            self._renewed = time.monotonic()
            for path in self._mine.values():
                with suppress(OSError):
                    os.utime(path)


@dataclass
class Signature:
    """A process, its host and when the process began."""

    pid: int
    host: str
    started: str | None


def signature() -> dict[str, Any]:
    """That of this process."""
    return asdict(Signature(os.getpid(), socket.gethostname(), _started(os.getpid())))


def is_gone(signed: Signature, age: float) -> bool:
    """Whether the process that signed has ended; on another host, whether it has been silent for long.

    `age` is the time since its last sign of life, in seconds. No process signs far in the future, so a time more than
    ten minutes ahead counts as silence.
    """
    if signed.host != socket.gethostname():
        return not abs(age) <= SILENCE
    return not _is_running(signed.pid) or (signed.started is not None and _started(signed.pid) != signed.started)


def _create(path: Path) -> bool:
    """Create a lease; False if there is one."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(signature()))
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)  # a full disk: an empty file would block other sweeps
        raise
    return True


def _is_abandoned(path: Path) -> bool:
    """Whether a lease is free to be taken over."""
    try:
        age = time.time() - path.stat().st_mtime
        return is_gone(validated(Signature, read_json(path), "lease"), age)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return abs(age) > WRITING  # its process was killed before it could write; a younger one may be about to


def _is_running(pid: int) -> bool:
    if pid < 1:
        return False  # for the system, 0 and negative numbers mean whole groups of processes
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no system numbers its processes that high
        return False
    except OSError:
        pass  # it belongs to another user
    return True


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the machine started; None where the system does not say.

    A dead process's number is used again, so the number alone does not identify a process.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if status[0] in "ZX" else status[19]
