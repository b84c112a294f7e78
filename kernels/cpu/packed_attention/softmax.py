"""Vector code that turns scores over a packed block into weights of its values, row by row.

The softmax is that of powers of two, online: a running maximum and sum for each row. A weight is a
probability times V's scale of the token, rounded to 8 bits relative to a bound of the largest.
"""

from __future__ import annotations

import math
from functools import partial

from numba import types

from qoff.kernels.cpu.jit.emit import (
    LANES,
    V_F32,
    V_I32,
    const_f32,
    const_i32,
    dot_u8s8,
    fma,
    load,
    maximum,
    splat,
    store,
    switch,
)
from qoff.kernels.cpu.jit.powers import exp2
from qoff.kernels.cpu.jit.quads import of_row, quads, shuffled
from qoff.kernels.cpu.jit.simd import vector_intrinsic

from .block_emit import BYTES, ROWS, by_rows
from .fold import OFFSET, SCALE
from .scratch import BOUND, LARGEST, PART_BYTES, TOKENS

# Quads of a group of rows, after those of `fold`: the factor of what was summed before, and
# for both parts of V the scale of weights and what is added to what they sum up to: FACTORS_BYTES.
CORRECTION, STEP, SHIFT = 128, 192, 320
_i64, _f32 = types.int64, types.float32
_LOWEST = -1e30  # of a score
_FAINTEST = -99.0  # power of two of weights that count for nothing
# What the bound of the largest weight becomes; 255 is kept for what rounding scores may add to it.
_LOG2_LEVELS = math.log2(250.0)
_ROUND = 1.5 * 2.0**23  # added to a number: the rounded one in the lowest bits
_FIELDS = range(0, 4 * TOKENS, 64)  # bytes to the vectors of 64 numbers


@vector_intrinsic(types.void, *[_i64] * 7, _f32, _i64)
def find_weights(b, rows, parts, scores, factors, maxima, sums, values, back, weights):
    """Turn scores into integer weights of V's codes, and keep maxima and sums of the softmax.

    parts: of V, 1 or 2. scores: float32 [rows, 64], exponents of two once SCALE and OFFSET are
    applied. maxima, sums: quads of what the rows have seen; CORRECTION is what relates sums before
    to the new maximum. values: see VALUES_BYTES. weights: uint8 [parts, ROWS, 64], relative to
    STEP; `back` times what they sum up to is taken from SHIFT.
    """
    args = (scores, factors, maxima, sums, values, back, weights)

    def emit(count):
        by_rows(b, rows, lambda n: _emit_softmax(b, n, count, *args))

    switch(b, parts, {count: partial(emit, count) for count in (1, 2)})


def _emit_softmax(b, rows, parts, scores, factors, maxima, sums, values, back, weights):
    larger, ones, each = partial(maximum, b), const_i32(0x01010101), range(parts)
    scale, offset = (load(b, factors, field, V_F32) for field in (SCALE, OFFSET))
    bounds = _vectors(b, values, BOUND)
    tops, peaks = [], []
    for row in range(rows):
        scaled = _scaled(b, scores, row, scale, offset)
        tops.append(_joined(scaled, larger))
        weighed = [b.fadd(x, bound) for x, bound in zip(scaled, bounds, strict=True)]
        peaks.append(_joined(weighed, larger))
    before = load(b, maxima, 0, V_F32)
    # Finite, so that a row that has seen nothing yet has a difference to it.
    after = larger(larger(quads(b, tops, larger), const_f32(_LOWEST)), before)
    correction = exp2(b, b.fsub(before, after))
    peak = b.fsub(quads(b, peaks, larger), after)
    some = b.fcmp_ordered(">", peak, const_f32(_FAINTEST))
    inverse = b.select(some, exp2(b, b.fsub(const_f32(_LOG2_LEVELS), peak)), const_f32(0.0))
    step = exp2(b, b.fsub(peak, const_f32(_LOG2_LEVELS)))

    offset = b.fsub(offset, after)
    totals, counts, offsets = [], [], []
    for row in range(rows):
        likely = [exp2(b, x) for x in _scaled(b, scores, row, scale, offset)]
        totals.append(_joined(likely, b.fadd))
        packed = [_rounded(b, likely, values, part, of_row(b, inverse, row)) for part in each]
        for part in each:
            store(b, packed[part], weights, TOKENS * (ROWS * part + row))
        counts.append(
            [dot_u8s8(b, const_i32(0), b.bitcast(x, V_I32), ones, (8, 0)) for x in packed]
        )
        offsets.append([_offset(b, likely, values, part) for part in each])
    store(b, after, maxima, 0)
    store(b, fma(b, load(b, sums, 0, V_F32), correction, quads(b, totals, b.fadd)), sums, 0)
    store(b, correction, factors, CORRECTION)
    for part in each:
        part_step = b.fmul(step, load(b, values, LARGEST + 64 * part, V_F32))
        store(b, part_step, factors, STEP + 64 * part)
        count = quads(b, [found[part] for found in counts], b.add)
        added = quads(b, [found[part] for found in offsets], b.fadd)
        lost = b.fmul(b.fmul(part_step, splat(b, back, V_F32)), b.sitofp(count, V_F32))
        store(b, b.fsub(added, lost), factors, SHIFT + 64 * part)


def _scaled(b, scores, row, scale, offset):
    """The finished scores of a row."""
    by, plus = of_row(b, scale, row), of_row(b, offset, row)
    return [fma(b, x, by, plus) for x in _vectors(b, scores, 4 * TOKENS * row)]


def _rounded(b, likely, values, part, inverse):
    """Probabilities times V's scales as bytes, relative to what `inverse` is the inverse of."""
    by = _vectors(b, values, PART_BYTES * part)
    products = [b.fmul(p, x) for p, x in zip(likely, by, strict=True)]
    low = [b.bitcast(fma(b, x, inverse, const_f32(_ROUND)), BYTES) for x in products]
    mask = [64 * vector + 4 * i for vector in (0, 1) for i in range(LANES)]
    first, second = (shuffled(b, x, y, mask) for x, y in (low[:2], low[2:]))
    return shuffled(b, first, second, list(range(64)))


def _offset(b, likely, values, part):
    """What probabilities add to SHIFT, by lane."""
    added = const_f32(0.0)
    plus = _vectors(b, values, PART_BYTES * part + 4 * TOKENS)
    for p, x in zip(likely, plus, strict=True):
        added = fma(b, p, x, added)
    return added


def _vectors(b, address, offset):
    """64 numbers."""
    return [load(b, address, offset + i, V_F32) for i in _FIELDS]


def _joined(four, combine):
    first, second, third, fourth = four
    return combine(combine(first, second), combine(third, fourth))
