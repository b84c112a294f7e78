"""Gated short convolutions on a GPU: see `layout.short_conv`."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import DeviceLayerStates
from qoff.kernels.operands import FLOATS, require
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.sizes import cdiv

from .convolve import channel_tiles, convolved, remember


@triton.jit(do_not_specialize=["rows", "slots"])
def short_conv_kernel(
    bcx,  # [M, 3 * CHANNELS], rows x_stride apart, in the order of the batch
    order,  # [M], or not read
    row_start, start, weight,
    past,  # [S, TAPS - 1, CHANNELS]
    out,  # [M, CHANNELS], in the order of the batch
    rows, slots, x_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Some tokens of a sequence, some channels; behind all sequences, rows of no token are 0.

    The first tile of a sequence alone reads its past, and then writes it.
    """
    begin = tl.program_id(0) * WIDTH
    tile = tl.program_id(1)
    s = tl.program_id(2)
    index = tl.arange(0, WIDTH)
    width = CHANNELS - begin
    inside = index < width
    channel = begin + index
    first_row = tl.load(row_start + s)
    if s == slots:
        if tile == 0:
            for first in tl.range(first_row, rows, ROWS, num_stages=1):
                none = first + tl.arange(0, ROWS)
                target = out + none.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
                nothing = tl.zeros([ROWS, WIDTH], out.dtype.element_ty)
                tl.store(target, nothing, mask=(none < rows)[:, None] & inside[None, :])
        return
    count = tl.load(row_start + s + 1) - first_row
    if tile * ROWS >= count:
        return
    remembered = tl.load(start + s)
    own = past + s.to(tl.int64) * ((TAPS - 1) * CHANNELS) + channel
    row = tile * ROWS + tl.arange(0, ROWS)
    total = convolved(
        bcx, order, own, weight, first_row, row, count, remembered, channel, inside, x_stride,
        CHANNELS, WIDTH, TAPS, ROWS, ORDERED, True,
    )  # fmt: skip
    there = row < count
    place = first_row + row
    if ORDERED:
        place = tl.load(order + place, mask=there, other=0)
    mask = there[:, None] & inside[None, :]
    line = bcx + place.to(tl.int64) * x_stride
    at = line[:, None] + (CHANNELS + channel)[None, :]
    total *= tl.load(at, mask=mask, other=0.0).to(tl.float32)
    target = out + place.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)
    if tile == 0:
        tl.debug_barrier()  # the past has been read
        remember(
            bcx, order, own, first_row, count, remembered, channel, index, width, x_stride,
            CHANNELS, TAPS, ORDERED, True,
        )  # fmt: skip


def short_conv(
    bcx: Tensor,
    weight: Tensor,
    shape: ShortConvShape,
    states: DeviceLayerStates,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A short convolution of a layer's new tokens: see `reference.short_conv.short_conv`.

    bcx: float16 or bfloat16 [M, shape.width], whose rows may lie apart; they are those of the batch
    of `states.step`. out: [M, shape.channels], contiguous; rows of no token are 0 there. Raises
    OpError.
    """
    step, device, small = states.step, bcx.device, (torch.float32,)
    tokens, slots = len(step.positions), len(step.start)
    require("bcx", bcx, FLOATS, (tokens, shape.width), device, rows_apart=True)
    require("weight", weight, small, (shape.taps * shape.channels,), device)
    require("states", states.conv, small, (slots, *shape.conv_shape), device)
    if out is None:
        out = bcx.new_empty(tokens, shape.channels)
    require("out", out, (bcx.dtype,), (tokens, shape.channels), device)
    if not tokens or not step.max_rows:
        return out.zero_()
    kernel, parts, rows = _bound(shape, step.max_rows == 1, step.order is not None)
    kernel(
        (parts, cdiv(step.max_rows, rows), slots + 1), bcx, step.order, step.row_start, step.start,
        weight, states.conv, out, tokens, slots, bcx.stride(0),
    )  # fmt: skip
    return out


def short_conv_bytes(tokens: int, shape: ShortConvShape, dtype: torch.dtype) -> int:
    """Bytes of the result of `short_conv`, which allocates nothing else."""
    return tokens * shape.channels * dtype.itemsize


@cache
def _bound(shape: ShortConvShape, decodes: bool, ordered: bool) -> tuple[BoundKernel, int, int]:
    """The kernel, its programs of the channels of a token, and the tokens of a program."""
    constants, parts, rows = channel_tiles(shape, decodes, ordered)
    return BoundKernel(short_conv_kernel, **constants), parts, rows
