"""One seed -> independent named generators. Everything random in Holdfast comes from here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import torch
from torch import Tensor

from holdfast.errors import UsageError

__all__ = [
    "check_globally",
    "derive_seed",
    "generator",
    "global_generators",
    "global_state",
    "restore",
    "restore_globally",
    "seeded_globally",
    "seeded_states",
    "swapped_globally",
]


def derive_seed(seed: int, name: str) -> int:
    """A 63-bit seed for the stream `name`, unrelated to the streams of other names and seeds."""
    return int.from_bytes(sha256(f"holdfast:{seed}:{name}".encode()).digest()[:8], "little") >> 1


def generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one purpose ("order", "augment", "buffer", "stream") on one device."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, name))


def restore(generator: torch.Generator, state: Tensor) -> None:
    """Put `generator` where the one was, on the same kind of device, that `state` was taken from."""
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"the saved random state does not fit a generator on {generator.device}: "
            "continue on the kind of device where it was saved."
        ) from error


def global_state(device: torch.device) -> dict[str, Tensor]:
    """Where PyTorch's global generators are, that of the CPU and that of `device`.

    Layers that are random in training, such as dropout, take no generator and draw from these.
    """
    return {kind: each.get_state() for kind, each in global_generators(device).items()}


def check_globally(states: dict[str, Tensor], device: torch.device) -> None:
    """Raise if `states` are of global generators of another kind of device."""
    own = global_generators(device)
    if states.keys() != own.keys():
        raise UsageError(
            f"the saved random states are of {' and '.join(states)}, here they are of {' and '.join(own)}: "
            "continue on the kind of device where they were saved."
        )


def restore_globally(states: dict[str, Tensor], device: torch.device) -> None:
    """Put PyTorch's global generators where they were when `global_state` was asked."""
    check_globally(states, device)
    for kind, each in global_generators(device).items():
        restore(each, states[kind])


def global_generators(device: torch.device) -> dict[str, torch.Generator]:
    """By kind of device."""
    found = {"cpu": torch.default_generator}
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found["cuda"] = torch.cuda.default_generators[index]
    return found


def seeded_states(seed: int, name: str, device: torch.device) -> dict[str, Tensor]:
    """States for PyTorch's global generators, made from a seed."""
    return {kind: generator(seed, name, each.device).get_state() for kind, each in global_generators(device).items()}


@contextmanager
def swapped_globally(states: dict[str, Tensor], device: torch.device) -> Iterator[None]:
    """Put PyTorch's global generators into `states` inside the block, and back where they were afterwards.

    `states` is then where the block left them.
    """
    before = global_state(device)
    restore_globally(states, device)
    try:
        yield
    finally:
        states.update(global_state(device))
        restore_globally(before, device)


@contextmanager
def seeded_globally(seed: int, name: str) -> Iterator[None]:
    """Seed torch's global CPU generator inside the block only.

    PyTorch's layer initialisation takes no generator, so network construction needs the global one; the
    caller's global state is untouched afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the GPUs' generators as well, which nobody restores.
        torch.default_generator.manual_seed(derive_seed(seed, name))
        yield
