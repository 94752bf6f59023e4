"""Batch normalisation of several minibatches at once in plain operations: on any device, differentiable repeatedly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["derivative", "moments", "normalize_groups", "per_channel"]


def normalize_groups(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x (G, B, C, ...) normalised with statistics per group and channel, times weight plus bias; mean and variance."""
    out, mean, variance = _Normalization.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return out, mean, variance


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of x (G, B, C, ...) per group and channel, shaped to broadcast with x.

    Half-precision inputs are reduced in float32, as the built-in BatchNorm does.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, dim=_axes(x), correction=0, keepdim=True)
    return mean, variance


def derivative(
    dy: Tensor, x: Tensor, mean: Tensor, rate: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input (G, B, C, ...), weight and bias (C,), from the gradient `dy` of the output.

    `rate` is 1 / standard deviation.
    """
    axes = _axes(x)
    dy = dy.to(mean.dtype)
    normalised = (x.to(mean.dtype) - mean) * rate
    total = dy.sum(dim=axes, keepdim=True)
    along = (dy * normalised).sum(dim=axes, keepdim=True)
    count = x[0].numel() // x.shape[2]
    slope = rate if weight is None else rate * per_channel(weight, x)
    dx = slope * (dy - total / count - normalised * (along / count))
    return dx.to(x.dtype), along.sum(dim=0).flatten(), total.sum(dim=0).flatten()


def per_channel(parameter: Tensor, x: Tensor) -> Tensor:
    """A parameter (C,) shaped to broadcast with x (G, B, C, ...)."""
    return parameter.view(-1, *[1] * (x.dim() - 3))


def _axes(x: Tensor) -> list[int]:
    """All axes of (G, B, C, ...) except the group and the channel."""
    return [1, *range(3, x.dim())]


class _Normalization(torch.autograd.Function):
    """The derivative is written out because automatic differentiation of mean and variance would read x once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        mean, variance = moments(x)
        scale = rate = torch.rsqrt(variance + eps)
        shift = -mean * rate
        if weight is not None and bias is not None:
            scale, shift = rate * per_channel(weight, x), shift * per_channel(weight, x) + per_channel(bias, x)
        ctx.save_for_backward(x, mean, rate, weight)
        ctx.mark_non_differentiable(mean, variance)
        ctx.eps = eps
        normalised = x.to(mean.dtype) * scale + shift
        if normalised.dtype != x.dtype:  # torch 2.11 compiles a conversion to the same type into gradients of 0
            normalised = normalised.to(x.dtype)
        return normalised, mean, variance

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rate, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of gradients also flow through mean and rate, which depend on x
            mean, variance = moments(x)
            rate = torch.rsqrt(variance + ctx.eps)
        dx, dweight, dbias = derivative(dy, x, mean, rate, weight)
        return (dx, dweight, dbias, None) if weight is not None else (dx, None, None, None)
