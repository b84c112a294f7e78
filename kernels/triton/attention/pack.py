"""Pieces of Triton kernels that load and pack the keys and values of one KV head.

A head's channels are handled as two tiles, the first and the second half, because a byte of a
packed block holds a channel of each: packing them needs no exchange between threads.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from qoff.kernels.layout.kv_format import CLIPPED

CLIPPED_2, CLIPPED_3 = tl.constexpr(CLIPPED[2]), tl.constexpr(CLIPPED[3])


@triton.jit
def load_half(rows, inside, FIRST: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr):
    """Channels FIRST..FIRST+HALF-1 of the heads that start at pointers rows [N]: [N, PADDED]."""
    channel = tl.arange(0, PADDED)[None, :]
    mask = inside[:, None] & (channel < HALF)
    return tl.load(rows[:, None] + FIRST + channel, mask=mask, other=0.0)


@triton.jit
def pack_channels(
    record,
    low,
    high,
    opening,
    first,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
):
    """Write 64 tokens with a scale and a minimum per channel: codes, scales, minima at `record`.

    `opening`: whether the first is the sequence's first, which is then kept to float16. first: the
    first channel of either half that low and high have.
    """
    low, high = low.to(tl.float32), high.to(tl.float32)
    channel = first + tl.arange(0, PADDED)
    params = (record + 64 * 2 * HALF * BITS // 8).to(tl.pointer_type(tl.float16)) + channel
    # One reduction for all four vectors: largest values and largest negated values of both halves.
    extremes = tl.join(tl.join(low, -low), tl.join(high, -high))
    most, least = tl.split(tl.max(extremes, axis=0).trans(0, 2, 1))  # [PADDED, half]
    low_most, high_most = tl.split(most)
    low_least, high_least = tl.split(-least)
    there = channel < HALF
    if BITS < 4:
        low_least, low_most = _clipped(low_least, low_most, BITS)
        high_least, high_most = _clipped(high_least, high_most, BITS)
        if opening:
            low_least = tl.minimum(low_least, _first(low))
            low_most = tl.maximum(low_most, _first(low))
            high_least = tl.minimum(high_least, _first(high))
            high_most = tl.maximum(high_most, _first(high))
    low_step = _step(low_least, low_most, BITS)
    high_step = _step(high_least, high_most, BITS)
    if opening:
        low_step, low_least = _anchored(_first(low), low_least, low_most, low_step, BITS)
        high_step, high_least = _anchored(_first(high), high_least, high_most, high_step, BITS)
    low_base, low_inverse = _parameters(params, low_step, low_least, there, 2 * HALF)
    high_base, high_inverse = _parameters(params + HALF, high_step, high_least, there, 2 * HALF)
    low = _levels(low, low_base[None, :], low_inverse[None, :], BITS)
    high = _levels(high, high_base[None, :], high_inverse[None, :], BITS)
    _store_codes(record, low, high, first, HALF, PADDED, BITS)


@triton.jit
def pack_tokens(
    record,
    low,
    high,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write 64 tokens with a scale and a minimum per token and part (half of the channels, or all).

    Codes, scales and minima lie at `record`.
    """
    low, high = low.to(tl.float32), high.to(tl.float32)
    token = tl.arange(0, 64)
    there = token >= 0
    within = (tl.arange(0, PADDED) < HALF)[None, :]
    params = (record + 64 * 2 * HALF * BITS // 8).to(tl.pointer_type(tl.float16)) + token
    low_min = tl.min(tl.where(within, low, float("inf")), axis=1)
    low_max = tl.max(tl.where(within, low, float("-inf")), axis=1)
    high_min = tl.min(tl.where(within, high, float("inf")), axis=1)
    high_max = tl.max(tl.where(within, high, float("-inf")), axis=1)
    if PARTS == 1:
        least, most = tl.minimum(low_min, high_min), tl.maximum(low_max, high_max)
        least, most = _clipped(least, most, BITS)
        low_base, low_inverse = _parameters(params, _step(least, most, BITS), least, there, 64)
        high_base, high_inverse = low_base, low_inverse
    else:
        low_min, low_max = _clipped(low_min, low_max, BITS)
        high_min, high_max = _clipped(high_min, high_max, BITS)
        low_step, high_step = _step(low_min, low_max, BITS), _step(high_min, high_max, BITS)
        low_base, low_inverse = _parameters(params, low_step, low_min, there, 128)
        high_base, high_inverse = _parameters(params + 64, high_step, high_min, there, 128)
    low = _levels(low, low_base[:, None], low_inverse[:, None], BITS)
    high = _levels(high, high_base[:, None], high_inverse[:, None], BITS)
    _store_codes(record, low, high, 0, HALF, PADDED, BITS)


@triton.jit
def _first(x):
    """The first token's row of [64, PADDED]."""
    return tl.sum(tl.where(tl.arange(0, 64)[:, None] == 0, x, 0.0), axis=0)


@triton.jit
def _clipped(least, most, BITS: tl.constexpr):
    """The range that levels cover: below 4 bits a part is left off at either end."""
    if BITS < 4:
        off = (most - least) * (CLIPPED_2 if BITS == 2 else CLIPPED_3)
        least += off
        most -= off
    return least, most


@triton.jit
def _step(least, most, BITS: tl.constexpr):
    """(most - least) / (2**BITS - 1), correctly rounded."""
    TOP: tl.constexpr = 2.0**BITS - 1.0
    span = most - least
    ratio = span * (1.0 / TOP)
    rest = tl.fma(ratio, -TOP, span)
    return tl.fma(rest, 1.0 / TOP, ratio)


@triton.jit
def _anchored(first, least, most, step, BITS: tl.constexpr):
    """Step and minimum with a level at `first`: see `reference.kv_blocks`."""
    TOP: tl.constexpr = 2.0**BITS - 1.0
    level = tl.where(step > 0.0, (first - least) / tl.where(step > 0.0, step, 1.0), 0.0)
    below = level < TOP / 2
    steps = tl.floor(tl.where(below, TOP - level, level) + 1.0 / 64)
    scale = tl.where(below, most - first, first - least) / steps
    under = tl.where(below, TOP - steps, steps)
    return scale, first - under * scale.to(tl.float16).to(tl.float32)


@triton.jit
def _parameters(params, step, least, mask, MINIMA: tl.constexpr):
    """Write scales to pointers `params` and minima MINIMA further; return minima and 1 / scales."""
    scale = step.to(tl.float16)
    minimum = least.to(tl.float16)
    tl.store(params, scale, mask=mask)
    tl.store(params + MINIMA, minimum, mask=mask)
    wide = scale.to(tl.float32)
    square = wide * wide  # exact; its root's inverse is cheaper than a division
    inverse = tl.where(wide > 0.0, tl.rsqrt(tl.where(wide > 0.0, square, 1.0)), 0.0)
    return minimum.to(tl.float32), inverse


@triton.jit
def _levels(values, base, inverse, BITS: tl.constexpr):
    """The nearest levels, in the lowest byte of int32: float32 above 2**23 rounds to integers."""
    ZERO: tl.constexpr = 8388608.0
    level = tl.fma(values - base, inverse + tl.zeros_like(values), ZERO + tl.zeros_like(values))
    level = tl.minimum(tl.maximum(level, ZERO), ZERO + 2.0**BITS - 1.0)
    return level.to(tl.int32, bitcast=True)


@triton.jit
def _store_codes(
    record, low, high, first, HALF: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Write codes in runs of 8 channels, the number that a thread has loaded."""
    token = tl.arange(0, 64)[:, None, None]
    channel = 8 * tl.arange(0, PADDED // 8)[:, None] + tl.arange(0, 8)[None, :]
    channel = (first + channel)[None, :, :]
    mask = (token >= 0) & (channel < HALF)
    if BITS == 4:
        both = tl.reshape((low | (high << 4)).to(tl.uint8), (64, PADDED // 8, 8))
        tl.store(record + token * HALF + channel, both, mask=mask)
    elif BITS < 4:
        # As many bits of tokens that are 32 or 16 apart become one byte.
        nibbles = ((low & 15) | ((high & 15) << 4)).to(tl.int32)
        row = tl.arange(0, 16)[:, None, None]
        rows = (row >= 0) & (channel < HALF)
        x = tl.reshape(nibbles, (4, 16, PADDED // 8, 8))
        index = tl.arange(0, 4)[:, None, None, None]
        first = tl.sum(tl.where(index % 2 == 0, (x & 0x33) << index // 2 * 2, 0), axis=0)
        second = tl.sum(tl.where(index % 2 == 1, (x & 0x33) << index // 2 * 2, 0), axis=0)
        tl.store(record + row * HALF + channel, first.to(tl.uint8), mask=rows)
        tl.store(record + (16 + row) * HALF + channel, second.to(tl.uint8), mask=rows)
        if BITS == 3:
            upper = tl.sum(((x >> 2) & 0x11) << index, axis=0)
            tl.store(record + (32 + row) * HALF + channel, upper.to(tl.uint8), mask=rows)
    else:
        target = record + token * (2 * HALF) + channel
        tl.store(target, tl.reshape(low.to(tl.uint8), (64, PADDED // 8, 8)), mask=mask)
        tl.store(target + HALF, tl.reshape(high.to(tl.uint8), (64, PADDED // 8, 8)), mask=mask)
