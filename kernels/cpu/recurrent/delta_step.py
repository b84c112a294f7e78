"""A token of a panel of a state of linear attention: what it finds, and how it changes the state.

A panel is read once for o and what is known of the key, as o is S^T (decay * q) + (q . k) *
correction, and once to change it.
"""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner


@inlined
def _correction(known, v, decay, beta):
    """What a state lacks of a value, 16 channels."""
    return simd.mul(simd.add(v, simd.mul(known, decay)), beta)


@inner
def wide_step(memory, q, k, v, out, dim, decay, beta, both):
    """A token of a panel of 64 channels; both: q . k."""
    zero = simd.splat_f32(np.float32(0.0))
    known0, known1, known2, known3 = zero, zero, zero, zero
    found0, found1, found2, found3 = zero, zero, zero, zero
    at = memory
    for i in range(0, 4 * dim, 4):
        x, y = simd.splat_f32(simd.peek_f32(k + i)), simd.splat_f32(simd.peek_f32(q + i))
        s0, s1 = simd.load_f32(at), simd.load_f32(at + 64)
        s2, s3 = simd.load_f32(at + 128), simd.load_f32(at + 192)
        known0, found0 = simd.mul_add(s0, x, known0), simd.mul_add(s0, y, found0)
        known1, found1 = simd.mul_add(s1, x, known1), simd.mul_add(s1, y, found1)
        known2, found2 = simd.mul_add(s2, x, known2), simd.mul_add(s2, y, found2)
        known3, found3 = simd.mul_add(s3, x, known3), simd.mul_add(s3, y, found3)
        at += 256
    less = simd.splat_f32(-decay)
    forget, learn, product = simd.splat_f32(decay), simd.splat_f32(beta), simd.splat_f32(both)
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
        simd.store_f32(at, simd.mul_add(simd.load_f32(at), forget, simd.mul(new0, x)))
        simd.store_f32(at + 64, simd.mul_add(simd.load_f32(at + 64), forget, simd.mul(new1, x)))
        simd.store_f32(at + 128, simd.mul_add(simd.load_f32(at + 128), forget, simd.mul(new2, x)))
        simd.store_f32(at + 192, simd.mul_add(simd.load_f32(at + 192), forget, simd.mul(new3, x)))
        at += 256


@inner
def step(memory, row, q, k, v, out, dim, decay, beta, both):
    """A token of 16 channels of a panel whose rows have `row` bytes."""
    known, found = simd.splat_f32(np.float32(0.0)), simd.splat_f32(np.float32(0.0))
    at = memory
    for i in range(0, 4 * dim, 4):
        s = simd.load_f32(at)
        known = simd.mul_add(s, simd.splat_f32(simd.peek_f32(k + i)), known)
        found = simd.mul_add(s, simd.splat_f32(simd.peek_f32(q + i)), found)
        at += row
    forget = simd.splat_f32(decay)
    new = _correction(known, simd.load_f32(v), simd.splat_f32(-decay), simd.splat_f32(beta))
    product = simd.mul(new, simd.splat_f32(both))
    simd.store_f32(out, simd.mul_add(found, forget, product))
    at = memory
    for i in range(0, 4 * dim, 4):
        change = simd.mul(new, simd.splat_f32(simd.peek_f32(k + i)))
        simd.store_f32(at, simd.mul_add(simd.load_f32(at), forget, change))
        at += row


@inner
def wide_channel_step(memory, q, k, v, out, dim, decay, beta, both):
    """As `wide_step`; decay: where those of the key's channels are."""
    zero = simd.splat_f32(np.float32(0.0))
    known0, known1, known2, known3 = zero, zero, zero, zero
    found0, found1, found2, found3 = zero, zero, zero, zero
    at = memory
    for i in range(0, 4 * dim, 4):
        forget = simd.peek_f32(decay + i)
        x = simd.splat_f32(forget * simd.peek_f32(k + i))
        y = simd.splat_f32(forget * simd.peek_f32(q + i))
        s0, s1 = simd.load_f32(at), simd.load_f32(at + 64)
        s2, s3 = simd.load_f32(at + 128), simd.load_f32(at + 192)
        known0, found0 = simd.mul_add(s0, x, known0), simd.mul_add(s0, y, found0)
        known1, found1 = simd.mul_add(s1, x, known1), simd.mul_add(s1, y, found1)
        known2, found2 = simd.mul_add(s2, x, known2), simd.mul_add(s2, y, found2)
        known3, found3 = simd.mul_add(s3, x, known3), simd.mul_add(s3, y, found3)
        at += 256
    less = simd.splat_f32(np.float32(-1.0))
    learn, product = simd.splat_f32(beta), simd.splat_f32(both)
    new0 = _correction(known0, simd.load_f32(v), less, learn)
    new1 = _correction(known1, simd.load_f32(v + 64), less, learn)
    new2 = _correction(known2, simd.load_f32(v + 128), less, learn)
    new3 = _correction(known3, simd.load_f32(v + 192), less, learn)
    simd.store_f32(out, simd.mul_add(new0, product, found0))
    simd.store_f32(out + 64, simd.mul_add(new1, product, found1))
    simd.store_f32(out + 128, simd.mul_add(new2, product, found2))
    simd.store_f32(out + 192, simd.mul_add(new3, product, found3))
    at = memory
    for i in range(0, 4 * dim, 4):
        keep, x = simd.splat_f32(simd.peek_f32(decay + i)), simd.splat_f32(simd.peek_f32(k + i))
        simd.store_f32(at, simd.mul_add(simd.load_f32(at), keep, simd.mul(new0, x)))
        simd.store_f32(at + 64, simd.mul_add(simd.load_f32(at + 64), keep, simd.mul(new1, x)))
        simd.store_f32(at + 128, simd.mul_add(simd.load_f32(at + 128), keep, simd.mul(new2, x)))
        simd.store_f32(at + 192, simd.mul_add(simd.load_f32(at + 192), keep, simd.mul(new3, x)))
        at += 256


@inner
def channel_step(memory, row, q, k, v, out, dim, decay, beta, both):
    """As `step`; decay: where those of the key's channels are."""
    known, found = simd.splat_f32(np.float32(0.0)), simd.splat_f32(np.float32(0.0))
    at = memory
    for i in range(0, 4 * dim, 4):
        s, forget = simd.load_f32(at), simd.peek_f32(decay + i)
        known = simd.mul_add(s, simd.splat_f32(forget * simd.peek_f32(k + i)), known)
        found = simd.mul_add(s, simd.splat_f32(forget * simd.peek_f32(q + i)), found)
        at += row
    less = simd.splat_f32(np.float32(-1.0))
    new = _correction(known, simd.load_f32(v), less, simd.splat_f32(beta))
    simd.store_f32(out, simd.mul_add(new, simd.splat_f32(both), found))
    at = memory
    for i in range(0, 4 * dim, 4):
        change = simd.mul(new, simd.splat_f32(simd.peek_f32(k + i)))
        keep = simd.splat_f32(simd.peek_f32(decay + i))
        simd.store_f32(at, simd.mul_add(simd.load_f32(at), keep, change))
        at += row


@inner
def dot(x, y, count):
    """x . y, of multiples of 16 numbers."""
    total = simd.splat_f32(np.float32(0.0))
    for i in range(0, 4 * count, 64):
        total = simd.mul_add(simd.load_f32(x + i), simd.load_f32(y + i), total)
    return simd.sum_f32(total)
