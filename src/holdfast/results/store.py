"""RunResult <-> a folder of files. Wherever a writer is killed, the folder has a whole result or does not exist."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.files import flush, locked, telling
from holdfast.results.result import RunResult
from holdfast.schema import read_json

__all__ = ["LOGITS", "RESULT", "WEIGHTS", "check_writable", "find", "read", "read_logits", "read_weights"]
__all__ += ["remove_scratch", "save"]

RESULT, LOGITS, WEIGHTS = "result.json", "logits.safetensors", "weights.safetensors"

ADVICE = "Choose another folder with --out."
ABANDONED_SECONDS = 3600
"""A scratch folder of this age belongs to a process that was killed."""


def save(result: RunResult, out: Path) -> Path:
    """Write the result under `out` in a folder named by its fingerprint, which is returned.

    A result of the same fingerprint is replaced. What was saved survives a power failure.
    """
    with telling(HoldfastError, f"the result could not be written to {out}", ADVICE):
        out.mkdir(parents=True, exist_ok=True)
        with locked(out):  # Two processes that save one run would trip over each other.
            remove_scratch(out, age=ABANDONED_SECONDS)
            return _write(result, out)


def _write(result: RunResult, out: Path) -> Path:
    target = out / result.config.fingerprint
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=out))
    try:
        for name, tensors in ((WEIGHTS, result.weights), (LOGITS, result.logits)):
            if tensors:
                save_file(tensors, scratch / name)
        (scratch / RESULT).write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)  # Scratch folders and safetensors files start out private.
            flush(file)
        flush(scratch)
        if target.is_dir():
            _replace_files(scratch, target)
        else:
            scratch.rename(target)
        flush(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _replace_files(scratch: Path, target: Path) -> None:
    """Replace the files of an old result one by one, so that a result is there at every moment.

    result.json comes last: a writer killed in between leaves the old numbers beside new tensors of the same config.
    Whatever else is in the folder goes first, since it was computed from the old result.
    """
    names = [name for name in (WEIGHTS, LOGITS, RESULT) if (scratch / name).exists()]
    for path in target.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in names:
            path.unlink()
    for name in names:
        (scratch / name).replace(target / name)
    flush(target)


def remove_scratch(out: Path, fingerprint: str = 16 * "?", *, age: float = 0.0) -> None:
    """Remove what processes that were killed while they saved left, if it is `age` seconds old. For a locked `out`."""
    for folder in out.glob(f".{fingerprint}-*"):
        if time.time() - folder.lstat().st_mtime >= age:
            shutil.rmtree(folder, ignore_errors=True)


def check_writable(out: Path) -> None:
    """Raise now rather than after hours of training if nothing can be written to `out`; creates the folder."""
    with telling(HoldfastError, f"nothing can be written to {out}", ADVICE):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()


def read(folder: Path, *, tensors: bool = False) -> RunResult:
    """The result in `folder`; with `tensors`, its logits and weights as well."""
    try:
        result = RunResult.from_json(read_json(folder / RESULT))
    except FileNotFoundError:
        raise HoldfastError(f"{folder} holds no result: {RESULT} is missing.") from None
    except (OSError, ValueError) as error:
        raise HoldfastError(f"{folder / RESULT} is not a readable result: {error}.") from error
    return replace(result, logits=read_logits(folder), weights=read_weights(folder)) if tensors else result


def read_logits(folder: Path) -> dict[str, Tensor]:
    """The final model's logits and labels on each test set; empty if the result in `folder` has none."""
    return _read_tensors(folder / LOGITS)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The final model's weights by name; empty if the result in `folder` has none."""
    return _read_tensors(folder / WEIGHTS)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        return {}
    with telling(HoldfastError, f"{path} is not readable"):
        if not path.is_file():
            raise OSError("it is not a regular file")
        return load_file(path)


def find(out: Path, config: RunConfig) -> RunResult | None:
    """The result of `config` under `out`, or None. The fingerprint decides, never a name."""
    folder = out / config.fingerprint
    if not (folder / RESULT).exists():
        return None
    try:
        found = read(folder)
    except HoldfastError as error:
        raise HoldfastError(f"{error} Move it away, or have the run carried out again with --force.") from error
    if found.config != config:
        raise HoldfastError(f"{folder / RESULT} was altered: it is the result of another run. Move it away.")
    return found
