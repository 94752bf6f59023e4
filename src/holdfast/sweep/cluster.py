"""Runs on a Ray cluster: one task per run, restarted elsewhere when a node dies. Extra `cluster`.

Every node must have Holdfast and the data, and must see the folder of the results: a folder that all nodes share, or an
address that fsspec knows (s3://, gs://, ...; see `holdfast.sweep.remote`).
"""

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast import results
from holdfast.config import RunConfig
from holdfast.data import data_root
from holdfast.devices import choose_device
from holdfast.errors import HoldfastError, UsageError, needing
from holdfast.experiments import condensed, load_results
from holdfast.sweep.remote import Remote
from holdfast.sweep.runner import GRACE, POLL, Emit, Event, Job, carry_out, failure, hand_out

__all__ = ["RayRunner"]

RETRIES = 5
"""Restarts of a run whose worker or node died."""
CONNECT = 10.0
"""Seconds to wait for a cluster to answer."""


class RayRunner:
    """One Ray task per run, on the cluster at `address` (host:port, or auto); without one, on a local cluster."""

    def __init__(
        self, address: str | None = None, *, jobs: int | None = None, device: str = "cpu", remote: Remote | None = None
    ) -> None:
        self.address, self.jobs, self.device, self.remote = address, jobs, device, remote
        self.ray = _import_ray()

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """See `Runner`."""
        with self.remote.reserved() if self.remote else nullcontext(), self._connected():
            if self.device == "auto":
                self.device = "cuda" if self.ray.cluster_resources().get("GPU") else "cpu"
            data = data_root(job.data).absolute() if job.data else None
            job = job._replace(out=job.out.absolute(), data=data, device=self.device)
            task = self.ray.remote(num_cpus=1, num_gpus=int(self.device != "cpu"), max_retries=RETRIES)(_carry_out)
            running: dict[Any, RunConfig] = {}
            more, url = True, self.remote.url if self.remote else None

            def start(config: RunConfig) -> None:
                running[task.remote(config.to_dict(), job, url)] = config

            try:
                while more or running:
                    more = more and hand_out(configs, lambda: len(running) < self._room(), start, emit)
                    ready = self.ray.wait(list(running), timeout=POLL)[0] if running else []
                    if more and not running:
                        time.sleep(POLL)
                    emit(None)
                    if self.remote is not None:
                        self.remote.renew()
                    for reference in ready:
                        emit(self._settled(reference, running.pop(reference), job))
            finally:
                self._end(list(running))

    def _end(self, references: list[Any]) -> None:
        """End all tasks; each may finish a step and write its state first. Ctrl-C ends them at once."""
        with suppress(Exception):  # the cluster itself may have failed
            try:
                for reference in references:
                    self.ray.cancel(reference)
                if references:
                    self.ray.wait(references, num_returns=len(references), timeout=GRACE)
            finally:
                for reference in references:
                    self.ray.cancel(reference, force=True)

    def _settled(self, reference: Any, config: RunConfig, job: Job) -> Event:
        """How a task ended. It is done when its result can be seen from here."""
        try:
            answer = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            return failure(config, error.cause if isinstance(error.cause, Exception) else error)
        except self.ray.exceptions.RayError as error:
            return Event("failed", config, error=f"its workers died {RETRIES + 1} times: {error}")
        if self.remote is not None:
            self.remote.mirror(config, answer)
        elif not (job.out / config.fingerprint / results.RESULT).exists():
            return Event(
                "failed",
                config,
                error=f"a node wrote the result to its own {job.out}, which is not seen from here. "
                "Choose a folder that all nodes share, or an address such as s3://..., with --out.",
            )
        return Event("done", config, 1.0)

    def _room(self) -> int:
        """Runs that fit into the cluster now; at least one, so that the sweep waits for a busy or growing cluster."""
        if self.jobs:
            return self.jobs
        kind = "CPU" if self.device == "cpu" else "GPU"
        return max(1, int(self.ray.cluster_resources().get(kind, 1)))

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """A connection to the cluster, unless the program has one already."""
        if self.ray.is_initialized():
            yield
            return
        if self.address is not None:
            _check_reachable(self.address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own: dict[str, Any] = {"address": self.address} if self.address else {"num_cpus": self.jobs or os.cpu_count()}
        if not self.address:
            own |= {"address": "local", "include_dashboard": False}
        answers = signal.getsignal(signal.SIGTERM)
        try:
            # Ray puts the current folder on its workers' search path, where a file could take any package's place.
            with chdir(sys.prefix):
                self.ray.init(**own, log_to_driver=False, logging_level="error", configure_logging=True)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, answers)  # Ray puts one of its own there, which ends the program at once
        except SystemExit:
            raise KeyboardInterrupt from None  # it did, before we could put ours back
        except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
            raise HoldfastError(_unreachable(self.address or "local", str(error))) from error
        try:
            yield
        finally:
            self.ray.shutdown()


def _import_ray() -> ModuleType:
    with needing("cluster", "a cluster needs Ray", UsageError, ", or use --engine local"):
        import ray
        import ray.exceptions
    return ray


def _check_reachable(address: str) -> None:
    """Raise within seconds if nothing answers at host:port. Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not colon or not port.isdigit():
        raise UsageError(f"--address must be host:port, ray://host:port or auto, not '{address}'.")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT).close()
    except OSError as error:
        raise HoldfastError(_unreachable(address, error.strerror or str(error))) from error


def _unreachable(address: str, reason: str) -> str:
    return (
        f"the Ray cluster at {address} cannot be reached: {reason.strip().rstrip('.')}. Check that it runs "
        "('ray status' there) and that its address is right, or leave out --address for a cluster of this machine."
    )


def _carry_out(settings: dict[str, Any], job: Job, url: str | None) -> dict[str, object]:
    """One run, on a node; with a `url`, returns the result without its tensors."""
    config = RunConfig.from_dict(settings)
    choose_device(job.device)
    if url is None:
        carry_out(config, job)
        return {}
    with tempfile.TemporaryDirectory() as folder:
        carry_out(config, job._replace(out=Path(folder), resumable=False))
        (stored,) = load_results(Path(folder))
        Remote(url).save(stored.path.parent)
        return condensed(stored)
