"""A token of a panel of a state of linear attention: what it finds, and how it changes the state.

A panel is read once for o and what is known of the key, as o is S^T (decay * q) + (q . k) *
correction, and once to change it. by_channel is a constant, and what is not for it is left out:
each of the key's channels has a decay, or all have the first.
"""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner


@inlined
def _correction(known, v, decay, beta):
    """What a state lacks of a value, 16 channels."""
    return simd.mul(simd.add(v, simd.mul(known, decay)), beta)


@inlined
def _pair(q, k, decay, i, by_channel):
    """A channel of a query and of a key, times its decay if it has one."""
    x, y = simd.peek_f32(k + i), simd.peek_f32(q + i)
    if by_channel:
        forget = simd.peek_f32(decay + i)
        x, y = x * forget, y * forget
    return simd.splat_f32(x), simd.splat_f32(y)


@inlined
def wide_step(memory, q, k, v, out, dim, decay, beta, both, by_channel):
    """A token of a panel of 64 channels; decay: where decays are; both: q . k."""
    zero = simd.splat_f32(np.float32(0.0))
    known0, known1, known2, known3 = zero, zero, zero, zero
    found0, found1, found2, found3 = zero, zero, zero, zero
    at = memory
    for i in range(0, 4 * dim, 4):
        x, y = _pair(q, k, decay, i, by_channel)
        s0, s1 = simd.load_f32(at), simd.load_f32(at + 64)
        s2, s3 = simd.load_f32(at + 128), simd.load_f32(at + 192)
        known0, found0 = simd.mul_add(s0, x, known0), simd.mul_add(s0, y, found0)
        known1, found1 = simd.mul_add(s1, x, known1), simd.mul_add(s1, y, found1)
        known2, found2 = simd.mul_add(s2, x, known2), simd.mul_add(s2, y, found2)
        known3, found3 = simd.mul_add(s3, x, known3), simd.mul_add(s3, y, found3)
        at += 256
    whole = np.float32(1.0) if by_channel else simd.peek_f32(decay)
    less = simd.splat_f32(-whole)
    forget, learn, product = simd.splat_f32(whole), simd.splat_f32(beta), simd.splat_f32(both)
    new0 = _correction(known0, simd.load_f32(v), less, learn)
    new1 = _correction(known1, simd.load_f32(v + 64), less, learn)
    new2 = _correction(known2, simd.load_f32(v + 128), less, learn)
    new3 = _correction(known3, simd.load_f32(v + 192), less, learn)
    simd.store_f32(out, simd.mul_add(found0, forget, simd.mul(new0, product)))
    simd.store_f32(out + 64, simd.mul_add(found1, forget, simd.mul(new1, product)))
    simd.store_f32(out + 128, simd.mul_add(found2, forget, simd.mul(new2, product)))
    simd.store_f32(out + 192, simd.mul_add(found3, forget, simd.mul(new3, product)))
    at = memory
    for i in range(0, 4 * dim, 4):
        x = simd.splat_f32(simd.peek_f32(k + i))
        if by_channel:
            forget = simd.splat_f32(simd.peek_f32(decay + i))
        simd.store_f32(at, simd.mul_add(simd.load_f32(at), forget, simd.mul(new0, x)))
        simd.store_f32(at + 64, simd.mul_add(simd.load_f32(at + 64), forget, simd.mul(new1, x)))
        simd.store_f32(at + 128, simd.mul_add(simd.load_f32(at + 128), forget, simd.mul(new2, x)))
        simd.store_f32(at + 192, simd.mul_add(simd.load_f32(at + 192), forget, simd.mul(new3, x)))
        at += 256


@inlined
def step(memory, row, q, k, v, out, dim, decay, beta, both, by_channel):
    """A token of 16 channels of a panel whose rows have `row` bytes; see `wide_step`."""
    known, found = simd.splat_f32(np.float32(0.0)), simd.splat_f32(np.float32(0.0))
    at = memory
    for i in range(0, 4 * dim, 4):
        x, y = _pair(q, k, decay, i, by_channel)
        s = simd.load_f32(at)
        known, found = simd.mul_add(s, x, known), simd.mul_add(s, y, found)
        at += row
    whole = np.float32(1.0) if by_channel else simd.peek_f32(decay)
    forget = simd.splat_f32(whole)
    new = _correction(known, simd.load_f32(v), simd.splat_f32(-whole), simd.splat_f32(beta))
    product = simd.mul(new, simd.splat_f32(both))
    simd.store_f32(out, simd.mul_add(found, forget, product))
    at = memory
    for i in range(0, 4 * dim, 4):
        change = simd.mul(new, simd.splat_f32(simd.peek_f32(k + i)))
        if by_channel:
            forget = simd.splat_f32(simd.peek_f32(decay + i))
        simd.store_f32(at, simd.mul_add(simd.load_f32(at), forget, change))
        at += row


@inner
def dot(x, y, count):
    """x . y, of multiples of 16 numbers."""
    total = simd.splat_f32(np.float32(0.0))
    for i in range(0, 4 * count, 64):
        total = simd.mul_add(simd.load_f32(x + i), simd.load_f32(y + i), total)
    return simd.sum_f32(total)
