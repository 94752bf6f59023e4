"""One seed -> independent named generators. Everything random in Holdfast comes from here."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from threading import RLock

import torch
from torch import Tensor

from holdfast.errors import UsageError

__all__ = ["check_globally", "derive_seed", "generator", "global_generators", "own_generators", "renew"]
__all__ += ["restore", "seeded_globally", "swapped_globally"]

_REMEDY = "continue on the kind of device where it was saved."
_turn = RLock()
"""Held by the thread that has swapped or seeded PyTorch's global generators: a process has one set of them."""


if hasattr(os, "register_at_fork"):
    # In a forked process, a thread that held the lock is gone and will never release it.
    os.register_at_fork(after_in_child=lambda: globals().update(_turn=RLock()))


def derive_seed(seed: int, name: str) -> int:
    """A 63-bit seed for the stream `name`, unrelated to the streams of other names and seeds."""
    return int.from_bytes(sha256(f"holdfast:{seed}:{name}".encode()).digest()[:8], "little") >> 1


def generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one purpose ("order", "augment", "buffer", "stream") on one device."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, name))


def restore(generator: torch.Generator, state: Tensor) -> None:
    """Put `generator` into a state that was taken from one on the same kind of device."""
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"the saved random state is not one of a generator on {generator.device}: {_REMEDY}"
        ) from error


def check_globally(states: dict[str, Tensor], device: torch.device) -> None:
    """Raise an error if `states` are of global generators of another kind of device."""
    own = global_generators(device)
    if states.keys() != own.keys():
        saved, here = " and ".join(states), " and ".join(own)
        raise UsageError(f"the saved random states are of {saved}, here they are of {here}: {_REMEDY}")


def global_generators(device: torch.device) -> dict[str, torch.Generator]:
    """PyTorch's global generators, of the CPU and of `device`, by kind of device: dropout, for one, draws from them."""
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

    Inside, `own` have the states of the global generators. Threads take turns in such blocks and in those of
    `seeded_globally`, so a block must not wait for another thread that wants one.
    """
    with _turn:
        # The global generators of the devices that `own` are on: another GPU may be the current one by now.
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

    On a GPU that is the state object, not a copy of its value: a CUDA graph reads its seed and offset from memory that
    belongs to the state it was captured with. Graphs of one state on several streams would overwrite each other's.
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

    A failed capture leaves the state it used marked as being captured: the next draw from it would fail.
    """
    fresh = torch.Generator(generator.device).set_state(state)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


@contextmanager
def seeded_globally(seed: int, name: str) -> Iterator[None]:
    """Seed torch's global CPU generator inside the block, for the initialisation of layers, which takes no generator.

    Afterwards it has the state it had before. Threads take turns, as in `swapped_globally`.
    """
    with _turn, torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the GPUs' generators as well, and they are not restored here.
        torch.default_generator.manual_seed(derive_seed(seed, name))
        yield
