"""The way back from a forward pass that turns out to be one that should not have been made."""

from collections.abc import Callable, Iterable
from math import inf

import torch
from torch import nn

__all__ = ["way_back"]


def way_back(
    modules: Iterable[nn.Module], generators: Iterable[torch.Generator], largest: float = inf
) -> Callable[[], None]:
    """A function that gives modules their buffers back, and generators their states, as all of them are now.

    Buffers of more than `largest` bytes are left out: copying them would take too long.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.nbytes <= largest
    ]
    states = [(generator, generator.get_state()) for generator in generators]

    def go_back() -> None:
        for module, name, buffer, before in buffers:
            buffer.copy_(before)
            module._buffers[name] = buffer  # a forward pass may have put another tensor in its place
        for generator, state in states:
            generator.set_state(state)

    return go_back
