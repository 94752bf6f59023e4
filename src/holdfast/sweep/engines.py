"""What carries out a sweep, by name: this machine, or a Ray cluster."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.registry import unknown_name
from holdfast.sweep.grid import local_runner
from holdfast.sweep.runner import Runner

__all__ = ["ENGINES", "open_engine"]

ENGINES = ("local", "ray")


@contextmanager
def open_engine(
    name: str,
    out: str,
    *,
    address: str | None = None,
    jobs: int | None = None,
    device: str = "auto",
    until: float | None = None,
) -> Iterator[tuple[Path, Runner]]:
    """The folder that results are read from and written to, and what carries out runs; for `sweep`.

    With ray, `out` may be an address such as s3://...: the folder is then a mirror of it, for as long as the engine is
    open.
    """
    if name not in ENGINES:
        raise unknown_name("engine", name, list(ENGINES))
    if name == "local":
        if address is not None:
            raise UsageError("--address is for --engine ray.")
        if "://" in out:
            raise UsageError("--out can be an address only with --engine ray.")
        yield Path(out), local_runner(device, jobs, until)
        return
    from holdfast.sweep.cluster import RayRunner  # Ray takes long to import, and is an extra
    from holdfast.sweep.remote import Remote

    if "://" not in out:
        yield Path(out), RayRunner(address, jobs=jobs, device=device)
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-") as mirror:
        remote = Remote(out, Path(mirror))
        remote.fetch()
        yield Path(mirror), RayRunner(address, jobs=jobs, device=device, remote=remote)
