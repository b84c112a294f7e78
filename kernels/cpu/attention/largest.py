"""The largest of many scores: which one is the k-th, by bisection over its bits.

A score becomes a 32-bit integer of the same order, 16 are compared at a time, and nothing depends
on the threads.
"""

from __future__ import annotations

import numpy as np
from numba import types

from qoff.kernels.cpu.jit import emit, simd
from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.simd import i32x16, vector_intrinsic

LOWEST, ABOVE = -(2**31), 2**31


@vector_intrinsic(types.void, types.int64, types.int64)
def poke_i32(b, address, value):
    b.store(b.trunc(value, emit.I32), emit.at(b, address, 0, emit.I32), align=1)


@vector_intrinsic(i32x16, i32x16, types.int64, types.int64)
def _count_from(b, counts, address, least):
    """Add 1 to the lanes whose integer at the address is at least `least`."""
    values = emit.load(b, address, 0, emit.V_I32)
    bound = emit.splat(b, b.trunc(least, emit.I32), emit.V_I32)
    return b.add(counts, b.zext(b.icmp_signed(">=", values, bound), emit.V_I32))


@inner
def poke_score(address, score):
    """Write the integer of a score, which is any number."""
    simd.poke_f32(address, score + np.float32(0.0))  # -0 becomes 0
    bits = simd.peek_i32(address)
    poke_i32(address, bits if bits >= 0 else bits ^ 0x7FFFFFFF)


@inner
def pad_scores(scores, count):
    """Fill the last vector of `count` integers with the lowest; returns how many there are then."""
    padded = (count + 15) // 16 * 16
    for i in range(count, padded):
        poke_i32(scores + 4 * i, LOWEST)
    return padded


@inner
def _count(scores, padded, least):
    counts = simd.zero_i32()
    for i in range(0, 4 * padded, 64):
        counts = _count_from(counts, scores + i, least)
    return simd.sum_i32(counts)


@inner
def threshold(scores, padded, keep):
    """The `keep`-th largest of whole vectors of integers, and how many that equal it are kept."""
    low, high = LOWEST, ABOVE
    while high - low > 1:
        middle = (low + high) // 2
        if _count(scores, padded, middle) >= keep:
            low = middle
        else:
            high = middle
    above = 0 if low + 1 == ABOVE else _count(scores, padded, low + 1)
    return low, keep - above
