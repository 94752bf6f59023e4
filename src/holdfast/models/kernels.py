"""BatchNorm per minibatch, with the shortcut and the ReLU behind it, in four GPU kernels.

A GPU spends this step on memory traffic, so what counts is how often the data is read: forward, once for the sums and
once to normalise; backward, once for the sums and once for the result. Each program takes a piece of a group's rows
(the samples and pixels of a minibatch) and a few channels, and leaves its two sums in `partial`; the second kernel adds
those up, in a fixed order, so that equal inputs give equal bits. Tensors are (rows, channels) here, without gaps.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "follow", "forward"]

# The fastest of some forty choices on an H200, for the layers of a ResNet-18 on 32x32 images.
ROWS, CHANNELS, WARPS = 128, 32, 4
READS = 4
"""How many turns of a program's loop are under way at once."""
PROGRAMS = 384
"""So many fill the device."""
MOST_PIECES = 128
"""Every program of a second kernel reads the sums of all pieces of its group."""


@triton.jit
def _piece(rows, PIECES: tl.constexpr, LENGTH: tl.constexpr):
    """Of this program: its group, its first row, and the row behind the group's last."""
    group = tl.program_id(1) // PIECES
    return group, group * rows + (tl.program_id(1) % PIECES) * LENGTH, (group + 1) * rows


@triton.jit
def _sums(partial, group, channel, channels, PIECES: tl.constexpr):
    """The two sums of a group, from those of its pieces."""
    piece = group * PIECES + tl.arange(0, PIECES)
    at = partial + (2 * piece)[:, None] * channels + channel[None, :]
    there = (channel < channels)[None, :]
    return tl.sum(tl.load(at, there, 0.0), 0), tl.sum(tl.load(at + channels, there, 0.0), 0)


@triton.jit
def _cut(value):
    """What is above 0; NaN stays NaN, which Triton's maximum would hide."""
    return tl.where(value < 0, 0.0, value)


@triton.jit
def _keep_sums(partial, first, second, channel, channels):
    """Leave the two sums of this program's piece."""
    at = partial + 2 * tl.program_id(1) * channels + channel
    tl.store(at, tl.sum(first, 0), channel < channels)
    tl.store(at + channels, tl.sum(second, 0), channel < channels)


@triton.jit
def _statistics(mean, variance, weight, bias, group, channel, channels, eps):
    """Mean, 1 / standard deviation, and what to multiply with and to add after the mean is taken off."""
    there = channel < channels
    middle = tl.load(mean + group * channels + channel, there, 0.0)
    rate = tl.rsqrt(tl.load(variance + group * channels + channel, there, 0.0) + eps)
    scale = tl.load(weight + channel, there, 0.0).to(tl.float32) * rate
    shift = tl.load(bias + channel, there, 0.0).to(tl.float32)
    return middle[None, :], rate[None, :], scale[None, :], shift[None, :]


@triton.jit
def _add_up(
    x,
    partial,
    rows,
    channels,
    PIECES: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums of a piece's values and of their squares, less the group's first value: the mean may be far from 0."""
    group, start, end = _piece(rows, PIECES, TURNS * ROWS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = (channel < channels)[None, :]
    origin = tl.load(x + group * rows * channels + channel, channel < channels, 0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    squares = tl.zeros([ROWS, CHANNELS], tl.float32)
    for turn in tl.range(TURNS, loop_unroll_factor=UNROLLED):
        row = (start + turn * ROWS + tl.arange(0, ROWS))[:, None]
        at = row * channels + channel[None, :]
        value = tl.load(x + at, (row < end) & there, 0.0).to(tl.float32)
        value = tl.where(row < end, value - origin, 0.0)
        total += value
        squares += value * value
    _keep_sums(partial, total, squares, channel, channels)


@triton.jit
def _normalize(
    x,
    shortcut,
    y,
    partial,
    weight,
    bias,
    mean,
    variance,
    rows,
    channels,
    eps,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    PIECES: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The layer's output; the first piece of each group also keeps the group's mean and variance."""
    group, start, end = _piece(rows, PIECES, TURNS * ROWS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = (channel < channels)[None, :]
    total, squares = _sums(partial, group, channel, channels, PIECES)
    offset = total / rows
    spread = _cut(squares / rows - offset * offset)
    middle = tl.load(x + group * rows * channels + channel, channel < channels, 0.0).to(tl.float32) + offset
    if tl.program_id(1) % PIECES == 0:
        tl.store(mean + group * channels + channel, middle, channel < channels)
        tl.store(variance + group * channels + channel, spread, channel < channels)
    scale = tl.load(weight + channel, channel < channels, 0.0).to(tl.float32) * tl.rsqrt(spread + eps)
    shift = tl.load(bias + channel, channel < channels, 0.0).to(tl.float32)
    for turn in tl.range(TURNS, loop_unroll_factor=UNROLLED):
        row = (start + turn * ROWS + tl.arange(0, ROWS))[:, None]
        at = row * channels + channel[None, :]
        here = (row < end) & there
        value = (tl.load(x + at, here, 0.0).to(tl.float32) - middle[None, :]) * scale[None, :] + shift[None, :]
        if SHORTCUT:
            value += tl.load(shortcut + at, here, 0.0).to(tl.float32)
        if RELU:
            value = _cut(value)
        tl.store(y + at, value.to(y.dtype.element_ty), here)


@triton.jit
def _add_up_slopes(
    x,
    dy,
    y,
    dshortcut,
    partial,
    weight,
    bias,
    mean,
    variance,
    rows,
    channels,
    eps,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    PIECES: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums of a piece's gradients, alone and times the normalised values; the shortcut's gradient on the way.

    What the ReLU let through is computed again where that needs no other data than is read anyway.
    """
    group, start, end = _piece(rows, PIECES, TURNS * ROWS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = (channel < channels)[None, :]
    middle, rate, scale, shift = _statistics(mean, variance, weight, bias, group, channel, channels, eps)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    along = tl.zeros([ROWS, CHANNELS], tl.float32)
    for turn in tl.range(TURNS, loop_unroll_factor=UNROLLED):
        row = (start + turn * ROWS + tl.arange(0, ROWS))[:, None]
        at = row * channels + channel[None, :]
        here = (row < end) & there
        value = tl.load(x + at, here, 0.0).to(tl.float32) - middle
        slope = tl.load(dy + at, here, 0.0).to(tl.float32)
        if SHORTCUT:
            slope = tl.where(tl.load(y + at, here, 0.0) <= 0, 0.0, slope)
            tl.store(dshortcut + at, slope.to(dshortcut.dtype.element_ty), here)
        elif RELU:
            slope = tl.where(value * scale + shift <= 0, 0.0, slope)
        total += slope
        along += slope * value * rate
    _keep_sums(partial, total, along, channel, channels)


@triton.jit
def _descend(
    x,
    dy,
    dx,
    partial,
    weight,
    bias,
    mean,
    variance,
    dweight,
    dbias,
    rows,
    channels,
    eps,
    RELU: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The gradient of the layer's input; the first program of each channel also adds up those of the parameters."""
    group, start, end = _piece(rows, PIECES, TURNS * ROWS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = (channel < channels)[None, :]
    total, along = _sums(partial, group, channel, channels, PIECES)
    if tl.program_id(1) == 0:
        all_total, all_along = total, along
        for other in tl.static_range(1, GROUPS):
            other_total, other_along = _sums(partial, other, channel, channels, PIECES)
            all_total += other_total
            all_along += other_along
        tl.store(dbias + channel, all_total.to(dbias.dtype.element_ty), channel < channels)
        tl.store(dweight + channel, all_along.to(dweight.dtype.element_ty), channel < channels)
    middle, rate, scale, shift = _statistics(mean, variance, weight, bias, group, channel, channels, eps)
    for turn in tl.range(TURNS, loop_unroll_factor=UNROLLED):
        row = (start + turn * ROWS + tl.arange(0, ROWS))[:, None]
        at = row * channels + channel[None, :]
        here = (row < end) & there
        value = tl.load(x + at, here, 0.0).to(tl.float32) - middle
        slope = tl.load(dy + at, here, 0.0).to(tl.float32)
        if RELU:
            slope = tl.where(value * scale + shift <= 0, 0.0, slope)
        slope = scale * (slope - (total / rows)[None, :] - value * rate * (along / rows)[None, :])
        tl.store(dx + at, slope.to(dx.dtype.element_ty), here)


@triton.jit
def _follow(
    statistics,
    running_mean,
    running_var,
    batches,
    channels,
    momentum,
    correction,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Running statistics after the groups in order."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    mean = tl.load(running_mean + channel, there).to(tl.float32)
    variance = tl.load(running_var + channel, there).to(tl.float32)
    for group in tl.static_range(GROUPS):
        mean += momentum * (tl.load(statistics + group * channels + channel, there) - mean)
        found = tl.load(statistics + (GROUPS + group) * channels + channel, there)
        variance += momentum * (found * correction - variance)
    tl.store(running_mean + channel, mean.to(running_mean.dtype.element_ty), there)
    tl.store(running_var + channel, variance.to(running_var.dtype.element_ty), there)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + GROUPS)


def _plan(groups: int, rows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of programs, and how a group is cut: into as many pieces as there is room for, of two turns or more."""
    blocks = triton.cdiv(channels, CHANNELS)
    most = max(1, min(MOST_PIECES, PROGRAMS // (groups * blocks), rows // (2 * ROWS)))
    pieces = 1 << most.bit_length() - 1  # Triton's blocks are powers of two
    turns = triton.cdiv(rows, pieces * ROWS)
    sizes = {
        "PIECES": pieces,
        "TURNS": turns,
        "UNROLLED": min(turns, READS),
        "ROWS": ROWS,
        "CHANNELS": CHANNELS,
        "num_warps": WARPS,
    }
    return (blocks, groups * pieces), sizes


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """Output, and means and variances (2, groups, channels)."""
    channels = x.shape[1]
    rows = x.numel() // channels // groups
    grid, sizes = _plan(groups, rows, channels)
    partial = x.new_empty(grid[1], 2, channels, dtype=torch.float32)
    statistics = x.new_empty(2, groups, channels, dtype=torch.float32)
    y = torch.empty_like(x)
    _add_up[grid](x, partial, rows, channels, **sizes)
    sources = (x, x if shortcut is None else shortcut, y, partial, weight, bias, *statistics)
    _normalize[grid](*sources, rows, channels, eps, RELU=relu, SHORTCUT=shortcut is not None, **sizes)
    return y, statistics


def backward(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of input, weight, bias and shortcut; `y` is the output where there was a shortcut, else None."""
    _, groups, channels = statistics.shape
    rows = x.numel() // channels // groups
    grid, sizes = _plan(groups, rows, channels)
    partial = x.new_empty(grid[1], 2, channels, dtype=torch.float32)
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    dshortcut = x.new_empty(0) if y is None else torch.empty_like(y)
    given = (weight, bias, *statistics)
    outputs = (dy, x, x) if y is None else (dy, y, dshortcut)
    _add_up_slopes[grid](x, *outputs, partial, *given, rows, channels, eps, RELU=relu, SHORTCUT=y is not None, **sizes)
    masked, again = (dy, relu) if y is None else (dshortcut, False)
    _descend[grid](
        x, masked, dx, partial, *given, dweight, dbias, rows, channels, eps, RELU=again, GROUPS=groups, **sizes
    )
    return dx, dweight, dbias, dshortcut


def follow(
    statistics: Tensor, mean: Tensor, variance: Tensor, batches: Tensor, momentum: float, correction: float
) -> None:
    """Move the running mean and variance towards each group's in turn, and count the groups."""
    _, groups, channels = statistics.shape
    block = 256
    _follow[(triton.cdiv(channels, block),)](
        statistics, mean, variance, batches, channels, momentum, correction, GROUPS=groups, CHANNELS=block
    )
