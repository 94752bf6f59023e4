"""BatchNorm per minibatch, then the shortcut and the ReLU, as one differentiable operation on a GPU."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["batchnorm", "compiles_for", "supports", "update_running"]

_HAS_TRITON = find_spec("triton") is not None  # comes with PyTorch for NVIDIA GPUs under Linux
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_VALUES = 2**31 - 1
"""The kernels compute addresses within a tensor in 32 bits."""


def supports(x: Tensor) -> bool:
    """Whether there are kernels for `x` (B, C, ...): it is on a GPU, with channels last and without gaps in memory."""
    known = x.dtype in _DTYPES and 0 < x.numel() <= _MOST_VALUES
    return known and compiles_for(x.device) and x.movedim(1, -1).is_contiguous()


def compiles_for(device: torch.device) -> bool:
    """Whether Triton is here and compiles for `device`: an NVIDIA GPU, Volta or later."""
    return _HAS_TRITON and device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 7


def batchnorm(
    x: Tensor, weight: Tensor, bias: Tensor, *, groups: int, eps: float, relu: bool, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalise each of the `groups` equal minibatches in `x`: output, and means and variances (2, groups, C).

    `shortcut` has the shape of `x` and is added before the ReLU.
    """
    if shortcut is not None:
        shortcut = _dense(shortcut)
    out, statistics = _batchnorm(x, weight, bias, shortcut, groups, eps, relu)
    return out, statistics.detach()  # only the output is differentiable


def _dense(x: Tensor) -> Tensor:
    """`x` (B, C, ...) with channels last and without gaps in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@torch.library.custom_op("holdfast::batchnorm", mutates_args=())
def _batchnorm(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    from holdfast.models.batchnorm import kernels  # imports Triton, so only where a kernel runs

    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton would use the current GPU
        return kernels.forward(x, weight, bias, shortcut, groups, eps, relu)


@torch.library.custom_op("holdfast::batchnorm_backward", mutates_args=())
def _batchnorm_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, statistics: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from holdfast.models.batchnorm import kernels

    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        return kernels.backward(dy, x, y, weight, bias, statistics, eps, relu)


@_batchnorm.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(2, groups, x.shape[1], dtype=torch.float32)


@_batchnorm_backward.register_fake
def _(dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dshortcut = x.new_empty(0) if y is None else torch.empty_like(y)
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias), dshortcut


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, shortcut, _, ctx.eps, ctx.relu = inputs
    y, statistics = output
    ctx.set_materialize_grads(False)  # the statistics have no gradient: make no zeros for them
    ctx.save_for_backward(x, None if shortcut is None else y, weight, bias, statistics)


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    # Gradients of gradients, for gradient penalties, are rare: plain operations are fast enough.
    backward = _plain_backward if torch.is_grad_enabled() else _batchnorm_backward
    x, y, weight, bias, statistics = ctx.saved_tensors
    dx, dweight, dbias, dshortcut = backward(_dense(dy), x, y, weight, bias, statistics, ctx.eps, ctx.relu)
    return dx, dweight, dbias, None if y is None else dshortcut, None, None, None


def _plain_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, statistics: Tensor, eps: float, relu: bool
) -> tuple[Tensor | None, ...]:
    """The results of the kernels, (dx, dweight, dbias, dshortcut), in operations that torch can differentiate."""
    parts = x.chunk(statistics.shape[1])
    out = torch.cat([F.batch_norm(part, None, None, weight, bias, training=True, eps=eps) for part in parts])
    slope = dy * ((out if y is None else y) > 0) if relu else dy
    leaves = (x, weight, bias)
    learned = [leaf for leaf in leaves if leaf.requires_grad]  # torch refuses the others
    found = iter(torch.autograd.grad(out, learned, slope, create_graph=True) if learned else ())
    return *(next(found) if leaf.requires_grad else None for leaf in leaves), slope


@torch.library.custom_op("holdfast::update_running", mutates_args=("mean", "variance", "batches"))
def update_running(
    statistics: Tensor, mean: Tensor, variance: Tensor, batches: Tensor, momentum: float, correction: float
) -> None:
    """Update the running mean and variance and the count of batches as if the groups had come one by one.

    `correction` makes the variances unbiased: n / (n - 1) for n values per channel.
    """
    from holdfast.models.batchnorm import kernels

    with torch.cuda.device_of(mean):  # type: ignore[no-untyped-call]
        kernels.update_running(statistics, mean, variance, batches, momentum, correction)


@update_running.register_fake
def _(*_: Any) -> None:
    pass


_batchnorm.register_autograd(_differentiate, setup_context=_save)
