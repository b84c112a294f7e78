"""The convolutions of recurrent layers on a GPU, and what of them the next pass needs.

`convolve` does those before linear attention: rows come in the order of the batch and leave in the
order of the slots. Queries and keys leave with the length that the recurrence wants.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.delta import L2_EPS, DeltaShape, DeltaWeights
from qoff.kernels.layout.mamba import MambaShape
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import DeviceLayerStates
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

EPS = tl.constexpr(L2_EPS)
_WIDTH = 128  # channels of a program, where they are not those of a head
_ROWS = 16  # tokens of a tile, in passes of more than one a sequence


@triton.jit
def _inputs(x, order, place, there, channel, inside, x_stride, ORDERED: tl.constexpr,
            CHANNELS: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """What is convolved of some channels of rows, float32 [rows, channels]; GATED: b * x."""
    if ORDERED:
        place = tl.load(order + place, mask=there, other=0)
    line = x + place.to(tl.int64) * x_stride
    mask = there[:, None] & inside[None, :]
    value = tl.load(line[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    if GATED:
        other = line[:, None] + (2 * CHANNELS + channel)[None, :]
        value *= tl.load(other, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def convolved(
    x, order, own, weight, first_row, row, count, remembered, channel, inside, x_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    ORDERED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Some channels of some tokens of a sequence, [ROWS, WIDTH]; own: its past in them."""
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for tap in tl.static_range(TAPS):
        at = row - (TAPS - 1) + tap
        new = (at >= 0) & (row < count)
        value = _inputs(
            x, order, first_row + at, new, channel, inside, x_stride, ORDERED, CHANNELS, GATED
        )
        old = (at < 0) & (row < tl.where(remembered > 0, count, 0))
        before = own[None, :] + ((at + TAPS - 1) * CHANNELS)[:, None]
        value += tl.load(before, mask=old[:, None] & inside[None, :], other=0.0)
        by = tl.load(weight + tap * CHANNELS + channel, mask=inside, other=0.0)
        total += value * by[None, :]
    return total


@triton.jit
def remember(
    x, order, own, first_row, count, remembered, channel, index, width, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, ORDERED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Write the past of some channels as it is after the new tokens; it has been read."""
    for i in tl.static_range(TAPS - 1):
        kept = count - (TAPS - 1) + i
        newer = first_row + kept
        if ORDERED:
            newer = tl.load(order + tl.maximum(newer, 0))
        source = x + newer.to(tl.int64) * x_stride + channel
        mine = index < tl.where(kept >= 0, width, 0)
        number = tl.load(source, mask=mine, other=0.0).to(tl.float32)
        if GATED:
            number *= tl.load(source + 2 * CHANNELS, mask=mine, other=0.0).to(tl.float32)
        mine = index < tl.where((kept < 0) & (remembered > 0), width, 0)
        number += tl.load(own + (kept + TAPS - 1) * CHANNELS, mask=mine, other=0.0)
        tl.store(own + i * CHANNELS, number, mask=index < width)


@triton.jit
def delta_convolve_kernel(
    x,  # [M, CHANNELS], rows x_stride apart
    order,  # [M], or not read
    row_start, start, weight,
    past,  # [S, TAPS - 1, CHANNELS]
    out,  # [M, CHANNELS]
    x_stride,
    scale,  # of queries
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Some tokens of a sequence, the channels of one head of queries, of keys or of values.

    The first tile of a sequence alone reads its past, and then writes it.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    count = tl.load(row_start + s + 1) - first_row
    if tile * ROWS >= count:
        return
    remembered = tl.load(start + s)
    is_key = head < 2 * KEY_HEADS
    width = tl.where(is_key, KEY_DIM, VALUE_DIM)
    begin = head * width + tl.where(is_key, 0, 2 * KEY_HEADS * (KEY_DIM - VALUE_DIM))
    index = tl.arange(0, WIDTH)
    inside = index < width
    channel = begin + index
    own = past + s.to(tl.int64) * ((TAPS - 1) * CHANNELS) + channel
    row = tile * ROWS + tl.arange(0, ROWS)
    total = convolved(
        x, order, own, weight, first_row, row, count, remembered, channel, inside, x_stride,
        CHANNELS, WIDTH, TAPS, ROWS, ORDERED, False,
    )  # fmt: skip
    total = total / (1.0 + tl.exp(-total))
    inverse = tl.rsqrt(tl.sum(total * total, axis=1) + EPS)
    inverse = tl.where(head < KEY_HEADS, inverse * scale, inverse)
    inverse = tl.where(is_key, inverse, 1.0)
    total *= inverse[:, None]
    target = out + (first_row + row).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    mask = (row < count)[:, None] & inside[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)
    if tile == 0:
        tl.debug_barrier()  # the past has been read
        remember(
            x, order, own, first_row, count, remembered, channel, index, width, x_stride,
            CHANNELS, TAPS, ORDERED, False,
        )  # fmt: skip


def convolve(
    x: Tensor, weights: DeltaWeights, shape: DeltaShape, states: DeviceLayerStates
) -> Tensor:
    """Convolved queries, keys and values, [M, shape.channels] in the order of the slots.

    x: [M, shape.channels or more], whose rows may lie apart. Queries and keys have length 1,
    queries times the root of 1 / key_dim. `states.conv` is what it is after these tokens.
    """
    step = states.step
    out = x.new_empty(len(x), shape.channels)
    kernel, rows = _bound(shape, step.max_rows == 1, step.order is not None)
    grid = (2 * shape.key_heads + shape.value_heads, cdiv(step.max_rows, rows), len(step.start))
    kernel(
        grid, x, step.order, step.row_start, step.start, weights.conv, states.conv, out,
        x.stride(0), shape.key_dim**-0.5,
    )  # fmt: skip
    return out


def tile_rows(decodes: bool, taps: int) -> int:
    """Tokens of a program: the first one of a sequence has all that its past is read by."""
    return 1 if decodes else max(_ROWS, next_power_of_2(taps - 1))


def channel_tiles(
    shape: ShortConvShape | MambaShape, decodes: bool, ordered: bool
) -> tuple[dict[str, Any], int, int]:
    """For kernels whose programs have some channels of some tokens, whichever these are.

    Their constants, programs of the channels of a token, and tokens of a program.
    """
    rows = tile_rows(decodes, shape.taps)
    width = min(_WIDTH, next_power_of_2(shape.channels))
    constants = {
        "CHANNELS": shape.channels,
        "WIDTH": width,
        "TAPS": shape.taps,
        "ROWS": rows,
        "ORDERED": ordered,
        "num_warps": 1 if decodes else 4,
        "num_stages": 1,
    }
    return constants, cdiv(shape.channels, width), rows


@cache
def _bound(shape: DeltaShape, decodes: bool, ordered: bool) -> tuple[BoundKernel, int]:
    """The kernel, and the tokens of a tile."""
    rows = tile_rows(decodes, shape.taps)
    width = next_power_of_2(max(shape.key_dim, shape.value_dim))
    kernel = BoundKernel(
        delta_convolve_kernel,
        KEY_HEADS=shape.key_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        CHANNELS=shape.channels,
        WIDTH=width,
        TAPS=shape.taps,
        ROWS=rows,
        ORDERED=ordered,
        num_warps=1 if decodes else 4,
        num_stages=1,
    )
    return kernel, rows
