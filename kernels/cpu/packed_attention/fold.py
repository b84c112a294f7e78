"""Vector code that folds the scales of a packed block's keys into queries, some side by side.

A folded query becomes 16-bit integers, in two planes of int8 for the dot product of bytes. A score
is such a dot product times a scale, plus an offset: the query times K's minima.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit.emit import (
    I64,
    LANES,
    V_F32,
    absolute,
    const_f32,
    const_i64,
    fma,
    load,
    loop,
    maximum,
    splat,
    store,
)
from qoff.kernels.cpu.jit.quads import of_row, quads, shuffled
from qoff.kernels.cpu.jit.simd import vector_intrinsic

from .block_emit import BYTES, by_rows

SCALE, OFFSET = 0, 64  # quads of a group of rows, bytes from the start of its factors

_i64, _f32 = types.int64, types.float32
_LIMIT = 32512.0  # 127 * 256: both planes stay in range
_SMALLEST = 1e-30
# Added to a number: the rounded one, plus 128, in the lowest bits. Of their bytes the second is the
# high plane's, the first 128 more than the low plane's.
_ROUND = 1.5 * 2.0**23 + 128


@vector_intrinsic(types.void, *[_i64] * 7, _f32)
def fold_queries(b, rows, queries, k, vectors, planes, plane, factors, scale):
    """Multiply queries by K's scales and round them to 16 bits, as two planes of int8.

    queries: addresses of `rows` queries, 1 to ROWS, of 16 * `vectors` float32. k: float32, K's
    scales and then its minima. planes: int8 [rows, 2, plane], high bytes and low ones, after an
    odd number of vectors with 16 zeros. factors: SCALE and OFFSET become what turns a dot product
    of codes and planes into a score, times `scale`.
    """
    args = (queries, k, vectors, planes, plane, factors, scale)
    by_rows(b, rows, lambda n: _emit_fold(b, n, *args))


def _planes(b, first, second):
    """Two vectors of rounded numbers + 128 as 32 high bytes and 32 low ones, both signed."""
    lower = [64 * vector + 4 * i for vector in (0, 1) for i in range(LANES)]
    mask = lower + [i + 1 for i in lower]
    both = shuffled(b, b.bitcast(first, BYTES), b.bitcast(second, BYTES), mask)
    both = b.xor(both, ir.Constant(BYTES, [-128] * 32 + [0] * 32))
    return [shuffled(b, both, both, [h + i for i in range(32)]) for h in (32, 0)]


def _emit_fold(b, rows, queries, k, vectors, planes, plane, factors, scale):
    q = [load(b, queries, 8 * row, I64) for row in range(rows)]
    minima = b.add(k, b.mul(vectors, const_i64(64)))
    i, carried, close = loop(b, vectors, [const_f32(0.0)] * (2 * rows))
    here = b.mul(i, const_i64(64))
    by, minimum = load(b, b.add(k, here), 0, V_F32), load(b, b.add(minima, here), 0, V_F32)
    largest, offsets = [], []
    for row in range(rows):
        x = load(b, b.add(q[row], here), 0, V_F32)
        folded = absolute(b, b.fmul(x, by))
        largest.append(maximum(b, folded, carried[row]))
        offsets.append(fma(b, x, minimum, carried[rows + row]))
    found = close(largest + offsets)
    peaks = quads(b, found[:rows], partial(maximum, b))
    offsets = quads(b, found[rows:], b.fadd)
    scale = splat(b, scale, V_F32)
    store(b, b.fmul(b.fmul(peaks, const_f32(1 / _LIMIT)), scale), factors, SCALE)
    store(b, b.fmul(offsets, scale), factors, OFFSET)
    inverse = _inverse(b, _LIMIT, peaks)
    inverses = [of_row(b, inverse, row) for row in range(rows)]

    def rounded(row, at_vector, by):
        folded = b.fmul(load(b, b.add(q[row], at_vector), 0, V_F32), by)
        return fma(b, folded, inverses[row], const_f32(_ROUND))

    def write(row, pair, first, second):
        to = b.add(b.add(planes, b.mul(plane, const_i64(2 * row))), b.mul(pair, const_i64(32)))
        for offset, part in zip((const_i64(0), plane), _planes(b, first, second), strict=True):
            store(b, part, to, offset)

    pairs = b.lshr(vectors, const_i64(1))
    pair, _, close = loop(b, pairs, [])
    places = [b.add(b.mul(pair, const_i64(128)), const_i64(64 * j)) for j in (0, 1)]
    scales = [load(b, b.add(k, place), 0, V_F32) for place in places]
    for row in range(rows):
        write(row, pair, *(rounded(row, *both) for both in zip(places, scales, strict=True)))
    close([])
    with b.if_then(b.trunc(vectors, ir.IntType(1))):
        place = b.mul(pairs, const_i64(128))
        by = load(b, b.add(k, place), 0, V_F32)
        for row in range(rows):
            write(row, pairs, rounded(row, place, by), const_f32(_ROUND))


def _inverse(b, limit, peaks):
    """limit / peaks; 0 where a peak is next to nothing."""
    some = b.fcmp_ordered(">", peaks, const_f32(_SMALLEST))
    return b.select(some, b.fdiv(const_f32(limit), peaks), const_f32(0.0))
