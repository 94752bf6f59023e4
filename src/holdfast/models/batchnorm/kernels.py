"""BatchNorm per minibatch, with the shortcut and the ReLU behind it, in four GPU kernels.

A GPU spends this step on memory traffic, so what counts is how often the data is read: forward, once for the sums and
once to normalise; backward, once for the sums and once for the result. Each program takes a piece of a group's rows
(the samples and pixels of a minibatch) and a few channels, and leaves its two sums in `partial`; the second kernel adds
those up, in a fixed order, so that equal inputs give equal bits. Tensors are (rows, channels) here, without gaps.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

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
FEW_PIECES, MOST_PIECES = 16, 128
"""Every program of a second kernel reads the sums of all pieces of its group."""


@triton.jit
def _place(rows, pieces, turns, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Of this program: its group and channels, its first row, and the row behind the group's last."""
    group = tl.program_id(1) // pieces
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    return group, channel, group * rows + (tl.program_id(1) % pieces) * turns * ROWS, (group + 1) * rows


@triton.jit
def _block(start, turn, end, channel, channels, ROWS: tl.constexpr):
    """Where the values of a turn are, and which of them exist."""
    row = (start + turn * ROWS + tl.arange(0, ROWS))[:, None]
    return row * channels + channel[None, :], (row < end) & (channel < channels)[None, :]


@triton.jit
def _sums(partial, group, pieces, channel, channels, PIECES: tl.constexpr):
    """The two sums of a group, from those of its pieces."""
    piece = tl.arange(0, PIECES)[:, None]
    at = partial + 2 * (group * pieces + piece) * channels + channel[None, :]
    there = (piece < pieces) & (channel < channels)[None, :]
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


@triton.jit(do_not_specialize=["pieces", "turns"])
def _add_up(
    x,
    partial,
    rows,
    channels,
    pieces,
    turns,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums of a piece's values and of their squares, less the group's first value: the mean may be far from 0."""
    group, channel, start, end = _place(rows, pieces, turns, ROWS, CHANNELS)
    origin = tl.load(x + group * rows * channels + channel, channel < channels, 0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    squares = tl.zeros([ROWS, CHANNELS], tl.float32)
    for turn in tl.range(turns, loop_unroll_factor=UNROLLED):
        at, here = _block(start, turn, end, channel, channels, ROWS)
        value = tl.where(here, tl.load(x + at, here, 0.0).to(tl.float32) - origin, 0.0)
        total += value
        squares += value * value
    _keep_sums(partial, total, squares, channel, channels)


@triton.jit(do_not_specialize=["pieces", "turns"])
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
    pieces,
    turns,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The layer's output; the first piece of each group also keeps the group's mean and variance."""
    group, channel, start, end = _place(rows, pieces, turns, ROWS, CHANNELS)
    total, squares = _sums(partial, group, pieces, channel, channels, PIECES)
    offset = total / rows
    spread = _cut(squares / rows - offset * offset)
    middle = tl.load(x + group * rows * channels + channel, channel < channels, 0.0).to(tl.float32) + offset
    if tl.program_id(1) % pieces == 0:
        tl.store(mean + group * channels + channel, middle, channel < channels)
        tl.store(variance + group * channels + channel, spread, channel < channels)
    scale = tl.load(weight + channel, channel < channels, 0.0).to(tl.float32) * tl.rsqrt(spread + eps)
    shift = tl.load(bias + channel, channel < channels, 0.0).to(tl.float32)
    for turn in tl.range(turns, loop_unroll_factor=UNROLLED):
        at, here = _block(start, turn, end, channel, channels, ROWS)
        value = (tl.load(x + at, here, 0.0).to(tl.float32) - middle[None, :]) * scale[None, :] + shift[None, :]
        if SHORTCUT:
            value += tl.load(shortcut + at, here, 0.0).to(tl.float32)
        if RELU:
            value = _cut(value)
        tl.store(y + at, value.to(y.dtype.element_ty), here)


@triton.jit(do_not_specialize=["pieces", "turns"])
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
    pieces,
    turns,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums of a piece's gradients, alone and times the normalised values; the shortcut's gradient on the way.

    What the ReLU let through is computed again where that needs no other data than is read anyway.
    """
    group, channel, start, end = _place(rows, pieces, turns, ROWS, CHANNELS)
    middle, rate, scale, shift = _statistics(mean, variance, weight, bias, group, channel, channels, eps)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    along = tl.zeros([ROWS, CHANNELS], tl.float32)
    for turn in tl.range(turns, loop_unroll_factor=UNROLLED):
        at, here = _block(start, turn, end, channel, channels, ROWS)
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


@triton.jit(do_not_specialize=["groups", "pieces", "turns"])
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
    groups,
    pieces,
    turns,
    RELU: tl.constexpr,
    PIECES: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The gradient of the layer's input; the first program of each channel also adds up those of the parameters."""
    group, channel, start, end = _place(rows, pieces, turns, ROWS, CHANNELS)
    total, along = _sums(partial, group, pieces, channel, channels, PIECES)
    if tl.program_id(1) == 0:
        all_total, all_along = total, along
        for other in range(1, groups):
            other_total, other_along = _sums(partial, other, pieces, channel, channels, PIECES)
            all_total += other_total
            all_along += other_along
        tl.store(dbias + channel, all_total.to(dbias.dtype.element_ty), channel < channels)
        tl.store(dweight + channel, all_along.to(dweight.dtype.element_ty), channel < channels)
    middle, rate, scale, shift = _statistics(mean, variance, weight, bias, group, channel, channels, eps)
    for turn in tl.range(turns, loop_unroll_factor=UNROLLED):
        at, here = _block(start, turn, end, channel, channels, ROWS)
        value = tl.load(x + at, here, 0.0).to(tl.float32) - middle
        slope = tl.load(dy + at, here, 0.0).to(tl.float32)
        if RELU:
            slope = tl.where(value * scale + shift <= 0, 0.0, slope)
        slope = scale * (slope - (total / rows)[None, :] - value * rate * (along / rows)[None, :])
        tl.store(dx + at, slope.to(dx.dtype.element_ty), here)


@triton.jit(do_not_specialize=["groups"])
def _follow(
    statistics,
    running_mean,
    running_var,
    batches,
    channels,
    momentum,
    correction,
    groups,
    CHANNELS: tl.constexpr,
):
    """Running statistics after the groups in order."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    mean = tl.load(running_mean + channel, there).to(tl.float32)
    variance = tl.load(running_var + channel, there).to(tl.float32)
    for group in range(groups):
        mean += momentum * (tl.load(statistics + group * channels + channel, there) - mean)
        found = tl.load(statistics + (groups + group) * channels + channel, there)
        variance += momentum * (found * correction - variance)
    tl.store(running_mean + channel, mean.to(running_mean.dtype.element_ty), there)
    tl.store(running_var + channel, variance.to(running_var.dtype.element_ty), there)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + groups)


class _Plan(NamedTuple):
    """How the programs share the work on one layer."""

    rows: int
    """Of a group."""
    channels: int
    grid: tuple[int, int]
    cut: tuple[int, int]
    """Into how many pieces a group is cut, and how many turns of its loop a program needs for one."""
    loop: dict[str, int]
    """What is compiled into the loop. Only a few values each, since a kernel is compiled for every combination."""
    most: int
    """The least of two numbers of pieces that is enough."""


def _plan(x: Tensor, groups: int) -> _Plan:
    """As many pieces as there is room for, of two turns or more."""
    channels = x.shape[1]
    rows = x.numel() // channels // groups
    blocks = triton.cdiv(channels, CHANNELS)
    room = max(1, min(MOST_PIECES, PROGRAMS // (groups * blocks), rows // (2 * ROWS)))
    pieces = 1 << room.bit_length() - 1  # most layers are divided evenly by powers of two
    turns = triton.cdiv(rows, pieces * ROWS)
    reads = READS if turns >= READS else 2
    loop = {"UNROLLED": reads, "ROWS": ROWS, "CHANNELS": CHANNELS, "num_warps": WARPS}
    most = FEW_PIECES if pieces <= FEW_PIECES else MOST_PIECES
    return _Plan(rows, channels, (blocks, groups * pieces), (pieces, turns), loop, most)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """Output, and means and variances (2, groups, channels)."""
    plan = _plan(x, groups)
    shape = (plan.rows, plan.channels)
    partial = x.new_empty(plan.grid[1], 2, plan.channels, dtype=torch.float32)
    statistics = x.new_empty(2, groups, plan.channels, dtype=torch.float32)
    y = torch.empty_like(x)
    _add_up[plan.grid](x, partial, *shape, *plan.cut, **plan.loop)
    kind = {"RELU": relu, "SHORTCUT": shortcut is not None, "PIECES": plan.most}
    tensors = (x, x if shortcut is None else shortcut, y, partial, weight, bias, *statistics)
    _normalize[plan.grid](*tensors, *shape, eps, *plan.cut, **kind, **plan.loop)
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
    groups = statistics.shape[1]
    plan = _plan(x, groups)
    shape = (plan.rows, plan.channels)
    partial = x.new_empty(plan.grid[1], 2, plan.channels, dtype=torch.float32)
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    dshortcut = x.new_empty(0) if y is None else torch.empty_like(y)
    given = (partial, weight, bias, *statistics)
    around = (dy, x, x) if y is None else (dy, y, dshortcut)
    _add_up_slopes[plan.grid](
        x, *around, *given, *shape, eps, *plan.cut, RELU=relu, SHORTCUT=y is not None, **plan.loop
    )
    # The shortcut's gradient is the output's behind the ReLU.
    dy, again = (dy, relu) if y is None else (dshortcut, False)
    results = (dweight, dbias, *shape, eps, groups, *plan.cut)
    _descend[plan.grid](x, dy, dx, *given, *results, RELU=again, PIECES=plan.most, **plan.loop)
    return dx, dweight, dbias, dshortcut


def follow(
    statistics: Tensor, mean: Tensor, variance: Tensor, batches: Tensor, momentum: float, correction: float
) -> None:
    """Move the running mean and variance towards each group's in turn, and count the groups."""
    _, groups, channels = statistics.shape
    block = 256
    _follow[(triton.cdiv(channels, block),)](
        statistics, mean, variance, batches, channels, momentum, correction, groups, CHANNELS=block
    )
