"""Attention of a few query rows over one block of the packed KV cache, in one thread.

Queries, with K's scales folded in, become 16-bit integers (two int8 planes); probabilities, with
V's scales folded in, become 8-bit ones, relative to the largest of the block; the dot products are
exact in int32. What rounding a probability takes from or adds to the mean value code is given back.
What a row has seen so far is a running maximum, a sum, and an output that is relative to that
maximum (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

import numpy as np

from . import packed_emit as emit
from . import simd
from .compiled import inner
from .soft_cap import capped

TOKENS = 64
ROWS = 16  # rows of one call: what is kept per row fills one vector
_LIMIT = np.float32(32512.0)  # 127 * 256: both int8 planes stay in range
_SMALLEST = np.float32(1e-30)
_LOWEST = np.float32(-1e30)  # of a score

# A thread's scratch, in bytes from its start.
QUERY = 0  # int8 [ROWS, 2, up to 256]
SCORES = QUERY + ROWS * 512  # float32 [ROWS, 64]
WEIGHTS = SCORES + ROWS * 4 * TOKENS  # uint8 [2 parts, ROWS, 64]
SUMS = WEIGHTS + 2 * ROWS * TOKENS  # float32 [emit.ROWS, 64]
FACTORS = SUMS + emit.ROWS * 4 * TOKENS  # float32 [8, ROWS], in the order below
SCRATCH = FACTORS + 8 * 4 * ROWS

# Of each row: scale and offset of the scores, their maximum, the correction of the output so far,
# and for each part the scale and the offset of the weighed values.
SCALE, OFFSET, PEAK, CORRECTION, PART = (64 * i for i in range(5))


@inner
def chunk_count(half):
    """Chunks of 64 lanes that the channels of V take."""
    return 1 if half == 32 else 2 * ((half + 63) // 64)


@inner
def kind_of(half, bits):
    if bits == 8:
        return emit.WHOLE
    return emit.NARROW if half == 32 else emit.NIBBLES


@inner
def plane_bytes(half, kind):
    """Bytes of one plane of a query: its channels, padded to whole chunks."""
    if kind == emit.NIBBLES:
        return 128 * ((half + 63) // 64)
    return 64 * ((half + 31) // 32)


@inner
def _spread_halves(plane, half):
    """Move channels half.. to the next multiple of 64 and zero the channels between."""
    padded = (half + 63) // 64 * 64
    for i in range(half - 8, -8, -8):
        simd.poke_i64(plane + padded + i, simd.peek_i64(plane + half + i))
    for i in range(half, padded, 8):
        simd.poke_i64(plane + i, 0)
        simd.poke_i64(plane + padded + i, 0)


@inner
def _fold_query(query, scale, minimum, half, kind, plane, high):
    """query [dim] times K's scales (float16 [dim]) as planes; returns scale, query . minimum."""
    dim = 2 * half
    largest = simd.splat_f32(np.float32(0.0))
    offset = simd.splat_f32(np.float32(0.0))
    for i in range(0, dim, 16):
        q = simd.load_f32(query + 4 * i)
        folded = simd.mul(q, simd.load_f16(scale + 2 * i))
        largest = simd.maximum(simd.absolute(folded), largest)
        offset = simd.mul_add(q, simd.load_f16(minimum + 2 * i), offset)
    peak = simd.max_f32(largest)
    inverse = simd.splat_f32(_LIMIT / peak if peak > _SMALLEST else np.float32(0.0))
    for i in range(0, dim, 16):
        folded = simd.mul(simd.load_f32(query + 4 * i), simd.load_f16(scale + 2 * i))
        q = simd.round_i32(simd.mul(folded, inverse))
        simd.store_high_low(high + i, high + plane + i, q)
    if kind == emit.NIBBLES and half % 64 != 0:
        _spread_halves(high, half)
        _spread_halves(high + plane, half)
    elif kind == emit.WHOLE:
        for i in range(dim, plane, 8):
            simd.poke_i64(high + i, 0)
            simd.poke_i64(high + plane + i, 0)
    return peak / _LIMIT, simd.sum_f32(offset)


@inner
def _score_rows(codes, rows, half, kind, plane, ahead, scratch):
    row = 0
    while row < rows:
        count = min(rows - row, emit.ROWS)
        query, out = scratch + QUERY + 2 * plane * row, scratch + SCORES + 256 * row
        if kind == emit.NARROW:
            for token in (0, 32):
                emit.block_scores(kind, count, codes + 32 * token, 64, ahead, 1, query, plane,
                                  out + 4 * token, 256)  # fmt: skip
        else:
            stride = 2 * half if kind == emit.WHOLE else half
            chunks = (stride + 63) // 64
            for token in range(0, 64, 16):
                emit.block_scores(kind, count, codes + stride * token, stride, ahead, chunks,
                                  query, plane, out + 4 * token, 256)  # fmt: skip
        row += count


@inner
def _finish_scores(rows, firsts, soft_cap, scratch, maxima):
    """Scale and cap the scores, take their maxima, find the correction of what was summed before.

    soft_cap: 0 for none.
    """
    factors = scratch + FACTORS
    simd.store_f32(factors + PEAK, simd.splat_f32(np.float32(-np.inf)))
    for row in range(rows):
        scores = scratch + SCORES + 256 * row
        scale = simd.splat_f32(simd.peek_f32(factors + SCALE + 4 * row))
        offset = simd.splat_f32(simd.peek_f32(factors + OFFSET + 4 * row))
        a = simd.mul_add(simd.load_f32(scores), scale, offset)
        b = simd.mul_add(simd.load_f32(scores + 64), scale, offset)
        c = simd.mul_add(simd.load_f32(scores + 128), scale, offset)
        d = simd.mul_add(simd.load_f32(scores + 192), scale, offset)
        if soft_cap != np.float32(0.0):
            a, b = capped(a, soft_cap), capped(b, soft_cap)
            c, d = capped(c, soft_cap), capped(d, soft_cap)
        simd.store_f32(scores, a)
        simd.store_f32(scores + 64, b)
        simd.store_f32(scores + 128, c)
        simd.store_f32(scores + 192, d)
        first = simd.peek_i64(firsts + 8 * row)
        if first > 0:
            for i in range(0, 4 * min(first, TOKENS), 4):
                simd.poke_f32(scores + i, np.float32(-np.inf))
            a, b = simd.load_f32(scores), simd.load_f32(scores + 64)
            c, d = simd.load_f32(scores + 128), simd.load_f32(scores + 192)
        top = simd.max_f32(simd.maximum(simd.maximum(a, b), simd.maximum(c, d)))
        simd.poke_f32(factors + PEAK + 4 * row, top)
    before = simd.load_f32(maxima)
    # Finite, so that a row that has seen nothing yet has a difference to it.
    peaks = simd.maximum(simd.load_f32(factors + PEAK), simd.splat_f32(_LOWEST))
    peaks = simd.maximum(peaks, before)
    minus = simd.mul(peaks, simd.splat_f32(np.float32(-1.0)))
    simd.store_f32(factors + CORRECTION, simd.exp(simd.add(before, minus)))
    simd.store_f32(maxima, peaks)


@inner
def _quantize_weights(weights, scale, minimum, bits, out):
    """64 probabilities times V's scales (float16) as uint8; returns their scale and the offset.

    The offset is weights . minimum, plus what 8-bit codes were lessened by, plus 7.5 times what
    rounding took (4-bit codes are 7.5 in the mean, lessened 8-bit ones about 0).
    """
    largest = simd.splat_f32(np.float32(0.0))
    for i in range(0, 64, 16):
        folded = simd.mul(simd.load_f32(weights + 4 * i), simd.load_f16(scale + 2 * i))
        largest = simd.maximum(folded, largest)
    peak = simd.max_f32(largest)
    step = peak / np.float32(255.0)
    inverse = simd.splat_f32(np.float32(255.0) / peak if peak > _SMALLEST else np.float32(0.0))
    back = simd.splat_f32(-step)
    middle = simd.splat_f32(np.float32(7.5 if bits == 4 else 0.0))
    shift = simd.splat_f32(np.float32(0.0 if bits == 4 else 128.0))
    offset = simd.splat_f32(np.float32(0.0))
    for i in range(0, 64, 16):
        weight = simd.load_f32(weights + 4 * i)
        folded = simd.mul(weight, simd.load_f16(scale + 2 * i))
        rounded = simd.round_i32(simd.mul(folded, inverse))
        simd.store_i8(out + i, rounded)
        lost = simd.mul_add(simd.to_f32(rounded), back, folded)
        offset = simd.mul_add(weight, simd.load_f16(minimum + 2 * i), offset)
        offset = simd.mul_add(lost, middle, simd.mul_add(folded, shift, offset))
    return step, simd.sum_f32(offset)


@inner
def _weigh_rows(rows, parts, v_scale, bits, scratch, maxima, sums):
    """Scores to probabilities and to integer weights of the values."""
    factors = scratch + FACTORS
    for row in range(rows):
        scores = scratch + SCORES + 256 * row
        minus_peak = simd.splat_f32(-simd.peek_f32(maxima + 4 * row))
        total = simd.splat_f32(np.float32(0.0))
        for i in range(0, 256, 64):
            p = simd.exp(simd.add(simd.load_f32(scores + i), minus_peak))
            simd.store_f32(scores + i, p)
            total = simd.add(total, p)
        before = simd.peek_f32(sums + 4 * row) * simd.peek_f32(factors + CORRECTION + 4 * row)
        simd.poke_f32(sums + 4 * row, before + simd.sum_f32(total))
        for part in range(parts):
            scale = v_scale + 2 * TOKENS * part
            step, offset = _quantize_weights(
                scores, scale, scale + 2 * TOKENS * parts, bits,
                scratch + WEIGHTS + (part * ROWS + row) * TOKENS,
            )  # fmt: skip
            at = factors + PART + 128 * part + 4 * row
            simd.poke_f32(at, step)
            simd.poke_f32(at + 64, offset)


@inner
def _sum_values(codes, rows, half, kind, ahead, scratch, out):
    """Add the weighed values of a block to the outputs [rows, chunks, 64 lanes]."""
    chunks = chunk_count(half)
    stride = 2 * half if kind == emit.WHOLE else half
    for chunk in range(chunks):
        upper = 1 if chunks > 1 and chunk >= chunks // 2 else 0
        column = 64 * (chunk - upper * (chunks // 2))
        if kind == emit.WHOLE and upper:
            column += half
        row = 0
        while row < rows:
            count = min(rows - row, emit.ROWS)
            weights = scratch + WEIGHTS + (upper * ROWS + row) * TOKENS
            emit.block_weigh(kind, upper, count, codes + column, stride, ahead, weights, TOKENS,
                             scratch + SUMS)  # fmt: skip
            for r in range(count):
                at = scratch + FACTORS + 4 * (row + r)
                correction = simd.splat_f32(simd.peek_f32(at + CORRECTION))
                step = simd.splat_f32(simd.peek_f32(at + PART + 128 * upper))
                offset = simd.splat_f32(simd.peek_f32(at + PART + 128 * upper + 64))
                to = out + 256 * ((row + r) * chunks + chunk)
                for i in range(0, 256, 64):
                    weighed = simd.load_f32(scratch + SUMS + 256 * r + i)
                    weighed = simd.mul_add(weighed, step, offset)
                    value = simd.mul_add(simd.load_f32(to + i), correction, weighed)
                    simd.store_f32(to + i, value)
            row += count


@inner
def attend_block(
    record, ahead, queries, stride, heads, rows, scale, soft_cap, half, k_bits, v_bits, firsts,
    maxima, sums, out, scratch,
):  # fmt: skip
    """Add a block, K per channel, to the running attention of up to ROWS rows of one KV head.

    record: the block's address; ahead: bytes from there to the block that is read next. queries:
    float32, `heads` of dim together, then those of the next token `stride` bytes on. scale: of the
    scores. soft_cap: of scaled scores, 0 for none. firsts: int64 [rows], tokens of the block before
    it are not attended. maxima, sums: float32 [ROWS]. out: float32 [rows, chunks, 64], lanes in
    `packed_emit.channel_order`.
    """
    dim = 2 * half
    parts = 1 if half == 32 else 2
    kind = kind_of(half, k_bits)
    plane = plane_bytes(half, kind)
    k_scale = record + TOKENS * dim * k_bits // 8
    v_codes = k_scale + 4 * dim
    v_scale = v_codes + TOKENS * dim * v_bits // 8
    # The codes of what is read next are asked for as those of this block are read.
    for i in range(0, 4 * dim, 64):
        simd.prefetch(k_scale + ahead + i)
    for i in range(0, 4 * TOKENS * parts, 64):
        simd.prefetch(v_scale + ahead + i)
    for row in range(rows):
        step, offset = _fold_query(
            queries + row // heads * stride + 4 * dim * (row % heads), k_scale, k_scale + 2 * dim,
            half, kind, plane, scratch + QUERY + 2 * plane * row,
        )  # fmt: skip
        simd.poke_f32(scratch + FACTORS + SCALE + 4 * row, step * scale)
        simd.poke_f32(scratch + FACTORS + OFFSET + 4 * row, offset * scale)
    _score_rows(record, rows, half, kind, plane, ahead, scratch)
    _finish_scores(rows, firsts, soft_cap, scratch, maxima)
    _weigh_rows(rows, parts, v_scale, v_bits, scratch, maxima, sums)
    _sum_values(v_codes, rows, half, kind_of(half, v_bits), ahead, scratch, out)
