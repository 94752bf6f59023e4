"""A user's program that learns from a stream, with its buffer in a folder or in memory."""

from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.files import replacing, telling
from stories.mortal import learn, result

from .program import Program


def program(storage: str) -> Program:
    """The program of tests/stories/mortal.py."""

    def act(place: Path) -> None:
        left = result(learn(place, storage))
        keep(place, {name: value.contiguous() for name, value in left.items()})

    return Program(f"learner {storage}", act, ending, guarded)


def keep(place: Path, left: dict[str, Tensor]) -> None:
    """Write what the program leaves; a full disk is an error for people here as well."""
    path = place / "result.safetensors"
    with telling(HoldfastError, f"{path} could not be written"), replacing(path) as scratch:
        scratch.write_bytes(save(left))


def ending(place: Path) -> dict[str, bytes]:
    path = place / "result.safetensors"
    return {path.name: path.read_bytes()} if path.exists() else {}


def guarded(place: Path) -> list[Path]:
    """The checkpoint, and the files of the buffer. Its description holds two numbers, which the learner compares."""
    return [*place.glob("learner.safetensors"), *place.glob("buffer/*.*")]
