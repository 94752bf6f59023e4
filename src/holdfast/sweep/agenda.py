"""The runs of a sweep that are still to be done, and the record of those that ended."""

import platform
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import checkpoint, results
from holdfast.config import RunConfig
from holdfast.experiments import Results
from holdfast.files import locked
from holdfast.schema import read_json, write_json
from holdfast.sweep.leases import Leases
from holdfast.sweep.runner import Event, checkpoint_path

__all__ = ["Agenda", "SweepSummary"]


@dataclass
class SweepSummary:
    """How a sweep ended."""

    done: list[RunConfig] = field(default_factory=list)
    """Carried out by this sweep."""
    there: list[RunConfig] = field(default_factory=list)
    """Runs whose results were there, or came meanwhile from another sweep."""
    failed: dict[RunConfig, str] = field(default_factory=dict)
    interrupted: bool = False
    """Whether Ctrl-C or SIGTERM stopped it."""
    out_of_time: bool = False
    """Whether its time ended first."""
    left: int = 0
    """Runs that were left undone."""

    @property
    def stopped(self) -> bool:
        """Whether it ended before its runs did."""
        return self.interrupted or self.out_of_time


class Agenda:
    """Hands out the runs that no other sweep carries out, and notes how they end."""

    def __init__(self, configs: Iterable[RunConfig], out: Path, there: Results) -> None:
        self.summary = SweepSummary()
        self._out, self.leases = out, Leases(out)
        self._waiting: deque[RunConfig] = deque()
        damaged = {skipped.path: skipped.reason for skipped in there.skipped}
        for config in dict.fromkeys(configs):
            path = out / config.fingerprint / results.RESULT
            if config in there or (path.exists() and path not in damaged):
                self.summary.there.append(config)
            elif path in damaged:  # never overwritten: it may be all that is left of hours of training
                reason = f"{path} cannot be used ({damaged[path]}); move it away to have the run carried out again"
                self.summary.failed[config] = reason
            else:
                self._waiting.append(config)
        self._old_failures = {config: _failure_time(out, config) for config in self._waiting}
        self.leases.clear(self.summary.there)
        for config in self.summary.there if (out / ".checkpoints").is_dir() else ():
            checkpoint.discard(checkpoint_path(out, config))

    def __iter__(self) -> Iterator[RunConfig | None]:
        """Leased runs to carry out; None while other sweeps have all that are left."""
        refused = 0
        while self._waiting:
            config = self._waiting.popleft()
            if self._take(config):
                refused = 0
                yield config
            elif not self._settled(config):
                self._waiting.append(config)
                refused += 1
                if refused >= len(self._waiting):
                    refused = 0
                    yield None

    def _take(self, config: RunConfig) -> bool:
        """Lease a run that is neither there nor taken, and remove what a killed attempt left behind."""
        if self._failed_elsewhere(config) or not self.leases.acquire(config):
            return False
        if _is_there(self._out, config):  # by another sweep, just before we leased it
            self.leases.release(config)
            return False
        _remove_scratch(self._out, config)
        return True

    def _settled(self, config: RunConfig) -> bool:
        """Note a run that another sweep carried out or failed at; False while that sweep is still at it."""
        if _is_there(self._out, config):
            self.summary.there.append(config)
            return True
        if self._failed_elsewhere(config):
            self.summary.failed[config] = _recorded_error(self._out, config)
            return True
        return False

    def _failed_elsewhere(self, config: RunConfig) -> bool:
        """Whether another sweep failed at the run since we began. It would fail here too, so it is not tried.

        Compares with the record we found at the start instead of with the clock: a file may carry any date.
        """
        now = _failure_time(self._out, config)
        return now is not None and now != self._old_failures.get(config)

    def note(self, event: Event) -> None:
        """Note what happened; the lease of a run that ended is released."""
        if event.kind == "done":
            self.summary.done.append(event.config)
            with suppress(OSError):
                _failure_path(self._out, event.config).unlink()
        elif event.kind == "failed":
            self.summary.failed[event.config] = event.error
            _record_failure(self._out, event)
        else:
            return
        _remove_scratch(self._out, event.config)
        self.leases.release(event.config)

    def close(self) -> None:
        """Release the runs that were taken and are not done."""
        for config in self.leases.mine():
            if _is_there(self._out, config):  # saved, then interrupted before the runner could say so
                self.summary.done.append(config)
                checkpoint.discard(checkpoint_path(self._out, config))
            else:
                self._waiting.append(config)
            _remove_scratch(self._out, config)
            self.leases.release(config)
        self.summary.left = len(self._waiting)


def _is_there(out: Path, config: RunConfig) -> bool:
    return (out / config.fingerprint / results.RESULT).exists()


def _remove_scratch(out: Path, config: RunConfig) -> None:
    """Remove the scratch folders of processes that were killed while they saved this run; its lease must be ours."""
    with suppress(OSError), locked(out):  # `holdfast run` saves without a lease: wait until it has
        results.remove_scratch(out, config.fingerprint)


def _failure_path(out: Path, config: RunConfig) -> Path:
    return out / "failed" / f"{config.fingerprint}.json"


def _failure_time(out: Path, config: RunConfig) -> int | None:
    """When the record of a failure was written; None if there is no record."""
    with suppress(OSError):
        return _failure_path(out, config).stat().st_mtime_ns
    return None


def _record_failure(out: Path, event: Event) -> None:
    """Record an error for other sweeps and for later. This sweep tells it anyway, so failing here ends nothing."""
    record = {
        "error": event.error,
        "trace": event.trace,
        "config": event.config.to_dict(),
        "fingerprint": event.config.fingerprint,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "platform": platform.platform(),
    }
    with suppress(OSError):
        write_json(_failure_path(out, event.config), record)


def _recorded_error(out: Path, config: RunConfig) -> str:
    try:
        return str(read_json(_failure_path(out, config))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return "failed in another sweep"
