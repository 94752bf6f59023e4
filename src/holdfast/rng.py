"""One seed -> independent named generators. Everything random in Holdfast comes from here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from threading import RLock

import torch
from torch import Tensor

from holdfast.errors import UsageError

__all__ = [
    "check_globally",
    "derive_seed",
    "generator",
    "global_generators",
    "global_state",
    "own_generators",
    "renew",
    "restore",
    "restore_globally",
    "seeded_globally",
    "swapped_globally",
]

_turn = RLock()
"""Held by the thread that has put something in the place of PyTorch's global generators: the process has one set."""


def _forget_turn() -> None:
    """In a forked process, threads that held the lock are gone and will never let go of it."""
    global _turn
    _turn = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_turn)


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
        current = torch.cuda.current_device()  # asking sets CUDA up; before that, there are no generators
        index = current if device.index is None else device.index
        found["cuda"] = torch.cuda.default_generators[index]
    return found


def own_generators(seed: int, name: str, device: torch.device) -> dict[str, torch.Generator]:
    """Generators made from a seed, to take the place of PyTorch's global ones in `swapped_globally`."""
    return {kind: generator(seed, name, each.device) for kind, each in global_generators(device).items()}


@contextmanager
def swapped_globally(own: dict[str, torch.Generator]) -> Iterator[None]:
    """Inside the block, draws from PyTorch's global generators are draws from `own`; the global ones do not move.

    Inside, `own` hold the global generators' states in turn. Threads take turns in such blocks, and in those of
    `seeded_globally`; so a block must not wait for another thread that wants one.
    """
    with _turn:
        # Those of the devices that `own` are on, whichever GPU is the current one by now.
        pairs = [(global_generators(each.device)[kind], each) for kind, each in own.items()]
        for pair in pairs:
            _exchange(*pair)
        try:
            yield
        finally:
            for pair in pairs:
                _exchange(*pair)


def _exchange(a: torch.Generator, b: torch.Generator) -> None:
    """Give each of two generators the other's state.

    On a GPU that is the state itself, not its value: a CUDA graph reads its seed and offset from memory that belongs to
    the state it was captured with, written at every replay. Graphs of one state on several streams would overwrite
    each other's.
    """
    if a.device.type == "cuda":
        held = a.graphsafe_get_state()
        a.graphsafe_set_state(b.graphsafe_get_state())
        b.graphsafe_set_state(held)
    else:
        value = a.get_state()
        a.set_state(b.get_state())
        b.set_state(value)


def renew(generator: torch.Generator, state: Tensor) -> None:
    """Put a generator on a GPU into `state`, in memory of its own.

    A capture that was given up leaves the state it used marked as being captured: whoever draws from it next fails.
    """
    fresh = torch.Generator(generator.device).set_state(state)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


@contextmanager
def seeded_globally(seed: int, name: str) -> Iterator[None]:
    """Seed torch's global CPU generator inside the block only.

    PyTorch's layer initialisation takes no generator, so network construction needs the global one; the
    caller's global state is untouched afterwards. Threads take turns, as in `swapped_globally`.
    """
    with _turn, torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the GPUs' generators as well, which nobody restores.
        torch.default_generator.manual_seed(derive_seed(seed, name))
        yield
