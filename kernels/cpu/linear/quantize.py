"""Activations as groups of integers: what the dot products of bytes multiply by.

Of each group the largest number is found first, and the integers are summed up while they are
stored. Both end with combining the lanes of a vector: four groups do that together.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.emit import (
    I8,
    I32,
    LANES,
    V_F32,
    V_I32,
    const_f32,
    const_i32,
    const_i64,
    load,
    loop,
    nearest,
    store,
    switch,
)
from qoff.kernels.cpu.jit.quads import of_row, quads
from qoff.kernels.cpu.jit.simd import vector_intrinsic

_LARGEST = (127.0, 32512.0)  # of one int8 plane, and of two: 127 * 256, so that both stay in range
_GROUPS = 4  # together
_BYTES = ir.VectorType(I8, LANES)
_NO_SIGN = 0x7FFFFFFF


def _larger(b, x, y):
    return b.select(b.icmp_signed(">", x, y), x, y)


def _store_bytes(b, integers, address, offset):
    store(b, b.trunc(integers, _BYTES), b.add(address, offset), 0)


def _emit(b, planes, count, x, group, high, low, scales):
    """`count` groups. Numbers without sign are compared as integers: NaN is larger than any."""
    starts = [b.mul(group, const_i64(i)) for i in range(count)]
    vectors = b.lshr(group, const_i64(4))

    def numbers(index):
        here = [b.add(start, b.shl(index, const_i64(4))) for start in starts]
        found = [load(b, b.add(x, b.shl(element, const_i64(2))), 0, V_F32) for element in here]
        return zip(here, found, strict=True)

    index, largest, close = loop(b, vectors, [const_i32(0)] * count)
    bits = [b.and_(b.bitcast(number, V_I32), const_i32(_NO_SIGN)) for _, number in numbers(index)]
    found = close([_larger(b, x, y) for x, y in zip(bits, largest, strict=True)])
    peak = b.bitcast(quads(b, found, partial(_larger, b)), V_F32)
    limit = const_f32(_LARGEST[planes - 1])
    some = b.fcmp_ordered(">", peak, const_f32(1e-30))
    inverse = b.select(some, b.fdiv(limit, peak), const_f32(0.0))
    # NaN or infinity comes out as NaN, never as a number.
    finite = b.fcmp_ordered("<", peak, const_f32(float("inf")))
    scale = b.select(finite, b.fdiv(peak, limit), const_f32(float("nan")))

    factors = [of_row(b, inverse, row) for row in range(count)]
    index, sums, close = loop(b, vectors, [const_i32(0)] * count)
    added = []
    for (element, number), factor, total in zip(numbers(index), factors, sums, strict=True):
        integers = b.fptosi(nearest(b, b.fmul(number, factor)), V_I32)
        if planes == 2:
            upper = b.ashr(b.add(integers, const_i32(128)), const_i32(8))
            _store_bytes(b, upper, high, element)
            _store_bytes(b, b.sub(integers, b.shl(upper, const_i32(8))), low, element)
        else:
            _store_bytes(b, integers, high, element)
        added.append(b.add(total, integers))
    total = b.fmul(scale, b.sitofp(quads(b, close(added), b.add), V_F32))
    mask = [4 * row + of for row in range(count) for of in (0, LANES)]
    pairs = b.shuffle_vector(scale, total, ir.Constant(ir.VectorType(I32, 2 * count), mask))
    store(b, pairs, scales, 0)


@vector_intrinsic(types.void, *[types.int64] * 7)
def _quantize(b, planes, count, *operands):
    """1 or 4 groups, as 1 or 2 planes."""
    cases = {8 * p + c: partial(_emit, b, p, c, *operands) for p in (1, 2) for c in (1, _GROUPS)}
    switch(b, b.add(b.mul(planes, const_i64(8)), count), cases)


@inner
def quantize_groups(x, first, last, group, planes, high, low, scales):
    """Groups [first, last) of one token as one or two int8 planes, scales and sums.

    x: float32 [K]. high, low: int8 [K]; x = scale * (256 * high + low), or scale * high with one
    plane. scales: float32 [K / group, 2]: a group's scale, and the sum of what stands for x.
    """
    done = first
    while done < last:
        count = 4 if last - done >= 4 else 1
        start = done * group
        _quantize(planes, count, x + 4 * start, group, high + start, low + start, scales + 8 * done)
        done += count
