"""Runs on a Ray cluster: the same grid, one task per run, restarted elsewhere when a node dies. Extra `cluster`.

Every node must have Holdfast and the data, and must see the folder of the results: a folder shared by the nodes, or any
address fsspec knows (s3://, gs://, ...). With an address, a local mirror holds the numbers, and one sweep at a time has
the place: claims of single runs need a file system. Who has it says so in a file `.sweep.json` there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast import results
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments import condensed, load_results
from holdfast.files import replacing
from holdfast.sweep.claims import HEARTBEAT, SILENCE, is_gone, signature
from holdfast.sweep.engine import POLL, Emit, Event, Job, carry_out, failure
from holdfast.training import choose_device

__all__ = ["RayEngine", "Remote"]

RETRIES = 5
"""Restarts of a run whose worker or node died."""
SWEEP = ".sweep.json"
SETTLING = 2.0
"""Seconds after which whoever else wrote its name there at the same time has done so."""
CONNECT = 10.0
"""Seconds to wait for a cluster to answer."""


class RayEngine:
    """One Ray task per run. `address` is a running cluster's (host:port, or auto); without one, a local cluster."""

    def __init__(
        self, address: str | None = None, *, jobs: int | None = None, device: str = "cpu", remote: Remote | None = None
    ) -> None:
        self.address, self.jobs, self.device, self.remote = address, jobs, device, remote
        self.ray = _import_ray()

    def __call__(self, configs: Iterator[RunConfig | None], job: Job, emit: Emit) -> None:
        """See `Engine`."""
        with self.remote.reserved() if self.remote else contextlib.nullcontext(), self._connected():
            if self.device == "auto":
                self.device = "cuda" if self.ray.cluster_resources().get("GPU") else "cpu"
            task = self.ray.remote(num_cpus=1, num_gpus=int(self.device != "cpu"), max_retries=RETRIES)(_carry_out)
            running: dict[Any, RunConfig] = {}
            try:
                self._run(configs, job, emit, task, running)
            finally:
                for reference in running:
                    with contextlib.suppress(Exception):  # The cluster may be what failed.
                        self.ray.cancel(reference, force=True)

    def _run(
        self, configs: Iterator[RunConfig | None], job: Job, emit: Emit, task: Any, running: dict[Any, RunConfig]
    ) -> None:
        job = job._replace(out=job.out.absolute(), device=self.device)
        more = True
        while more or running:
            while more and len(running) < self._room():
                try:
                    config = next(configs)
                except StopIteration:
                    more = False
                    break
                if config is None:
                    break
                url = self.remote.url if self.remote else None
                running[task.remote(config.to_dict(), job, url)] = config
                emit(Event("started", config))
            ready = self.ray.wait(list(running), timeout=POLL)[0] if running else []
            if more and not running:
                time.sleep(POLL)
            emit(None)
            if self.remote is not None:
                self.remote.beat()
            for reference in ready:
                emit(self._settled(reference, running.pop(reference), job))

    def _settled(self, reference: Any, config: RunConfig, job: Job) -> Event:
        """How a task ended, once its result is seen from here as well."""
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
        """Runs the cluster has room for at present; at least one, so that a busy or growing cluster is waited for."""
        if self.jobs:
            return self.jobs
        kind = "CPU" if self.device == "cpu" else "GPU"
        return max(1, int(self.ray.cluster_resources().get(kind, 1)))

    @contextlib.contextmanager
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
        try:
            self.ray.init(**own, log_to_driver=False, logging_level="error", configure_logging=True)
        except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
            raise HoldfastError(_unreachable(self.address or "local", str(error))) from error
        try:
            yield
        finally:
            self.ray.shutdown()


def _import_ray() -> ModuleType:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UsageError(
            "a cluster needs Ray: install the extra 'cluster' (pip install 'holdfast[cluster]'), or use --engine local."
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Raise within seconds if nothing answers at host:port; Ray itself would try for minutes."""
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
    """One run, on a node; returns the result without its tensors."""
    config = RunConfig.from_dict(settings)
    choose_device(job.device)
    if url is None:
        carry_out(config, job)
        return {}
    with tempfile.TemporaryDirectory() as folder:
        carry_out(config, job._replace(out=Path(folder)))
        (stored,) = load_results(Path(folder))
        Remote(url).save(stored.path.parent)
        return condensed(stored)


class Remote:
    """A folder of results behind an address that fsspec knows, with a mirror of its numbers on this machine."""

    def __init__(self, url: str, mirror: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.folder = mirror
        self.sweep = secrets.token_hex(8)
        """What tells the sweep that has the place from all others."""
        self.beaten = 0.0
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
            target = self.folder / fingerprint / results.RESULT
            if not target.exists():
                with replacing(target) as scratch:
                    scratch.write_bytes(self._files.cat_file(path))

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Be the only sweep that carries out runs for this place; a HoldfastError if another one is at it.

        The mirror then has what others finished before. A sweep that is gone, or on another host silent for ten
        minutes, no longer counts.
        """
        self._check_free()
        self._sign()
        # Stores of objects have no locks. Of two that looked at the same time, the one that wrote last has the place.
        time.sleep(SETTLING)
        self._check_free()
        try:
            self.fetch()
            yield
        finally:
            if self._holder().get("sweep") == self.sweep:
                self._files.rm_file(f"{self._root}/{SWEEP}")

    def beat(self) -> None:
        """Give a sign of life, now and then; a HoldfastError if another sweep has taken the place over."""
        if time.monotonic() - self.beaten > HEARTBEAT:
            self._check_free()
            self._sign()

    def _sign(self) -> None:
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/{SWEEP}", self._claim().encode())
        self.beaten = time.monotonic()

    def _claim(self) -> str:
        return json.dumps(signature() | {"sweep": self.sweep, "time": time.time()})

    def _holder(self) -> dict[str, Any]:
        """What the sweep that has the place wrote; empty if nobody did, or nothing legible."""
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError, ValueError):
            found = results.parse_json(self._files.cat_file(f"{self._root}/{SWEEP}").decode("utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    def _check_free(self) -> None:
        """Raise if another sweep has the place."""
        holder = self._holder()
        try:
            free = holder["sweep"] == self.sweep or is_gone(holder, time.time() - holder["time"])
        except (ValueError, KeyError, TypeError, OverflowError):
            free = True
        if not free:
            raise HoldfastError(
                f"{self.url} is in use by another sweep, process {holder['pid']} on {holder['host']}: wait for it to "
                f"end. If it was killed, it counts as gone {SILENCE / 60:.0f} minutes after its last sign of life."
            )

    def save(self, folder: Path) -> None:
        """Upload a result folder; its result.json comes last, so that no half is ever read as a result."""
        target = f"{self._root}/{folder.name}"
        self._files.makedirs(target, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == results.RESULT):
            self._files.put_file(str(path), f"{target}/{path.name}")

    def mirror(self, config: RunConfig, values: dict[str, object]) -> None:
        """Keep the numbers of a result that a node has uploaded."""
        assert self.folder is not None
        with replacing(self.folder / config.fingerprint / results.RESULT) as scratch:
            scratch.write_text(json.dumps(values) + "\n", "utf-8")
