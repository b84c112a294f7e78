"""Gated DeltaNet and KDA as one compiled job: convolutions, then each head of each sequence.

The recurrence goes token by token, so a prompt's bits do not depend on how it is cut. A panel of a
state, of 32 KiB for 128 x 64, stays in the first cache while all tokens of a pass go by it.
"""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.cpu.linear.activation import NUMBERS, activated, sigmoid
from qoff.kernels.cpu.operands import int64s, offsets
from qoff.kernels.layout.delta import L2_EPS
from qoff.kernels.layout.states import SPAN_FIELDS

from .convolution import clear, convolve
from .delta_step import dot, step, wide_step
from .step import softplus, softplus_16

_SILU = NUMBERS["silu"]
_EPS = np.float32(L2_EPS)
_SPAN_BYTES = 8 * len(SPAN_FIELDS)


class DeltaArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes; `scratch_each` bytes are a thread's.

    by_channel: 1 where each channel of keys forgets by itself, 0 where a head does. floor, learns:
    see `layout.delta`.
    """

    OF_LAYER = ("taps_weight", "decay", "dt_bias", "norm", "conv", "memory")
    _fields_ = (
        *int64s(
            "x", "x_stride", "z", "z_stride", "b", "b_stride", "a", "a_stride", "by_channel",
            "taps_weight", "decay", "dt_bias", "norm", "conv", "memory", "spans", "positions",
            "sequences", "key_heads", "value_heads", "key_dim", "value_dim", "panel", "taps", "out",
            "out_stride", "scratch", "scratch_each",
        ),
        ("eps", ctypes.c_float),
        ("floor", ctypes.c_float),
        ("learns", ctypes.c_float),
    )  # fmt: skip


(X, X_STRIDE, Z, Z_STRIDE, B, B_STRIDE, A, A_STRIDE, BY_CHANNEL, TAPS_WEIGHT, DECAY, DT_BIAS, NORM,
 CONV, MEMORY, SPANS, POSITIONS, SEQUENCES, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PANEL, TAPS,
 OUT, OUT_STRIDE, SCRATCH, SCRATCH_EACH, EPS, FLOOR, LEARNS) = offsets(DeltaArguments)  # fmt: skip


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
    first, count, one = simd.peek_i64(span), simd.peek_i64(span + 8), np.float32(1.0)
    most = simd.peek_f32(args + LEARNS)
    a_stride, b_stride = simd.peek_i64(args + A_STRIDE), simd.peek_i64(args + B_STRIDE)
    b = simd.peek_i64(args + B) + first * b_stride + 4 * head
    for _ in range(count):
        simd.poke_f32(b, most / (one + np.exp(-simd.peek_f32(b))))
        b += b_stride
    a, bias = simd.peek_i64(args + A) + first * a_stride, simd.peek_i64(args + DT_BIAS)
    rate = np.exp(simd.peek_f32(simd.peek_i64(args + DECAY) + 4 * head))
    if simd.peek_i64(args + BY_CHANNEL) == 0:
        a, dt = a + 4 * head, simd.peek_f32(bias + 4 * head)
        for _ in range(count):
            simd.poke_f32(a, np.exp(-rate * softplus(simd.peek_f32(a) + dt)))
            a += a_stride
        return
    nbytes, floor = 4 * simd.peek_i64(args + KEY_DIM), simd.peek_f32(args + FLOOR)
    a, bias, rates = a + head * nbytes, bias + head * nbytes, simd.splat_f32(-rate)
    least = simd.splat_f32(floor)
    for _ in range(count):
        for i in range(0, nbytes, 64):
            far = simd.add(simd.load_f32(a + i), simd.load_f32(bias + i))
            if floor == 0:
                left = simd.mul(rates, softplus_16(far))
            else:
                left = simd.mul(least, sigmoid(far, rate))
            simd.store_f32(a + i, simd.exp(left))
        a += a_stride


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


@inner
def _normalized(args, out, z, dim):
    """out = norm(out) times the gate of z, of a head of a token."""
    mean = dot(out, out, dim) / np.float32(dim)
    factor = simd.splat_f32(np.float32(1.0) / np.sqrt(mean + simd.peek_f32(args + EPS)))
    weight, by_channel = simd.peek_i64(args + NORM), simd.peek_i64(args + BY_CHANNEL) != 0
    for i in range(0, 4 * dim, 64):
        v = simd.mul(simd.mul(simd.load_f32(out + i), factor), simd.load_f32(weight + i))
        by = simd.load_f32(z + i)
        by = sigmoid(by, np.float32(1.0)) if by_channel else activated(_SILU, by)
        simd.store_f32(out + i, simd.mul(v, by))


@inner
def _panel(memory, panel, q, k, v, out, dim, decay, beta, both):
    """A token of a panel; decay: where it is."""
    if panel == 64:
        wide_step(memory, q, k, v, out, dim, decay, beta, both, False)
    else:
        for i in range(0, 4 * panel, 64):
            step(memory + i, 4 * panel, q, k, v + i, out + i, dim, decay, beta, both, False)


@inner
def _channels_panel(memory, panel, q, k, v, out, dim, decay, beta, both):
    """As `_panel`; decay: where those of the key's channels are."""
    if panel == 64:
        wide_step(memory, q, k, v, out, dim, decay, beta, both, True)
    else:
        for i in range(0, 4 * panel, 64):
            step(memory + i, 4 * panel, q, k, v + i, out + i, dim, decay, beta, both, True)


@inner
def _head(args, item):
    """All new tokens of a value head of a sequence."""
    heads, dim = simd.peek_i64(args + VALUE_HEADS), simd.peek_i64(args + KEY_DIM)
    width, panel = simd.peek_i64(args + VALUE_DIM), simd.peek_i64(args + PANEL)
    key_heads, by_channel = simd.peek_i64(args + KEY_HEADS), simd.peek_i64(args + BY_CHANNEL) != 0
    span, head = simd.peek_i64(args + SPANS) + item // heads * _SPAN_BYTES, item % heads
    first, count = simd.peek_i64(span), simd.peek_i64(span + 8)
    nbytes = 4 * dim * width
    memory = simd.peek_i64(args + MEMORY) + (simd.peek_i64(span + 16) * heads + head) * nbytes
    if _is_fresh(args, first):
        clear(memory, nbytes)
    stride, out_stride = simd.peek_i64(args + X_STRIDE), simd.peek_i64(args + OUT_STRIDE)
    a_stride, b_stride = simd.peek_i64(args + A_STRIDE), simd.peek_i64(args + B_STRIDE)
    x = simd.peek_i64(args + X) + first * stride
    q = x + 4 * dim * (head // (heads // key_heads))
    v = x + 4 * (2 * key_heads * dim + head * width)
    b = simd.peek_i64(args + B) + first * b_stride + 4 * head
    a = simd.peek_i64(args + A) + first * a_stride + 4 * head * (dim if by_channel else 1)
    out = simd.peek_i64(args + OUT) + first * out_stride + 4 * head * width
    for begin in range(0, width, panel):
        for token in range(count):
            query = q + token * stride
            key = query + 4 * key_heads * dim
            beta, decay = simd.peek_f32(b + token * b_stride), a + token * a_stride
            both = dot(query, key, dim)
            value, to = v + token * stride + 4 * begin, out + token * out_stride + 4 * begin
            if by_channel:
                _channels_panel(memory, panel, query, key, value, to, dim, decay, beta, both)
            else:
                _panel(memory, panel, query, key, value, to, dim, decay, beta, both)
        memory += 4 * dim * panel
    z_stride = simd.peek_i64(args + Z_STRIDE)
    z = simd.peek_i64(args + Z) + first * z_stride + 4 * head * width
    for token in range(count):
        _normalized(args, out + token * out_stride, z + token * z_stride, width)


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
