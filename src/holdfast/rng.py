"""One seed -> independent named generators. Everything random in Holdfast comes from here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import torch
from torch import Tensor

from holdfast.errors import UsageError

__all__ = ["derive_seed", "generator", "restore", "seeded_globally"]


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
