"""Attention of a few query rows over one block of the packed KV cache, in one thread, in steps.

Queries, with K's scales folded in, become 16-bit integers (two int8 planes); probabilities, with
V's scales folded in, become 8-bit ones, relative to the largest of the block; the dot products are
exact in int32. Codes of 2 and 3 bits are made codes of 4 in the scratch. What rounding a
probability takes from or adds to the mean value code is given back. What a row has seen so far is a
running maximum, a sum, and an output that is relative to that maximum (Milakov and Gimelshein,
2018); scores and maxima are exponents of two.

Latent values are K's codes again. Probabilities as they are weigh these, and what a block sums up
to is then multiplied by K's scales, channel by channel.
"""

from __future__ import annotations

import numpy as np
from numba import types

from qoff.kernels.cpu.attention.soft_cap import capped
from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, outlined
from qoff.kernels.cpu.jit.powers import log2_above
from qoff.kernels.layout.kv_format import LATENT_DIM

from . import block_emit as emit
from . import scratch as sizes
from .fold import OFFSET, SCALE, fold_queries
from .narrow import to_nibbles
from .scratch import (
    BOUND,
    FACTORS,
    K_CODES,
    KEYS,
    LANES,
    LARGEST,
    PART_BYTES,
    QUERY,
    SCORES,
    TOGETHER,
    TOKENS,
    V_CODES,
    VALUES,
    WEIGHTS,
)
from .softmax import CORRECTION, SHIFT, STEP, find_weights

_I64, _F32 = types.int64, types.float32
LN_2 = np.float32(np.log(2.0))
LOG2_E = np.float32(1 / np.log(2.0))

chunk_count = inner(sizes.chunk_count)


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
def _widen_values(v_scale, parts, v_bits, scratch):
    """What probabilities are multiplied by, in float32."""
    # Weights count a code of V from its middle: what rounding them takes weighs least there.
    middle = simd.splat_f32(np.float32(_middle(v_bits)))
    v_minimum = v_scale + 2 * TOKENS * parts
    bounds = scratch + VALUES + BOUND
    for i in range(0, 4 * TOKENS, 64):
        simd.store_f32(bounds + i, simd.splat_f32(np.float32(0.0)))
    for part in range(parts):
        largest = simd.splat_f32(np.float32(0.0))
        for i in range(0, 2 * TOKENS, 32):
            largest = simd.maximum(simd.load_f16(v_scale + 2 * TOKENS * part + i), largest)
        peak = simd.max_f32(largest)
        simd.store_f32(scratch + VALUES + LARGEST + 64 * part, simd.splat_f32(peak))
        inverse = np.float32(1.0) / peak if peak > np.float32(0.0) else np.float32(0.0)
        by = simd.splat_f32(inverse)
        for i in range(0, TOKENS, 16):
            at = 2 * (TOKENS * part + i)
            scale, minimum = simd.load_f16(v_scale + at), simd.load_f16(v_minimum + at)
            to = scratch + VALUES + PART_BYTES * part + 4 * i
            simd.store_f32(to, simd.mul(scale, by))
            simd.store_f32(to + 4 * TOKENS, simd.mul_add(scale, middle, minimum))
            bound = simd.maximum(simd.mul(scale, by), simd.load_f32(bounds + 4 * i))
            simd.store_f32(bounds + 4 * i, bound)
    for i in range(0, 4 * TOKENS, 64):
        simd.store_f32(bounds + i, log2_above(simd.load_f32(bounds + i)))


@inner
def _latent_values(bits, scratch):
    """What weighs latent values: probabilities alone for the codes, and their sum as SHIFT 1."""
    values = scratch + VALUES
    for i in range(0, 4 * TOKENS, 64):
        simd.store_f32(values + i, simd.splat_f32(np.float32(1.0)))
        simd.store_f32(values + 4 * TOKENS + i, simd.splat_f32(np.float32(_middle(bits))))
        simd.store_f32(values + PART_BYTES + i, simd.splat_f32(np.float32(0.0)))
        simd.store_f32(values + PART_BYTES + 4 * TOKENS + i, simd.splat_f32(np.float32(1.0)))
        simd.store_f32(values + BOUND + i, log2_above(simd.splat_f32(np.float32(1.0))))
    simd.store_f32(values + LARGEST, simd.splat_f32(np.float32(1.0)))
    simd.store_f32(values + LARGEST + 64, simd.splat_f32(np.float32(0.0)))


@inner
def _latent_lanes(k_scale, half, bits, scratch):
    """Put K's scales and minima into the lanes of the output."""
    four = scratch + LANES + 8 * LATENT_DIM
    for field in range(2):
        lanes = scratch + LANES + 4 * LATENT_DIM * field
        for channel in range(0, 2 * half, 16):
            simd.store_f32(four, simd.load_f16(k_scale + 4 * half * field + 2 * channel))
            for i in range(0, 16, 4):
                to = lanes + 4 * lane_of(channel + i, half, bits)
                simd.poke_i64(to, simd.peek_i64(four + 4 * i))
                simd.poke_i64(to + 8, simd.peek_i64(four + 4 * i + 8))


@inner
def _middle(bits):
    """The mean of codes; what 8-bit ones are lessened by."""
    return 128.0 if bits == 8 else ((1 << bits) - 1) / 2


@inner
def _pad_planes(rows, half, kind, plane, scratch):
    """Put the channels of folded queries where the codes have theirs, with zeros between."""
    for at in range(scratch + QUERY, scratch + QUERY + 2 * plane * rows, plane):
        if kind == emit.NIBBLES and half % 64 != 0:
            _spread_halves(at, half)
        elif kind == emit.WHOLE:
            for i in range(2 * half, plane, 8):
                simd.poke_i64(at + i, 0)


@inner
def _score_rows(codes, rows, half, kind, plane, ahead, scratch):
    query, out = scratch + QUERY, scratch + SCORES
    if kind == emit.NARROW:
        for token in range(0, TOKENS, 16):
            emit.block_scores(kind, rows, codes + 32 * token, 64, ahead, 1, query, plane,
                              out + 4 * token, 4 * TOKENS)  # fmt: skip
    else:
        stride = 2 * half if kind == emit.WHOLE else half
        chunks = (stride + 63) // 64
        for token in range(0, TOKENS, 16):
            emit.block_scores(kind, rows, codes + stride * token, stride, ahead, chunks, query,
                              plane, out + 4 * token, 4 * TOKENS)  # fmt: skip


@inner
def _restrict_scores(rows, firsts, soft_cap, scratch):
    """Finish scores here, where they level off or some tokens are not attended.

    firsts: 0 for all tokens; soft_cap: 0 for none. The factors left for later change nothing.
    """
    factors = scratch + FACTORS
    for row in range(rows):
        scores = scratch + SCORES + 4 * TOKENS * row
        scale = simd.splat_f32(simd.peek_f32(factors + SCALE + 16 * row))
        offset = simd.splat_f32(simd.peek_f32(factors + OFFSET + 16 * row))
        for i in range(0, 4 * TOKENS, 64):
            score = simd.mul_add(simd.load_f32(scores + i), scale, offset)
            if soft_cap != np.float32(0.0):
                score = simd.mul(capped(score, soft_cap), simd.splat_f32(LOG2_E))
            simd.store_f32(scores + i, score)
        first = simd.peek_i64(firsts + 8 * row) if firsts != 0 else 0
        for i in range(0, 4 * min(first, TOKENS), 4):
            simd.poke_f32(scores + i, np.float32(-np.inf))
    simd.store_f32(factors + SCALE, simd.splat_f32(np.float32(1.0)))
    simd.store_f32(factors + OFFSET, simd.splat_f32(np.float32(0.0)))


@inner
def _widened(codes, ahead, row, half, bits, nibbles):
    """Codes of less than 4 bits as codes of 4, at `nibbles`, once for all rows that see the block.

    Those `ahead` bytes on are asked for then.
    """
    if row == 0:
        to_nibbles(codes, 16 * half, bits, ahead, nibbles)
    return nibbles


@inner
def _widen(record, ahead, half, k_bits, v_bits, latent, scratch):
    """Scales and minima in float32; those of the block that is read next are asked for.

    Its codes are as those of this block are read.
    """
    parts = 1 if half == 32 else 2
    k_scale = record + TOKENS * 2 * half * k_bits // 8
    v_scale = _v_codes(record, half, k_bits) + TOKENS * 2 * half * v_bits // 8
    for i in range(0, 8 * half, 64):
        simd.prefetch(k_scale + ahead + i)
    for i in range(0, 4 * half, 16):
        simd.store_f32(scratch + KEYS + 4 * i, simd.load_f16(k_scale + 2 * i))
    if latent != 0:
        _latent_values(k_bits, scratch)
        return
    for i in range(0, 4 * TOKENS * parts, 64):
        simd.prefetch(v_scale + ahead + i)
    _widen_values(v_scale, parts, v_bits, scratch)


@inner
def _sum_latent(codes, rows, half, kind, chunks, stride, out, scratch):
    """The same of latent values, whose codes were read before."""
    factors = scratch + FACTORS
    for chunk in range(chunks):
        upper = 1 if chunks > 1 and chunk >= chunks // 2 else 0
        column = 64 * (chunk - upper * (chunks // 2))
        if kind == emit.WHOLE and upper:
            column += half
        emit.block_weigh_latent(
            kind, upper, rows, codes + column, stride, scratch + WEIGHTS, factors + CORRECTION,
            factors + STEP, factors + SHIFT, factors + SHIFT + 64, scratch + LANES + 256 * chunk,
            scratch + LANES + 4 * LATENT_DIM + 256 * chunk, out + 256 * chunk, 256 * chunks,
        )  # fmt: skip


@inner
def _v_codes(record, half, k_bits):
    return record + TOKENS * 2 * half * k_bits // 8 + 8 * half


@inner
def lane_of(channel, half, v_bits):
    """The lane of the output [chunks * 64] that holds four channels from a multiple of 4 on."""
    if kind_of(half, v_bits) == emit.NARROW:
        return channel
    upper = channel // half if half > 32 else 0
    inside = channel - upper * half
    chunk, inside = inside // 64 + upper * (chunk_count(half) // 2), inside % 64
    return 64 * chunk + inside % 16 // 4 * 16 + inside // 16 * 4


@outlined(*[_I64] * 5, _F32, *[_I64] * 5)
def score_block(record, ahead, row, rows, queries, factor, half, k_bits, v_bits, latent, scratch):
    """Find the scores of some rows, to be finished with the factors beside them.

    The first of three steps. What a step leaves in the scratch is taken by the next one; the first
    step of the rows that follow may come before the third, so that its arithmetic fills the time
    in which a step would wait for results. record: the block's address; ahead: bytes from there to
    the block that is read next. row: 0 for the first rows that see the block, which leave in the
    scratch what all of them need. queries: int64 [rows], the address of each, float32 [dim].
    factor: of the scores. latent: 0 where V has codes of its own.
    """
    dim = 2 * half
    kind = kind_of(half, k_bits)
    plane = plane_bytes(half, kind)
    if row == 0:
        _widen(record, ahead, half, k_bits, v_bits, latent, scratch)
    fold_queries(
        rows, queries, scratch + KEYS, dim // 16, scratch + QUERY, plane, scratch + FACTORS, factor
    )
    _pad_planes(rows, half, kind, plane, scratch)
    codes = record
    if k_bits < 4:
        codes, ahead = _widened(record, ahead, row, half, k_bits, scratch + K_CODES), 0
    _score_rows(codes, rows, half, kind, plane, ahead, scratch)


@outlined(*[_I64] * 2, _F32, *[_I64] * 6)
def weigh_block(rows, firsts, soft_cap, half, v_bits, latent, maxima, sums, scratch):
    """Turn scores into weights of the values: the second step.

    firsts: int64 [rows], tokens of the block before it are not attended; 0: all are. soft_cap: of
    scaled scores, 0 for none. maxima, sums: float32 [rows, 4], each number four times; maxima are
    exponents of two.
    """
    parts = 1 if half == 32 and latent == 0 else 2
    if firsts != 0 or soft_cap != np.float32(0.0):
        _restrict_scores(rows, firsts, soft_cap, scratch)
    back = np.float32(0.0 if v_bits == 8 else _middle(v_bits))
    find_weights(
        rows, parts, scratch + SCORES, scratch + FACTORS, maxima, sums, scratch + VALUES, back,
        scratch + WEIGHTS,
    )  # fmt: skip


@outlined(*[_I64] * 10)
def sum_block(record, ahead, row, rows, half, k_bits, v_bits, latent, out, scratch):
    """Add the weighed values to the outputs, the last step.

    row: as for `score_block`. out: float32 [rows, chunks, 64], relative to the maxima, in the lanes
    that `lane_of` says.
    """
    kind = kind_of(half, v_bits)
    chunks = chunk_count(half)
    stride = 2 * half if kind == emit.WHOLE else half
    codes = _v_codes(record, half, k_bits)
    if latent != 0:
        if row == 0:
            _latent_lanes(record + TOKENS * 2 * half * k_bits // 8, half, k_bits, scratch)
        codes = record
        if k_bits < 4:
            codes = _widened(record, 0, row, half, k_bits, scratch + V_CODES)
        _sum_latent(codes, rows, half, kind, chunks, stride, out, scratch)
        return
    if v_bits < 4:
        codes, ahead = _widened(codes, ahead, row, half, v_bits, scratch + V_CODES), 0
    for chunk in range(chunks):
        upper = 1 if chunks > 1 and chunk >= chunks // 2 else 0
        column = 64 * (chunk - upper * (chunks // 2))
        if kind == emit.WHOLE and upper:
            column += half
        weights = scratch + WEIGHTS + upper * TOGETHER * TOKENS
        factors = scratch + FACTORS
        emit.block_weigh(
            kind, upper, rows, codes + column, stride, ahead, weights,
            factors + CORRECTION, factors + STEP + 64 * upper,
            factors + SHIFT + 64 * upper, out + 256 * chunk, 256 * chunks,
        )  # fmt: skip
