"""BatchNorm per minibatch, then the shortcut and the ReLU, in four GPU kernels.

Memory traffic takes the time here, so the data is read as rarely as possible: forward, once for the sums and once to
normalise; backward, once for the sums and once for the result. Each program takes a piece of a group's rows (samples
and pixels of a minibatch) and some channels, and writes its two sums into `partial`. The second kernel adds these up in
a fixed order, so that equal inputs give equal bits. All tensors are (rows, channels) without gaps in memory.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "forward", "update_running"]

# The fastest of some forty choices on an H200, for the layers of a ResNet-18 on 32x32 images.
ROWS, CHANNELS, WARPS = tl.constexpr(128), tl.constexpr(32), 4
READS = 4
"""How many blocks of rows a program reads before it waits for the first."""
PROGRAMS = 384
"""This many programs fill the device."""
LIMITS = (16, 64, 128)
"""Of the number of pieces of a group: every program of a second kernel reads the sums of all of them. The last limit is
for groups of so many rows that with fewer pieces a program would need a loop."""
USUAL_GROUPS = tl.constexpr(3)
"""The minibatches of most steps, whose sums are read all at once."""


@triton.jit
def _place(rows, turns, READS: tl.constexpr):
    """This program's group, its channels, its first row, and the end of the group's rows."""
    group = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    return group, channel, group * rows + tl.program_id(1) * turns * READS * ROWS, (group + 1) * rows


@triton.jit
def _block(start, number, end, channel, channels):
    """Offsets of the values of a block of rows, and a mask of those that exist."""
    row = (start + number * ROWS + tl.arange(0, ROWS))[:, None]
    return row * channels + channel[None, :], (row < end) & (channel < channels)[None, :]


@triton.jit
def _sums(partial, group, channel, channels, PIECES: tl.constexpr):
    """The two sums of a group: its pieces' sums added up; zeros for a group that does not exist."""
    piece, pieces = tl.arange(0, PIECES)[:, None], tl.num_programs(1)
    at = partial + 2 * (group * pieces + piece) * channels + channel[None, :]
    there = (piece < pieces) & (group < tl.num_programs(2)) & (channel < channels)[None, :]
    return tl.sum(tl.load(at, there, 0.0), 0), tl.sum(tl.load(at + channels, there, 0.0), 0)


@triton.jit
def _cut(value):
    """max(value, 0), but NaN stays NaN, which Triton's maximum would hide."""
    return tl.where(value < 0, 0.0, value)


@triton.jit
def _store_sums(partial, first, second, channel, channels):
    """Write the two sums of this program's piece."""
    at = partial + 2 * (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * channels + channel
    tl.store(at, tl.sum(first, 0), channel < channels)
    tl.store(at + channels, tl.sum(second, 0), channel < channels)


@triton.jit
def _statistics(mean, variance, weight, bias, group, channel, channels, eps):
    """Mean, 1 / standard deviation, scale and shift: the output is (x - mean) * scale + shift."""
    there = channel < channels
    middle = tl.load(mean + group * channels + channel, there, 0.0)
    rate = tl.rsqrt(tl.load(variance + group * channels + channel, there, 0.0) + eps)
    scale = tl.load(weight + channel, there, 0.0).to(tl.float32) * rate
    shift = tl.load(bias + channel, there, 0.0).to(tl.float32)
    return middle[None, :], rate[None, :], scale[None, :], shift[None, :]


@triton.jit
def _add_up(x, partial, rows, channels, turns, READS: tl.constexpr):
    """Sums of a piece's values and of their squares. The group's first value is subtracted: means may be large."""
    group, channel, start, end = _place(rows, turns, READS)
    origin = tl.load(x + group * rows * channels + channel, channel < channels, 0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    squares = tl.zeros([ROWS, CHANNELS], tl.float32)
    for turn in range(turns):
        for read in tl.static_range(READS):
            at, here = _block(start, turn * READS + read, end, channel, channels)
            value = tl.where(here, tl.load(x + at, here, 0.0).to(tl.float32) - origin, 0.0)
            total += value
            squares += value * value
    _store_sums(partial, total, squares, channel, channels)


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
    turns,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    PIECES: tl.constexpr,
    READS: tl.constexpr,
):
    """The layer's output; the program of a group's first piece also stores the group's mean and variance."""
    group, channel, start, end = _place(rows, turns, READS)
    total, squares = _sums(partial, group, channel, channels, PIECES)
    offset = total / rows
    spread = _cut(squares / rows - offset * offset)
    middle = tl.load(x + group * rows * channels + channel, channel < channels, 0.0).to(tl.float32) + offset
    if tl.program_id(1) == 0:
        tl.store(mean + group * channels + channel, middle, channel < channels)
        tl.store(variance + group * channels + channel, spread, channel < channels)
    scale = tl.load(weight + channel, channel < channels, 0.0).to(tl.float32) * tl.rsqrt(spread + eps)
    shift = tl.load(bias + channel, channel < channels, 0.0).to(tl.float32)
    for turn in range(turns):
        for read in tl.static_range(READS):
            at, here = _block(start, turn * READS + read, end, channel, channels)
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
    turns,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    READS: tl.constexpr,
):
    """Sums of a piece's gradients, alone and times the normalised values; also writes the shortcut's gradient.

    Without a shortcut, the ReLU's sign is computed again from `x`, so that `y` need not be read.
    """
    group, channel, start, end = _place(rows, turns, READS)
    middle, rate, scale, shift = _statistics(mean, variance, weight, bias, group, channel, channels, eps)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    along = tl.zeros([ROWS, CHANNELS], tl.float32)
    for turn in range(turns):
        for read in tl.static_range(READS):
            at, here = _block(start, turn * READS + read, end, channel, channels)
            value = tl.load(x + at, here, 0.0).to(tl.float32) - middle
            slope = tl.load(dy + at, here, 0.0).to(tl.float32)
            if SHORTCUT:
                slope = tl.where(tl.load(y + at, here, 0.0) <= 0, 0.0, slope)
                tl.store(dshortcut + at, slope.to(dshortcut.dtype.element_ty), here)
            elif RELU:
                slope = tl.where(value * scale + shift <= 0, 0.0, slope)
            total += slope
            along += slope * value * rate
    _store_sums(partial, total, along, channel, channels)


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
    turns,
    RELU: tl.constexpr,
    PIECES: tl.constexpr,
    READS: tl.constexpr,
):
    """The gradient of the layer's input; the first program of each channel also sums those of weight and bias."""
    group, channel, start, end = _place(rows, turns, READS)
    total, along = _sums(partial, group, channel, channels, PIECES)
    if (tl.program_id(1) == 0) & (group == 0):
        all_total, all_along = total, along
        for other in tl.static_range(1, USUAL_GROUPS):
            other_total, other_along = _sums(partial, other, channel, channels, PIECES)
            all_total += other_total
            all_along += other_along
        for other in range(USUAL_GROUPS, tl.num_programs(2)):
            other_total, other_along = _sums(partial, other, channel, channels, PIECES)
            all_total += other_total
            all_along += other_along
        tl.store(dbias + channel, all_total.to(dbias.dtype.element_ty), channel < channels)
        tl.store(dweight + channel, all_along.to(dweight.dtype.element_ty), channel < channels)
    middle, rate, scale, shift = _statistics(mean, variance, weight, bias, group, channel, channels, eps)
    for turn in range(turns):
        for read in tl.static_range(READS):
            at, here = _block(start, turn * READS + read, end, channel, channels)
            value = tl.load(x + at, here, 0.0).to(tl.float32) - middle
            slope = tl.load(dy + at, here, 0.0).to(tl.float32)
            if RELU:
                slope = tl.where(value * scale + shift <= 0, 0.0, slope)
            slope = scale * (slope - (total / rows)[None, :] - value * rate * (along / rows)[None, :])
            tl.store(dx + at, slope.to(dx.dtype.element_ty), here)


@triton.jit
def _update(
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
    """Update the running statistics by each group in order."""
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


class _Plan(NamedTuple):
    """How the programs share the work on one layer."""

    grid: tuple[int, int, int]
    """Blocks of channels, pieces of a group, groups."""
    sizes: tuple[int, int]
    """Rows of a group, and channels."""
    turns: int
    """Turns of a program's loop."""
    reads: int
    """Blocks of rows in a turn. A constant of the kernels: each of its few values is compiled into one of its own."""
    most: int
    """The smallest of LIMITS that is enough: also a constant of the kernels."""


def _plan(x: Tensor, groups: int) -> _Plan:
    """As many pieces as fill the device, but of at least two blocks each."""
    channels = x.shape[1]
    rows = x.numel() // channels // groups
    strips = triton.cdiv(channels, CHANNELS.value)
    allowed = LIMITS[-1] if rows >= LIMITS[-1] * READS * ROWS.value else LIMITS[-2]
    room = max(1, min(allowed, PROGRAMS // (groups * strips), rows // (2 * ROWS.value)))
    pieces = 1 << room.bit_length() - 1  # a power of two divides the rows of most layers evenly
    blocks = triton.cdiv(rows, pieces * ROWS.value)
    reads = READS if blocks >= READS else 2
    most = next(limit for limit in LIMITS if pieces <= limit)
    return _Plan((strips, pieces, groups), (rows, channels), triton.cdiv(blocks, reads), reads, most)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel. For meta tensors, which have a shape and no data, it is compiled and not run."""
    if arguments[0].is_meta:
        kernel.warmup(*arguments, grid=grid, **constants)
    else:
        kernel[grid](*arguments, **constants)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """Output, and means and variances (2, groups, channels)."""
    plan = _plan(x, groups)
    partial = x.new_empty(*plan.grid[:0:-1], 2, x.shape[1], dtype=torch.float32)
    statistics = x.new_empty(2, groups, x.shape[1], dtype=torch.float32)
    y = torch.empty_like(x)
    _launch(_add_up, plan.grid, x, partial, *plan.sizes, plan.turns, READS=plan.reads, num_warps=WARPS)
    kind = {"RELU": relu, "SHORTCUT": shortcut is not None, "PIECES": plan.most, "READS": plan.reads}
    tensors = (x, x if shortcut is None else shortcut, y, partial, weight, bias, *statistics)
    _launch(_normalize, plan.grid, *tensors, *plan.sizes, eps, plan.turns, **kind, num_warps=WARPS)
    return y, statistics


def backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, statistics: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of input, weight, bias and shortcut; `y` is the output if there was a shortcut, else None."""
    plan = _plan(x, statistics.shape[1])
    partial = x.new_empty(*plan.grid[:0:-1], 2, x.shape[1], dtype=torch.float32)
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    dshortcut = x.new_empty(0) if y is None else torch.empty_like(y)
    given = (partial, weight, bias, *statistics)
    around = (dy, x, x) if y is None else (dy, y, dshortcut)
    sizes = (*plan.sizes, eps, plan.turns)
    loop = {"READS": plan.reads, "num_warps": WARPS}
    _launch(_add_up_slopes, plan.grid, x, *around, *given, *sizes, RELU=relu, SHORTCUT=y is not None, **loop)
    # The shortcut's gradient is that of the output, already masked by the ReLU.
    dy, again = (dy, relu) if y is None else (dshortcut, False)
    rest = (*given, dweight, dbias, *sizes)
    _launch(_descend, plan.grid, x, dy, dx, *rest, RELU=again, PIECES=plan.most, **loop)
    return dx, dweight, dbias, dshortcut


def update_running(
    statistics: Tensor, mean: Tensor, variance: Tensor, batches: Tensor, momentum: float, correction: float
) -> None:
    """Move the running mean and variance towards each group's in turn, and count the groups."""
    _, groups, channels = statistics.shape
    block = 256
    given = (statistics, mean, variance, batches, channels, momentum, correction)
    _launch(_update, (triton.cdiv(channels, block),), *given, GROUPS=groups, CHANNELS=block)
