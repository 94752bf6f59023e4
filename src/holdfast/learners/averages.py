"""Averages of a network, which follow it slowly: methods compare the network with them, or evaluate them."""

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.models import copied
from holdfast.pure import pure

__all__ = ["averaged", "follow", "keep_mode", "pace"]


def averaged(model: nn.Module) -> nn.Module:
    """A copy of the model that can follow it: in 16 bits, slow moves would be rounded to none."""
    coarse = {each.dtype for each in model.parameters() if each.requires_grad and torch.finfo(each.dtype).bits < 32}
    if coarse:
        raise UsageError(
            f"an average of weights in {', '.join(map(str, coarse))} would stand still: keep the model in float32, and "
            'give precision="bfloat16" to compute in bfloat16.'
        )
    return copied(model)


def keep_mode(model: nn.Module, *averages: nn.Module) -> None:
    """Put each part of the averages into training or evaluation mode, as the same part of the model is.

    A test of an average, for instance, may have left it in another mode.
    """
    for theirs, *parts in zip(model.modules(), *(each.modules() for each in averages), strict=True):
        for mine in parts:
            if mine.training != theirs.training:  # to set an attribute of a module takes long
                mine.training = theirs.training


def pace(updates: Tensor, decay: float) -> Tensor:
    """The share of the distance to the network that an average moves: 1 - decay, but at first 1 / (updates + 1).

    So it begins as the mean of all networks so far.
    """
    return 1 - (1 - 1 / (updates + 1)).clamp(max=decay)


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, weight: Tensor) -> None:
    """average <- (1 - weight) * average + weight * model, for all parameters."""
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        if fast.requires_grad:
            mine.append(slow)
            theirs.append(fast)
        elif fast.is_floating_point():  # frozen, but the average may still be on its way there
            slow.lerp_(fast, weight.to(slow.dtype))
    if mine:
        _move(mine, theirs, weight)


@pure
def _move(mine: list[Tensor], theirs: list[Tensor], weight: Tensor) -> None:
    """Compiled, it reads and writes each weight once."""
    torch._foreach_mul_(mine, 1 - weight)
    torch._foreach_add_(mine, list(torch._foreach_mul(theirs, weight)))
