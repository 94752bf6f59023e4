"""RunResult <-> a folder of files, written whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.files import held
from holdfast.results.result import RunResult

__all__ = ["LOGITS", "RESULT", "WEIGHTS", "check_writable", "find", "parse_json", "read", "save"]

RESULT, LOGITS, WEIGHTS = "result.json", "logits.safetensors", "weights.safetensors"


def parse_json(text: str | bytes) -> Any:
    """What the text describes; a ValueError for whatever else it may be."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def save(result: RunResult, out: Path) -> Path:
    """Write the result under `out` in a folder named by its fingerprint; whole or not at all.

    A result of the same fingerprint is replaced.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with held(out):  # by all processes: two that save one run would trip over each other
            return _write(result, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HoldfastError(
            f"the result could not be written to {out}: {reason}. Choose another folder with --out."
        ) from error


def _write(result: RunResult, out: Path) -> Path:
    target = out / result.config.fingerprint
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=out))
    try:
        if result.logits:
            save_file(result.logits, scratch / LOGITS)
        if result.weights:
            save_file(result.weights, scratch / WEIGHTS)
        (scratch / RESULT).write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        for file in scratch.iterdir():  # Scratch folders and safetensors files start out private.
            file.chmod(0o644)
        _replace_folder(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def check_writable(out: Path) -> None:
    """Raise now rather than after hours of training if nothing can be written to `out`; creates the folder."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise HoldfastError(
            f"nothing can be written to {out}: {error.strerror or error}. Choose another folder with --out."
        ) from error


def _replace_folder(source: Path, target: Path) -> None:
    """Rename `source` to `target`; an existing target is moved aside first, since folders cannot be overwritten."""
    if not target.exists():
        source.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    target.rename(aside / target.name)
    try:
        source.rename(target)
    except OSError:
        (aside / target.name).rename(target)  # Rather the old result than none.
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read(folder: Path, *, tensors: bool = False) -> RunResult:
    """The result in `folder`; with `tensors`, its logits and weights as well."""
    try:
        values = parse_json((folder / RESULT).read_text("utf-8"))
        result = RunResult.from_json(values)
    except FileNotFoundError:
        raise HoldfastError(f"{folder} holds no result: {RESULT} is missing.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise HoldfastError(f"{folder / RESULT} is not a readable result: {error}.") from error
    if tensors:
        for name, store in ((LOGITS, result.logits), (WEIGHTS, result.weights)):
            if (folder / name).exists():
                try:
                    store.update(load_file(folder / name))
                except (OSError, SafetensorError) as error:
                    raise HoldfastError(f"{folder / name} is not readable: {error}.") from error
    return result


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
