"""Looking through a row of numbers: the largest, sums and counts from a bound on.

Rows of weights are padded with zeros to whole groups of 256.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit import emit, simd
from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.simd import f32x16, i32x16, vector_intrinsic

from .scratch import GROUP

_ONE = 0x3F800000  # 1.0, as bits
_COARSE = 7  # bisections of the bits of [0, 1], after which one power of two is left
_i64, _f32 = types.int64, types.float32


def _lanes(b, condition):
    """A bit for each lane, as one integer."""
    return b.zext(b.bitcast(condition, ir.IntType(emit.LANES)), emit.I64)


@vector_intrinsic(i32x16, i32x16, f32x16)
def _or_nan(b, found, x):
    return b.or_(found, b.sext(b.fcmp_unordered("uno", x, x), emit.V_I32))


@vector_intrinsic(_i64, f32x16, f32x16)
def lanes_from(b, x, bound):
    """A bit for each lane of x that is at least the bound."""
    return _lanes(b, b.fcmp_ordered(">=", x, bound))


@vector_intrinsic(f32x16, f32x16, f32x16)
def kept_from(b, x, bound):
    """x, 0 where it is below the bound."""
    return b.select(b.fcmp_ordered(">=", x, bound), x, emit.const_f32(0.0))


@vector_intrinsic(i32x16, i32x16, f32x16, f32x16)
def _count_from(b, counts, x, bound):
    return b.add(counts, b.zext(b.fcmp_ordered(">=", x, bound), emit.V_I32))


@vector_intrinsic(_f32, _i64)
def _float_of(b, bits):
    return b.bitcast(b.trunc(bits, emit.I32), emit.F32)


@inner
def largest(row, size):
    """The largest number of a row, and whether none is NaN."""
    top, nan = simd.splat_f32(np.float32(-np.inf)), simd.zero_i32()
    whole = size // 16 * 16
    for i in range(0, 4 * whole, 64):
        x = simd.load_f32(row + i)
        top = simd.maximum(x, top)
        nan = _or_nan(nan, x)
    peak, good = simd.max_f32(top), simd.sum_i32(nan) == 0
    for i in range(whole, size):
        x = simd.peek_f32(row + 4 * i)
        peak, good = max(peak, x), good and x == x
    return peak, good


@inner
def first_from(row, size, bound):
    """Place of the first number that is at least the bound, which one is."""
    limit = simd.splat_f32(bound)
    i = 0
    while i + 16 <= size and lanes_from(simd.load_f32(row + 4 * i), limit) == 0:
        i += 16
    while simd.peek_f32(row + 4 * i) < bound:
        i += 1
    return i


@inner
def _count(row, size, bound):
    """How many numbers are at least the bound."""
    counts, limit = simd.zero_i32(), simd.splat_f32(bound)
    for i in range(0, 4 * size, 64):
        counts = _count_from(counts, simd.load_f32(row + i), limit)
    return simd.sum_i32(counts)


@inner
def total_from(row, size, bound):
    """The sum of the numbers that are at least the bound."""
    total, limit = 0.0, simd.splat_f32(bound)
    for group in range(row, row + 4 * size, 4 * GROUP):
        part = simd.splat_f32(np.float32(0.0))
        for i in range(group, group + 4 * GROUP, 64):
            part = simd.add(part, kept_from(simd.load_f32(i), limit))
        total += np.float64(simd.sum_f32(part))
    return total


@inner
def compact(row, size, bound, to):
    """Bring the numbers that are at least the bound together at `to`; their padded number."""
    limit, count = simd.splat_f32(bound), 0
    for i in range(row, row + 4 * size, 64):
        bits = lanes_from(simd.load_f32(i), limit)
        lane = i
        while bits != 0:
            if bits & 1:
                simd.poke_f32(to + 4 * count, simd.peek_f32(lane))
                count += 1
            bits >>= 1
            lane += 4
    padded = (count + GROUP - 1) // GROUP * GROUP
    for i in range(count, padded):
        simd.poke_f32(to + 4 * i, np.float32(0.0))
    return padded


@inner
def least_from(row, size, wanted, counts, scratch):
    """The largest bound from which numbers of [0, 1] add up to `wanted`, or are so many (counts).

    By bisection over the bits, which are in the order of the numbers. scratch: as large as the row,
    or the row itself, which is then lost.
    """
    low, high, step = 0, _ONE + 1, 0
    while high - low > 1:
        middle = (low + high) // 2
        bound = _float_of(middle)
        found = np.float64(_count(row, size, bound)) if counts else total_from(row, size, bound)
        if found >= wanted:
            low = middle
        else:
            high = middle
        step += 1
        if step == _COARSE and low > 0:  # smaller ones are not looked at any more
            size, row = compact(row, size, _float_of(low), scratch), scratch
    return _float_of(low)
