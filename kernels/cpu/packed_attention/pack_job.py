"""The compiled jobs that pack complete blocks, and move tokens that are left unpacked."""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner, job
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.operands import int64s, offsets
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, CLIPPED

from . import scratch as sizes
from .narrow import from_nibbles
from .pack_emit import (
    anchor,
    divisor,
    highest,
    joined,
    levels,
    lower,
    lowest,
    moved,
    step_of,
    store_f16,
    transpose_bytes,
    upper,
)

_VECTORS = BLOCK_TOKENS // 16  # of keys, in a block
_CLIPPED_2, _CLIPPED_3 = CLIPPED[2], CLIPPED[3]


class PackArguments(ctypes.Structure):
    """Addresses, sizes in elements; of records, in bytes."""

    _fields_ = int64s(
        "keys", "values", "capacity", "kv_heads", "dim", "k_bits", "v_bits", "parts", "signs",
        "run", "k_scale", "v_codes", "v_scale", "pool", "block_bytes", "record", "origins", "count",
        "scratch", "latent",
    )  # fmt: skip
    OF_LAYER = ("keys", "values", "pool")


(KEYS, VALUES, CAPACITY, KV_HEADS, DIM, K_BITS, V_BITS, PARTS, SIGNS, RUN, K_SCALE, V_CODES,
 V_SCALE, POOL, BLOCK_BYTES, RECORD, ORIGINS, COUNT, SCRATCH, LATENT) = (
    offsets(PackArguments)
)  # fmt: skip


class MoveArguments(ctypes.Structure):
    """Addresses, sizes in elements."""

    _fields_ = int64s(
        "from_keys", "from_values", "from_capacity", "to_keys", "to_values", "to_capacity",
        "heads", "channels", "value_channels", "moves", "move_count",
    )  # fmt: skip
    OF_LAYER = ("from_keys", "from_values", "to_keys", "to_values")


(FROM_KEYS, FROM_VALUES, FROM_CAPACITY, TO_KEYS, TO_VALUES, TO_CAPACITY, HEADS, CHANNELS,
 VALUE_CHANNELS, MOVES, MOVE_COUNT) = offsets(MoveArguments)  # fmt: skip


_packing_bytes = inner(sizes.packing_bytes)


@inlined
def _top(bits):
    return np.float32((1 << bits) - 1)


@inlined
def _clipped(bits):
    return np.float32(_CLIPPED_2 if bits == 2 else _CLIPPED_3 if bits == 3 else 0.0)


@inlined
def _fields(at, count, bits, opening, lows, highs, firsts, nbytes):
    """Store scales at `at`, minima behind them; leave divisors in `highs`, minima in `lows`."""
    top, off = _top(bits), _clipped(bits)
    for i in range(0, 4 * count, 64):
        low, high = simd.load_f32(lows + i), simd.load_f32(highs + i)
        if bits < 4:
            low, high = moved(low, low, high, off), moved(high, low, high, -off)
            if opening != 0:
                first = simd.load_f32(firsts + i)
                low, high = lower(low, first), upper(high, first)
        scale = step_of(low, high, top)
        if opening != 0:
            anchor(highs + i, lows + i, simd.load_f32(firsts + i), low, high, scale, top)
            scale, low = simd.load_f32(highs + i), simd.load_f32(lows + i)
        simd.store_f32(highs + i, divisor(store_f16(at + i // 2, scale)))
        simd.store_f32(lows + i, store_f16(at + nbytes + i // 2, low))


@inlined
def _levels(x, lows, highs, place, top):
    """Levels of 16 numbers at an address that share scale and minimum, those of a place."""
    low, by = simd.peek_f32(lows + 4 * place), simd.peek_f32(highs + 4 * place)
    return levels(simd.load_f32(x), simd.splat_f32(low), simd.splat_f32(by), top)


@inner
def _pack_keys(keys, dim, bits, opening, codes, fields, nibbles, scratch):
    """K of a block, 16 tokens in a vector, [4, dim, 16]: scales and minima of channels."""
    to = codes if bits >= 4 else nibbles
    square, lows = scratch, scratch + 256
    highs, firsts = lows + 4 * dim, lows + 8 * dim
    stride, top = 64 * dim, _top(bits)
    for channel in range(dim):
        x = keys + 64 * channel
        low = high = simd.load_f32(x)
        for i in range(1, _VECTORS):
            v = simd.load_f32(x + i * stride)
            low, high = lower(low, v), upper(high, v)
        simd.poke_f32(lows + 4 * channel, lowest(low))
        simd.poke_f32(highs + 4 * channel, highest(high))
        simd.poke_f32(firsts + 4 * channel, simd.peek_f32(x))
    _fields(fields, dim, bits, opening, lows, highs, firsts, 2 * dim)
    width = dim if bits == 8 else dim // 2
    for vector in range(_VECTORS):
        x = keys + vector * stride
        for start in range(0, width, 16):
            first = min(start, width - 16)  # the last 16 may be some of those before
            for channel in range(first, first + 16):
                found = _levels(x + 64 * channel, lows, highs, channel, top)
                if bits <= 4:
                    other = channel + width
                    more = _levels(x + 64 * other, lows, highs, other, top)
                    found = joined(found, more)
                simd.store_i8(square + 16 * (channel - first), found)
            transpose_bytes(square, to + 16 * vector * width + first, width)
    if bits < 4:
        from_nibbles(nibbles, 8 * dim, bits, codes)


@inlined
def _channels(x, count, kind):
    """The lowest or (kind 1) highest of channels at an address."""
    found = simd.load_f32(x)
    for start in range(16, count, 16):
        v = simd.load_f32(x + 4 * min(start, count - 16))
        found = upper(found, v) if kind == 1 else lower(found, v)
    return highest(found) if kind == 1 else lowest(found)


@inner
def _times(x, matrix, run, to):
    """Numbers at x times a matrix [run, run]; sums in order, as torch's product has them."""
    for column in range(0, 4 * run, 64):
        total = simd.splat_f32(np.float32(0.0))
        for i in range(run):
            row = simd.load_f32(matrix + 4 * run * i + column)
            total = simd.mul_add(simd.splat_f32(simd.peek_f32(x + 4 * i)), row, total)
        simd.store_f32(to + column, total)


@inner
def _pack_values(values, dim, bits, parts, signs, run, codes, fields, nibbles, scratch):
    """V of a block, [64, dim]: scales and minima of each token's parts."""
    rows = codes if bits >= 4 else nibbles
    lows = scratch + 256
    highs = lows + 4 * parts * BLOCK_TOKENS
    if signs != 0:
        copy = highs + 4 * parts * BLOCK_TOKENS
        for i in range(0, 4 * BLOCK_TOKENS * dim, 4 * run):
            _times(values + i, signs, run, copy + i)
        values = copy
    part, half, top = dim // parts, dim // 2, _top(bits)
    for token in range(BLOCK_TOKENS):
        for i in range(parts):
            x, place = values + 4 * (token * dim + i * part), 4 * (i * BLOCK_TOKENS + token)
            simd.poke_f32(lows + place, _channels(x, part, 0))
            simd.poke_f32(highs + place, _channels(x, part, 1))
    count = parts * BLOCK_TOKENS
    _fields(fields, count, bits, 0, lows, highs, 0, 2 * count)
    for token in range(BLOCK_TOKENS):
        x, to = values + 4 * token * dim, rows + token * (dim if bits == 8 else half)
        upper_place = (parts - 1) * BLOCK_TOKENS + token
        for start in range(0, half, 16):
            first = min(start, half - 16)
            found = _levels(x + 4 * first, lows, highs, token, top)
            more = _levels(x + 4 * (half + first), lows, highs, upper_place, top)
            if bits <= 4:
                simd.store_i8(to + first, joined(found, more))
            else:
                simd.store_i8(to + first, found)
                simd.store_i8(to + half + first, more)
    if bits < 4:
        from_nibbles(nibbles, 8 * dim, bits, codes)


@job
def pack_job(pool, thread, threads, args):
    """All heads of all blocks."""
    heads, dim = simd.peek_i64(args + KV_HEADS), simd.peek_i64(args + DIM)
    nibbles = simd.peek_i64(args + SCRATCH) + thread * _packing_bytes(dim)
    scratch = nibbles + BLOCK_TOKENS * dim // 2
    items = simd.peek_i64(args + COUNT) * heads
    item = take(pool, 0)
    while item < items:
        origin, head = simd.peek_i64(args + ORIGINS) + 32 * (item // heads), item % heads
        row = simd.peek_i64(origin) * heads + head
        first = 4 * dim * (row * simd.peek_i64(args + CAPACITY) + simd.peek_i64(origin + 8))
        latent = simd.peek_i64(args + LATENT)
        record = simd.peek_i64(args + POOL) + head * simd.peek_i64(args + RECORD)
        record += simd.peek_i64(origin + 24) * simd.peek_i64(args + BLOCK_BYTES)
        _pack_keys(
            simd.peek_i64(args + KEYS) + first, dim, simd.peek_i64(args + K_BITS),
            simd.peek_i64(origin + 16), record, record + simd.peek_i64(args + K_SCALE), nibbles,
            scratch,
        )  # fmt: skip
        if latent == 0:
            _pack_values(
                simd.peek_i64(args + VALUES) + first, dim, simd.peek_i64(args + V_BITS),
                simd.peek_i64(args + PARTS), simd.peek_i64(args + SIGNS),
                simd.peek_i64(args + RUN), record + simd.peek_i64(args + V_CODES),
                record + simd.peek_i64(args + V_SCALE), nibbles, scratch,
            )  # fmt: skip
        item = take(pool, 0)


@inlined
def _copy(source, to, nbytes):
    """Copy whole vectors, the first first: `to` may begin before `source`, and overlap."""
    for i in range(0, nbytes, 64):
        simd.store_f32(to + i, simd.load_f32(source + i))


@job
def move_job(pool, thread, threads, args):
    """All heads of all moves."""
    heads, dim = simd.peek_i64(args + HEADS), simd.peek_i64(args + CHANNELS)
    items = simd.peek_i64(args + MOVE_COUNT) * heads
    item = take(pool, 0)
    while item < items:
        move, head = simd.peek_i64(args + MOVES) + 40 * (item // heads), item % heads
        row = simd.peek_i64(move) * heads + head
        to_row = simd.peek_i64(move + 24) * heads + head
        first = row * simd.peek_i64(args + FROM_CAPACITY) + simd.peek_i64(move + 8)
        to = to_row * simd.peek_i64(args + TO_CAPACITY) + simd.peek_i64(move + 32)
        first, to, tokens = 4 * first, 4 * to, simd.peek_i64(move + 16)
        keys, to_keys = simd.peek_i64(args + FROM_KEYS), simd.peek_i64(args + TO_KEYS)
        _copy(keys + dim * first, to_keys + dim * to, 64 * dim * ((tokens + 15) // 16))
        values, to_values = simd.peek_i64(args + FROM_VALUES), simd.peek_i64(args + TO_VALUES)
        width = simd.peek_i64(args + VALUE_CHANNELS)
        _copy(values + width * first, to_values + width * to, 4 * width * tokens)
        item = take(pool, 0)
