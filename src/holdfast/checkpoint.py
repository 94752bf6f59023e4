"""State <-> one file: tensors as safetensors, everything else as JSON in its header. Whole or not at all."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from holdfast.errors import CheckpointError, UsageError
from holdfast.files import read_regular, remove_scratch, replacing, telling
from holdfast.schema import parse_json, validated

__all__ = ["NONSENSE", "VERSION", "Checkpoint", "discard", "read", "write"]

VERSION = 2
"""Raised whenever files are laid out differently; files of another version are refused."""

NONSENSE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)
"""What taking over a state may raise that was not made by `write`: a checksum can be computed by anyone."""

KEY = "holdfast"  # the one entry in the safetensors header, which maps text to text
ADVICE = "Delete it to start anew, or put an intact copy in its place."


class Checkpoint(NamedTuple):
    """What a file held."""

    about: dict[str, Any]
    """What the state belongs to, as plain JSON values: for a run, its config and fingerprint."""
    state: dict[str, Any]
    """Nested dicts, lists and tuples of tensors (on the CPU), numbers and texts."""


@dataclass
class _Header:
    version: int
    checksum: str = ""
    content: str = ""


@dataclass
class _Content:
    kind: str
    about: dict[str, Any]
    state: dict[str, Any]


def write(path: Path, kind: str, state: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
    """Put `state` into the file `path`; what was there before stays until the new file is whole and on the disk.

    `kind` says what the state is of ("learner", "run") and must be named again when reading.
    """
    tensors: dict[str, Tensor] = {}
    content = {"kind": kind, "about": dict(about or {}), "state": _encode(dict(state), "state", tensors)}
    text = json.dumps(content, allow_nan=False)
    tensors = _apart(tensors)
    header = json.dumps({"version": VERSION, "checksum": _checksum(text, tensors), "content": text})
    advice = "Make room there or choose another place; what the file held before is untouched."
    with telling(CheckpointError, f"the checkpoint could not be written to {path}", advice), replacing(path) as scratch:
        # Not save_file: it writes to a name of its own choice, and a kill would leave that file behind.
        scratch.write_bytes(save(tensors, {KEY: header}))


def read(path: Path, kind: str) -> Checkpoint:
    """What `write` put there. Reading executes nothing; a file that is damaged or something else raises."""
    text, tensors = _open(path)
    try:
        header: _Header = validated(_Header, parse_json(text), "its header")
        if header.version != VERSION:
            raise CheckpointError(
                f"{path} is a checkpoint of format version {header.version}; this Holdfast reads version {VERSION}. "
                "Continue with the Holdfast that wrote it, or delete it to start anew."
            )
        if _checksum(header.content, tensors) != header.checksum:
            raise CheckpointError(f"{path} is damaged: its checksum does not match. {ADVICE}")
        content: _Content = validated(_Content, parse_json(header.content), "its content")
        if content.kind != kind:
            raise CheckpointError(
                f"{path} is the checkpoint of a {content.kind}, not of a {kind}. Name the right file."
            )
        return Checkpoint(content.about, _decode(content.state, tensors))
    except (*NONSENSE, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. {ADVICE}") from None


def discard(path: Path) -> None:
    """Remove the checkpoint, and what a process killed while writing left beside it; the folder too if empty."""
    with suppress(OSError):  # Nobody needs it any more, so failing to remove it harms nobody.
        path.unlink(missing_ok=True)
        remove_scratch(path)
        path.parent.rmdir()


def _open(path: Path) -> tuple[str, dict[str, Tensor]]:
    """Our entry in the header, and the tensors in memory of their own."""
    try:
        # In one go: safe_open opens a file twice, and another process may replace it in between.
        whole = read_regular(path)
        tensors = load(whole)
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length]).get("__metadata__", {}).get(KEY)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}. Name a file that was saved before.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, KeyError, AssertionError) as error:
        raise CheckpointError(f"{path} is damaged, or not a Holdfast checkpoint: {error}. {ADVICE}") from error
    if header is None:
        raise CheckpointError(f"{path} is not a Holdfast checkpoint. Name the right file.")
    return header, tensors


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go into `tensors` and are referred to by name."""
    if isinstance(value, Tensor):
        while name in tensors:  # {"a": {"b": ...}, "a.b": ...} spell alike, and so do the keys 0 and "0"
            name += "'"
        tensors[name] = value.detach()
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}  # JSON has no NaN
    if isinstance(value, Mapping) and all(isinstance(key, int | str) for key in value):
        # As pairs: optimisers number their parameters, and keys in JSON are always texts.
        return {"dict": [[key, _encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{name}.{number}", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise UsageError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: only tensors, numbers, texts and dicts, "
        "lists and tuples of them."
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that `_encode` described."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {key: _decode(item, tensors) for key, item in content}
        case "tuple":
            return tuple(_decode(item, tensors) for item in content)
        case "float":
            return float(content)
    raise ValueError(kind)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, none sharing memory with another, which a file cannot express."""
    taken: set[int] = set()
    made = {}
    for name, tensor in tensors.items():
        there = tensor.cpu().contiguous()
        memory = there.untyped_storage().data_ptr()
        made[name] = there.clone() if memory in taken else there
        taken.add(memory)
    return made


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Of the JSON and of all bytes of all tensors: safetensors itself would not notice a flipped bit."""
    digest = sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"\0{name}\0{tensors[name].dtype}\0{tuple(tensors[name].shape)}\0".encode())
        if tensors[name].numel():
            digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
