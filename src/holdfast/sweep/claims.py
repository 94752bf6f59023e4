"""Who carries out which run: files that other processes and hosts see, and that outlive nobody.

A claim is a file `.claims/FINGERPRINT` with the process, its host and when the process began. It is created
exclusively, so that two sweeps never carry out the same run. The claim of a process that is gone is taken over; on
another host, that of one that has given no sign of life for ten minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.config import RunConfig
from holdfast.files import held
from holdfast.results import parse_json

__all__ = ["HEARTBEAT", "SILENCE", "Claims", "is_gone", "signature"]

HEARTBEAT, SILENCE = 60.0, 600.0
"""Seconds between signs of life in a claim, and after which a claim of another host counts as abandoned."""
WRITING = 5.0
"""Seconds within which a claim that was created is also written."""


class Claims:
    """Which runs of a folder this process is carrying out, as files that other processes and hosts see."""

    def __init__(self, out: Path) -> None:
        self._folder = out / ".claims"
        self._mine: dict[RunConfig, Path] = {}
        self._text = json.dumps(signature())

    def acquire(self, config: RunConfig) -> bool:
        """Claim a run; False if somebody alive has it."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / config.fingerprint
        if not self._create(path):
            # Judging a claim and replacing it must be one act, or two sweeps could both take over the same one.
            with held(self._folder / "lock"):
                if not _is_abandoned(path):
                    return False
                path.unlink(missing_ok=True)
                if not self._create(path):
                    return False
        self._mine[config] = path
        return True

    def _create(self, path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(self._text)
        return True

    def release(self, config: RunConfig) -> None:
        """Give a run back, finished or not."""
        self._mine.pop(config).unlink(missing_ok=True)

    def forget(self, finished: Iterable[RunConfig]) -> None:
        """Remove the claims that sweeps killed just after saving left on finished runs."""
        there = {path.name for path in self._folder.glob("*")}
        for config in finished if there else ():
            path = self._folder / config.fingerprint
            if path.name in there:
                with held(self._folder / "lock"):
                    if _is_abandoned(path):
                        path.unlink(missing_ok=True)

    def held(self) -> list[RunConfig]:
        """The runs claimed at present."""
        return list(self._mine)

    def beat(self) -> None:
        """Renew the time stamps, by which other hosts judge."""
        for path in self._mine.values():
            with contextlib.suppress(OSError):
                os.utime(path)


def signature() -> dict[str, object]:
    """Who claims something: this process, its host and when the process began."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}


def is_gone(claim: Mapping[str, Any], age: float) -> bool:
    """Whether the process that signed a claim is; on another host, whether it has been silent for long.

    `age` is in seconds, since its last sign of life. What is no claim raises a KeyError, TypeError, ValueError or
    OverflowError.
    """
    pid, host, started = int(claim["pid"]), claim["host"], claim["started"]
    if host != socket.gethostname():
        return age > SILENCE
    return not _is_running(pid) or (started is not None and _started(pid) != started)


def _is_abandoned(path: Path) -> bool:
    """Whether the process behind a claim is gone."""
    try:
        age = time.time() - path.stat().st_mtime
        return is_gone(parse_json(path.read_text("utf-8")), age)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return age > WRITING  # Killed between creating the file and writing to it; younger, it may be about to.


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no system numbers its processes that high
        return False
    except OSError:
        return True  # It is somebody else's.
    return True


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the start of the machine: numbers of dead processes are used again."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None  # Not every system tells, or legibly; the number of the process then has to do.
    return None if status[0] in "ZX" else status[19]
