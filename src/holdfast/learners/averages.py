"""Averages of a network that follow it slowly, for the methods that compare it with one or evaluate one."""

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.models import copied
from holdfast.pure import pure

__all__ = ["averaged", "follow", "keep_mode"]


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
    """Let all parts of the averages be in the mode of the model's, whatever their last use has left them in."""
    for theirs, *parts in zip(model.modules(), *(each.modules() for each in averages), strict=True):
        for mine in parts:
            mine.training = theirs.training


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, weight: Tensor) -> None:
    """average <- (1 - weight) * average + weight * model, for all parameters."""
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        if fast.requires_grad:
            mine.append(slow)
            theirs.append(fast)
        elif fast.is_floating_point():  # frozen: what is equal stays equal, what was frozen later has a way to go
            slow.lerp_(fast, weight.to(slow.dtype))
    if mine:
        _move(mine, theirs, weight)


@pure
def _move(mine: list[Tensor], theirs: list[Tensor], weight: Tensor) -> None:
    """Compiled, it reads and writes each weight once."""
    torch._foreach_mul_(mine, 1 - weight)
    torch._foreach_add_(mine, list(torch._foreach_mul(theirs, weight)))
