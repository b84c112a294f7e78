"""Vector code of prefill attention's online softmax, for the rows of a tile together.

One row's maximum, exponentials and sum wait for each other; those of several rows do not.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.emit import (
    I32,
    LANES,
    V_F32,
    V_I32,
    const_f32,
    const_i64,
    fma,
    lanes,
    load,
    loop,
    maximum,
    rounded_bf16,
    splat,
    store,
    switch,
)
from qoff.kernels.cpu.jit.powers import exp2
from qoff.kernels.cpu.jit.quads import of_row, quads
from qoff.kernels.cpu.jit.simd import vector_intrinsic

from . import scratch as sizes
from .product import TILES, WIDTHS

# A tile's running maxima, their sums, and what corrects what was summed before: quads of its rows.
# Behind both STATE_BYTES end.
SUMS, CORRECTIONS = 128, 256
_LOG2_E = 1.4426950408889634
_NOTHING = float("-inf")

_i64 = types.int64


row_bytes = inner(sizes.row_bytes)


@vector_intrinsic(simd.f32x16, simd.f32x16, _i64, _i64)
def _seen(b, scores, low, high):
    """The scores of lanes from `low` on and below `high`; the others weigh nothing."""
    lane = ir.Constant(V_I32, list(range(LANES)))
    low, high = (splat(b, b.trunc(bound, I32), V_I32) for bound in (low, high))
    inside = b.and_(b.icmp_signed(">=", lane, low), b.icmp_signed("<", lane, high))
    return b.select(inside, scores, const_f32(_NOTHING))


@inner
def mask(rows, scores, stride, vectors, low, high, step):
    """Of `vectors` vectors of each row's scores, let those outside of [low, high) weigh nothing.

    The bounds are the first row's; those of each row are `step` more than of the row before.
    """
    lowest = max(0, min(vectors, (low + step * (rows - 1) + 15) // 16))
    highest = max(0, high // 16)
    for i in range(lowest + max(0, vectors - highest)):
        v = i if i < lowest else i - lowest + highest
        for row in range(rows):
            at, first = scores + stride * row + 64 * v, step * row - 16 * v
            simd.store_f32(at, _seen(simd.load_f32(at), low + first, high + first))


def _emit(b, width, rows, scores, stride, vectors, state):
    at_scores = [b.add(scores, b.mul(stride, const_i64(row))) for row in range(rows)]
    groups = [range(first, min(first + 4, rows)) for first in range(0, rows, 4)]
    larger, log2_e = partial(maximum, b), const_f32(_LOG2_E)

    def power(x, top):
        return exp2(b, b.fmul(b.fsub(x, top), log2_e))

    index, tops, close = loop(b, vectors, [const_f32(_NOTHING)] * rows)
    here = b.mul(index, const_i64(64))
    tops = close(
        [
            maximum(b, load(b, b.add(at, here), 0, V_F32), top)
            for at, top in zip(at_scores, tops, strict=True)
        ]
    )
    zeros = []
    for number, group in enumerate(groups):
        before = load(b, state, 64 * number, V_F32)
        peak = larger(before, quads(b, [tops[row] for row in group], larger))
        # Of a row that has seen nothing the difference to its maximum would be no number.
        zero = b.select(b.fcmp_ordered(">", peak, const_f32(_NOTHING)), peak, const_f32(0.0))
        store(b, peak, state, 64 * number)
        store(b, power(before, zero), state, CORRECTIONS + 64 * number)
        zeros += [of_row(b, zero, row) for row in range(len(group))]

    index, totals, close = loop(b, vectors, [const_f32(0.0)] * rows)
    here = b.mul(index, const_i64(64))
    found = []
    for at, zero, total in zip(at_scores, zeros, totals, strict=True):
        likely = power(load(b, b.add(at, here), 0, V_F32), zero)
        if width == 4:
            store(b, likely, b.add(at, here), 0)
        else:  # the scores of these bytes were read before
            both = rounded_bf16(b, likely, likely)
            store(b, lanes(b, both, both, 0, LANES), b.add(at, b.mul(index, const_i64(32))), 0)
        found.append(b.fadd(total, likely))
    found = close(found)
    for number, group in enumerate(groups):
        total = quads(b, [found[row] for row in group], b.fadd)
        correction = load(b, state, CORRECTIONS + 64 * number, V_F32)
        before = load(b, state, SUMS + 64 * number, V_F32)
        store(b, fma(b, before, correction, total), state, SUMS + 64 * number)


@vector_intrinsic(types.void, *[_i64] * 6)
def softmax(b, width, rows, scores, stride, vectors, state):
    """Turn scores of 1, 3, 4 or 6 rows into weights, and keep maxima and sums.

    scores: float32 [rows, 16 * vectors], `stride` bytes between rows. width: bytes of a weight, 4,
    or 2: bfloat16, one behind the other where the row's scores begin. state: of all
    rows the maxima and sums of weights so far, and what corrects what was summed up before.
    """
    args = (scores, stride, vectors, state)
    cases = {8 * w + r: partial(_emit, b, w, r, *args) for w in WIDTHS for r in TILES}
    switch(b, b.add(b.mul(width, const_i64(8)), rows), cases)
