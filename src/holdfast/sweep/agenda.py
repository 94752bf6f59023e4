"""What of a grid is still to be done: hands out runs nobody else has, and keeps the books."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import results
from holdfast.config import RunConfig
from holdfast.experiments import Results
from holdfast.files import held, replacing
from holdfast.sweep.claims import HEARTBEAT, Claims
from holdfast.sweep.engine import Event

__all__ = ["Agenda", "Summary"]


@dataclass
class Summary:
    """How a sweep ended."""

    done: list[RunConfig] = field(default_factory=list)
    """Carried out here and now."""
    there: list[RunConfig] = field(default_factory=list)
    """Finished before, or by another sweep meanwhile."""
    failed: dict[RunConfig, str] = field(default_factory=dict)
    interrupted: bool = False
    left: int = 0
    """Runs that an interruption left undone."""


class Agenda:
    """What is still to be done: hands out runs nobody else has, and keeps the books."""

    def __init__(self, configs: Iterable[RunConfig], out: Path, finished: Results) -> None:
        self.summary = Summary()
        self._out, self._claims, self._began = out, Claims(out), time.time()
        self._beaten = time.monotonic()
        self._waiting: deque[RunConfig] = deque()
        damaged = {skipped.path: skipped.reason for skipped in finished.skipped}
        for config in dict.fromkeys(configs):
            path = out / config.fingerprint / results.RESULT
            if config in finished or (path.exists() and path not in damaged):
                self.summary.there.append(config)
            elif path in damaged:  # Not ours to overwrite: it may be all that is left of hours of training.
                reason = f"{path} cannot be used ({damaged[path]}); move it away to have the run carried out again"
                self.summary.failed[config] = reason
            else:
                self._waiting.append(config)
        self._claims.forget(self.summary.there)

    def __iter__(self) -> Iterator[RunConfig | None]:
        """Runs to carry out, each claimed; None while others have all that is left."""
        refused = 0
        while self._waiting:
            config = self._waiting.popleft()
            if self._take(config):
                refused = 0
                yield config
            elif self._settled(config):
                continue
            else:
                self._waiting.append(config)
                refused += 1
                if refused >= len(self._waiting):
                    refused = 0
                    yield None

    def _take(self, config: RunConfig) -> bool:
        """Claim a run that is neither finished nor taken, and clear away what a killed attempt at it left behind."""
        if self._settled_elsewhere(config) or not self._claims.acquire(config):
            return False
        if _is_finished(self._out, config):  # By another sweep, between our look and our claim.
            self._claims.release(config)
            return False
        _remove_scratch(self._out, config)
        return True

    def _settled(self, config: RunConfig) -> bool:
        """Note a run that another sweep finished or failed at; False while it is still at it."""
        if _is_finished(self._out, config):
            self.summary.there.append(config)
            return True
        if self._settled_elsewhere(config):
            self.summary.failed[config] = _recorded_error(self._out, config)
            return True
        return False

    def _settled_elsewhere(self, config: RunConfig) -> bool:
        """Whether another sweep failed at the run since we began: trying it here as well would gain nothing."""
        with contextlib.suppress(OSError):
            return _failure(self._out, config).stat().st_mtime > self._began
        return False

    def note(self, event: Event) -> None:
        """Enter what happened; a finished or failed run is no longer claimed."""
        if event.kind == "done":
            self.summary.done.append(event.config)
            with contextlib.suppress(OSError):
                _failure(self._out, event.config).unlink()
        elif event.kind == "failed":
            self.summary.failed[event.config] = event.error
            _record_failure(self._out, event)
        else:
            return
        _remove_scratch(self._out, event.config)
        self._claims.release(event.config)

    def beat(self) -> None:
        """Show other hosts, now and then, that the claims are alive."""
        if time.monotonic() - self._beaten > HEARTBEAT:
            self._beaten = time.monotonic()
            self._claims.beat()

    def close(self) -> None:
        """Give back what was claimed and not finished."""
        for config in self._claims.held():
            if _is_finished(self._out, config):  # It was saved, and interrupted before it could say so.
                self.summary.done.append(config)
            else:
                self._waiting.append(config)
            _remove_scratch(self._out, config)
            self._claims.release(config)
        self.summary.left = len(self._waiting)


def _is_finished(out: Path, config: RunConfig) -> bool:
    return (out / config.fingerprint / results.RESULT).exists()


def _remove_scratch(out: Path, config: RunConfig) -> None:
    """Folders that saving this run was killed in the middle of; only the holder of its claim may do this."""
    with held(out):  # whoever is at it now, without a claim, is waited for
        for folder in out.glob(f".{config.fingerprint}-*"):
            shutil.rmtree(folder, ignore_errors=True)


def _failure(out: Path, config: RunConfig) -> Path:
    return out / "failed" / f"{config.fingerprint}.json"


def _record_failure(out: Path, event: Event) -> None:
    """Keep what went wrong, for other sweeps and for later; this one says it anyway, so a full disk does not end it."""
    path = _failure(out, event.config)
    record = {
        "error": event.error,
        "trace": event.trace,
        "config": event.config.to_dict(),
        "fingerprint": event.config.fingerprint,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "platform": platform.platform(),
    }
    with contextlib.suppress(OSError), replacing(path) as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _recorded_error(out: Path, config: RunConfig) -> str:
    try:
        return str(results.parse_json(_failure(out, config).read_text("utf-8"))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return "failed in another sweep"
