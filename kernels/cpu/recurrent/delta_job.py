"""Gated DeltaNet as one compiled job: convolutions, then each head of each sequence.

The recurrence goes token by token, so a prompt's bits do not depend on how it is cut. A panel of a
state, of 32 KiB for 128 x 64, stays in the first cache while all tokens of a pass go by it; each
reads it once for o and what is known of the key, as o is decay * S^T q + (q . k) * correction, and
once to change it.
"""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.cpu.linear.activation import NUMBERS, activated
from qoff.kernels.cpu.operands import int64s, offsets
from qoff.kernels.layout.delta import L2_EPS
from qoff.kernels.layout.states import SPAN_FIELDS

from .convolution import clear, convolve
from .step import softplus

_SILU = NUMBERS["silu"]
_EPS = np.float32(L2_EPS)
_SPAN_BYTES = 8 * len(SPAN_FIELDS)


class DeltaArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes; `scratch_each` bytes are a thread's."""

    OF_LAYER = ("taps_weight", "decay", "dt_bias", "norm", "conv", "memory")
    _fields_ = (
        *int64s(
            "x", "x_stride", "ba", "ba_stride", "taps_weight", "decay", "dt_bias", "norm", "conv",
            "memory", "spans", "positions", "sequences", "key_heads", "value_heads", "key_dim",
            "value_dim", "panel", "taps", "out", "out_stride", "scratch", "scratch_each",
        ),
        ("eps", ctypes.c_float),
    )  # fmt: skip


(X, X_STRIDE, BA, BA_STRIDE, TAPS_WEIGHT, DECAY, DT_BIAS, NORM, CONV, MEMORY, SPANS, POSITIONS,
 SEQUENCES, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PANEL, TAPS, OUT, OUT_STRIDE, SCRATCH,
 SCRATCH_EACH, EPS) = offsets(DeltaArguments)  # fmt: skip


@inner
def _channels(args):
    """Queries, keys and values of a token."""
    keys = simd.peek_i64(args + KEY_HEADS) * simd.peek_i64(args + KEY_DIM)
    return 2 * keys + simd.peek_i64(args + VALUE_HEADS) * simd.peek_i64(args + VALUE_DIM)


@inner
def _is_fresh(args, first):
    """Whether the sequence whose first new token is this row remembers nothing."""
    return simd.peek_i64(simd.peek_i64(args + POSITIONS) + 8 * first) == 0


@inner
def _convolve(args, span, channel, width, before):
    """silu of the convolution of some channels, in their place, and what the next pass needs.

    before: room for these channels of taps - 1 tokens.
    """
    stride, past = simd.peek_i64(args + X_STRIDE), simd.peek_i64(args + TAPS) - 1
    first, count = simd.peek_i64(span), simd.peek_i64(span + 8)
    row = 4 * _channels(args)
    x = simd.peek_i64(args + X) + first * stride + 4 * channel
    state = simd.peek_i64(args + CONV) + simd.peek_i64(span + 16) * past * row + 4 * channel
    weight = simd.peek_i64(args + TAPS_WEIGHT) + 4 * channel
    fresh = _is_fresh(args, first)
    convolve(
        x, stride, count, state, row, past, fresh, weight, np.float32(1.0), 0, 4 * width, before,
        True,
    )  # fmt: skip


@inner
def _unit(args, span, channel, width, scale):
    """Rows of a head's channels, of length `scale`."""
    stride, count = simd.peek_i64(args + X_STRIDE), simd.peek_i64(span + 8)
    x = simd.peek_i64(args + X) + simd.peek_i64(span) * stride + 4 * channel
    for _ in range(count):
        total = simd.splat_f32(np.float32(0.0))
        for i in range(0, 4 * width, 64):
            v = simd.load_f32(x + i)
            total = simd.mul_add(v, v, total)
        factor = simd.splat_f32(scale / np.sqrt(simd.sum_f32(total) + _EPS))
        for i in range(0, 4 * width, 64):
            simd.store_f32(x + i, simd.mul(simd.load_f32(x + i), factor))
        x += stride


@inner
def _gates(args, span, head):
    """What a value head forgets and how much it is corrected, where a and b were."""
    stride, count = simd.peek_i64(args + BA_STRIDE), simd.peek_i64(span + 8)
    b = simd.peek_i64(args + BA) + simd.peek_i64(span) * stride + 4 * head
    a = b + 4 * simd.peek_i64(args + VALUE_HEADS)
    rate = np.exp(simd.peek_f32(simd.peek_i64(args + DECAY) + 4 * head))
    bias, one = simd.peek_f32(simd.peek_i64(args + DT_BIAS) + 4 * head), np.float32(1.0)
    for _ in range(count):
        simd.poke_f32(a, np.exp(-rate * softplus(simd.peek_f32(a) + bias)))
        simd.poke_f32(b, one / (one + np.exp(-simd.peek_f32(b))))
        a, b = a + stride, b + stride


@inner
def _prepare(args, item, scratch):
    """Queries, keys, or values and gates, of a key head of a sequence."""
    heads, dim = simd.peek_i64(args + KEY_HEADS), simd.peek_i64(args + KEY_DIM)
    group = simd.peek_i64(args + VALUE_HEADS) // heads
    span = simd.peek_i64(args + SPANS) + item // (3 * heads) * _SPAN_BYTES
    part, head = item // heads % 3, item % heads
    if part < 2:
        channel = (part * heads + head) * dim
        _convolve(args, span, channel, dim, scratch)
        scale = np.float32(1.0) / np.sqrt(np.float32(dim)) if part == 0 else np.float32(1.0)
        _unit(args, span, channel, dim, scale)
        return
    width = group * simd.peek_i64(args + VALUE_DIM)
    _convolve(args, span, 2 * heads * dim + head * width, width, scratch)
    for one in range(head * group, (head + 1) * group):
        _gates(args, span, one)


@inlined
def _correction(known, v, decay, beta):
    """What a state lacks of a value, 16 channels."""
    return simd.mul(simd.add(v, simd.mul(known, decay)), beta)


@inner
def _wide_step(memory, q, k, v, out, dim, decay, beta, both):
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
def _step(memory, row, q, k, v, out, dim, decay, beta, both):
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
def _dot(x, y, count):
    total = simd.splat_f32(np.float32(0.0))
    for i in range(0, 4 * count, 64):
        total = simd.mul_add(simd.load_f32(x + i), simd.load_f32(y + i), total)
    return simd.sum_f32(total)


@inner
def _normalized(args, out, z, dim):
    """out = norm(out) * silu(z), of a head of a token."""
    mean = _dot(out, out, dim) / np.float32(dim)
    factor = simd.splat_f32(np.float32(1.0) / np.sqrt(mean + simd.peek_f32(args + EPS)))
    weight = simd.peek_i64(args + NORM)
    for i in range(0, 4 * dim, 64):
        v = simd.mul(simd.mul(simd.load_f32(out + i), factor), simd.load_f32(weight + i))
        simd.store_f32(out + i, simd.mul(v, activated(_SILU, simd.load_f32(z + i))))


@inner
def _head(args, item):
    """All new tokens of a value head of a sequence."""
    heads, dim = simd.peek_i64(args + VALUE_HEADS), simd.peek_i64(args + KEY_DIM)
    width, panel = simd.peek_i64(args + VALUE_DIM), simd.peek_i64(args + PANEL)
    key_heads, channels = simd.peek_i64(args + KEY_HEADS), _channels(args)
    span, head = simd.peek_i64(args + SPANS) + item // heads * _SPAN_BYTES, item % heads
    first, count = simd.peek_i64(span), simd.peek_i64(span + 8)
    nbytes = 4 * dim * width
    memory = simd.peek_i64(args + MEMORY) + (simd.peek_i64(span + 16) * heads + head) * nbytes
    if _is_fresh(args, first):
        clear(memory, nbytes)
    stride, ba_stride = simd.peek_i64(args + X_STRIDE), simd.peek_i64(args + BA_STRIDE)
    out_stride = simd.peek_i64(args + OUT_STRIDE)
    x = simd.peek_i64(args + X) + first * stride
    q = x + 4 * dim * (head // (heads // key_heads))
    v = x + 4 * (2 * key_heads * dim + head * width)
    b = simd.peek_i64(args + BA) + first * ba_stride + 4 * head
    out = simd.peek_i64(args + OUT) + first * out_stride + 4 * head * width
    for begin in range(0, width, panel):
        for token in range(count):
            query = q + token * stride
            key = query + 4 * key_heads * dim
            beta = simd.peek_f32(b + token * ba_stride)
            decay = simd.peek_f32(b + token * ba_stride + 4 * heads)
            both = _dot(query, key, dim)
            value, to = v + token * stride + 4 * begin, out + token * out_stride + 4 * begin
            if panel == 64:
                _wide_step(memory, query, key, value, to, dim, decay, beta, both)
            else:
                for i in range(0, 4 * panel, 64):
                    _step(
                        memory + i, 4 * panel, query, key, value + i, to + i, dim, decay, beta, both
                    )
        memory += 4 * dim * panel
    z = x + 4 * (channels + head * width)
    for token in range(count):
        _normalized(args, out + token * out_stride, z + token * stride, width)


@job
def delta_job(pool, thread, threads, args):
    """What heads need, then heads."""
    sequences = simd.peek_i64(args + SEQUENCES)
    scratch = simd.peek_i64(args + SCRATCH) + thread * simd.peek_i64(args + SCRATCH_EACH)
    parts = 3 * sequences * simd.peek_i64(args + KEY_HEADS)
    item = take(pool, 0)
    while item < parts:
        _prepare(args, item, scratch)
        finish(pool, 0)
        item = take(pool, 0)
    wait(pool, 0, parts)
    item = take(pool, 1)
    while item < sequences * simd.peek_i64(args + VALUE_HEADS):
        _head(args, item)
        item = take(pool, 1)
