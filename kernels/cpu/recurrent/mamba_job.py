"""Mamba 2 as one compiled job: convolutions, then heads of each sequence, then gates and norms.

The recurrence goes token by token, so a prompt's bits do not depend on how it is cut. A panel of a
state, of 32 KiB for 128 x 64, stays in the first cache while all tokens of a pass go by it, and is
read and written once a token.
"""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.cpu.linear.activation import NUMBERS, activated
from qoff.kernels.cpu.operands import int64s, offsets
from qoff.kernels.layout.states import SPAN_FIELDS

from .convolution import clear, convolve
from .scratch import TOGETHER
from .step import softplus

_SILU = NUMBERS["silu"]
_SPAN_BYTES = 8 * len(SPAN_FIELDS)
FACTORS = ("z_factor", "x_factor", "b_factor", "c_factor", "dt_factor")


class MambaArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes; `scratch_each` bytes are a thread's."""

    OF_LAYER = (
        "taps_weight", "conv_bias", "decay", "dt_bias", "skip", "norm", "conv", "memory",
    )  # fmt: skip
    _fields_ = (
        *int64s(
            "x", "x_stride", "tokens", "taps_weight", "conv_bias", "decay", "dt_bias", "skip",
            "norm", "conv", "memory", "spans", "positions", "sequences", "heads", "head_dim",
            "groups", "state", "panel", "taps", "out", "out_stride", "scratch", "scratch_each",
        ),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_float) for name in FACTORS),
    )  # fmt: skip


(X, X_STRIDE, TOKENS, TAPS_WEIGHT, CONV_BIAS, DECAY, DT_BIAS, SKIP, NORM, CONV, MEMORY, SPANS,
 POSITIONS, SEQUENCES, HEADS, HEAD_DIM, GROUPS, STATE, PANEL, TAPS, OUT, OUT_STRIDE, SCRATCH,
 SCRATCH_EACH, EPS, Z_FACTOR, X_FACTOR, _B_FACTOR, _C_FACTOR, DT_FACTOR) = (
    offsets(MambaArguments)
)  # fmt: skip


@inner
def _values(args):
    """Channels of x, and of z before it."""
    return simd.peek_i64(args + HEADS) * simd.peek_i64(args + HEAD_DIM)


@inner
def _channels(args):
    """Those of x, B and C."""
    return _values(args) + 2 * simd.peek_i64(args + GROUPS) * simd.peek_i64(args + STATE)


@inner
def _is_fresh(args, first):
    """Whether the sequence whose first new token is this row remembers nothing."""
    return simd.peek_i64(simd.peek_i64(args + POSITIONS) + 8 * first) == 0


@inner
def _convolve_section(args, span, channel, width, factor, before):
    """silu of the convolution of some channels, in their place, and what the next pass needs.

    factor: of all of them.
    """
    stride, past = simd.peek_i64(args + X_STRIDE), simd.peek_i64(args + TAPS) - 1
    first, count = simd.peek_i64(span), simd.peek_i64(span + 8)
    row = 4 * _channels(args)
    x = simd.peek_i64(args + X) + first * stride + 4 * (_values(args) + channel)
    state = simd.peek_i64(args + CONV) + simd.peek_i64(span + 16) * past * row + 4 * channel
    weight, bias = simd.peek_i64(args + TAPS_WEIGHT) + 4 * channel, simd.peek_i64(args + CONV_BIAS)
    if bias != 0:
        bias += 4 * channel
    fresh = _is_fresh(args, first)
    convolve(
        x, stride, count, state, row, past, fresh, weight, factor, bias, 4 * width, before, True
    )


@inner
def _convolve(args, span, channel, width, before):
    """The same of channels of x, of B and of C, which have a factor each."""
    values, state = _values(args), simd.peek_i64(args + GROUPS) * simd.peek_i64(args + STATE)
    end = channel + width
    for section in range(3):
        begin = 0 if section == 0 else values + (section - 1) * state
        stop = values + section * state
        first, last = max(channel, begin), min(end, stop)
        if first < last:
            factor = simd.peek_f32(args + X_FACTOR + 4 * section)
            _convolve_section(args, span, first, last - first, factor, before)


@inner
def _wide_step(memory, b, c, x, out, nbytes, decay, step, skip):
    """A token of a panel of 64 channels; nbytes: of B."""
    forget, t, d = simd.splat_f32(decay), simd.splat_f32(step), simd.splat_f32(skip)
    x0, x1, x2, x3 = (
        simd.load_f32(x), simd.load_f32(x + 64), simd.load_f32(x + 128), simd.load_f32(x + 192),
    )  # fmt: skip
    y0, y1, y2, y3 = simd.mul(x0, d), simd.mul(x1, d), simd.mul(x2, d), simd.mul(x3, d)
    x0, x1, x2, x3 = simd.mul(x0, t), simd.mul(x1, t), simd.mul(x2, t), simd.mul(x3, t)
    at = memory
    for i in range(0, nbytes, 4):
        learn, ask = simd.splat_f32(simd.peek_f32(b + i)), simd.splat_f32(simd.peek_f32(c + i))
        s0 = simd.mul_add(x0, learn, simd.mul(simd.load_f32(at), forget))
        s1 = simd.mul_add(x1, learn, simd.mul(simd.load_f32(at + 64), forget))
        s2 = simd.mul_add(x2, learn, simd.mul(simd.load_f32(at + 128), forget))
        s3 = simd.mul_add(x3, learn, simd.mul(simd.load_f32(at + 192), forget))
        simd.store_f32(at, s0)
        simd.store_f32(at + 64, s1)
        simd.store_f32(at + 128, s2)
        simd.store_f32(at + 192, s3)
        y0, y1 = simd.mul_add(s0, ask, y0), simd.mul_add(s1, ask, y1)
        y2, y3 = simd.mul_add(s2, ask, y2), simd.mul_add(s3, ask, y3)
        at += 256
    simd.store_f32(out, y0)
    simd.store_f32(out + 64, y1)
    simd.store_f32(out + 128, y2)
    simd.store_f32(out + 192, y3)


@inner
def _step(memory, row, b, c, x, out, nbytes, decay, step, skip):
    """A token of 16 channels of a panel whose rows have `row` bytes."""
    forget, at = simd.splat_f32(decay), memory
    v = simd.load_f32(x)
    y = simd.mul(v, simd.splat_f32(skip))
    v = simd.mul(v, simd.splat_f32(step))
    for i in range(0, nbytes, 4):
        learned = simd.mul(v, simd.splat_f32(simd.peek_f32(b + i)))
        s = simd.mul_add(simd.load_f32(at), forget, learned)
        simd.store_f32(at, s)
        y = simd.mul_add(s, simd.splat_f32(simd.peek_f32(c + i)), y)
        at += row
    simd.store_f32(out, y)


@inner
def _head(args, item):
    """All new tokens of a head of a sequence."""
    heads, dim = simd.peek_i64(args + HEADS), simd.peek_i64(args + HEAD_DIM)
    groups, state, panel = (
        simd.peek_i64(args + GROUPS), simd.peek_i64(args + STATE), simd.peek_i64(args + PANEL),
    )  # fmt: skip
    span, head = simd.peek_i64(args + SPANS) + item // heads * _SPAN_BYTES, item % heads
    first, count = simd.peek_i64(span), simd.peek_i64(span + 8)
    nbytes = 4 * state * dim
    memory = simd.peek_i64(args + MEMORY) + (simd.peek_i64(span + 16) * heads + head) * nbytes
    if _is_fresh(args, first):
        clear(memory, nbytes)
    stride, out_stride = simd.peek_i64(args + X_STRIDE), simd.peek_i64(args + OUT_STRIDE)
    line = simd.peek_i64(args + X) + first * stride
    x = line + 4 * (heads * dim + head * dim)
    b = line + 4 * (2 * heads * dim + head // (heads // groups) * state)
    dt = line + 4 * (heads * dim + _channels(args) + head)
    out = simd.peek_i64(args + OUT) + first * out_stride + 4 * head * dim
    rate = np.exp(simd.peek_f32(simd.peek_i64(args + DECAY) + 4 * head))
    bias = simd.peek_f32(simd.peek_i64(args + DT_BIAS) + 4 * head)
    skip = simd.peek_f32(simd.peek_i64(args + SKIP) + 4 * head)
    factor = simd.peek_f32(args + DT_FACTOR)
    for token in range(count):
        at = dt + token * stride
        simd.poke_f32(at, softplus(simd.peek_f32(at) * factor + bias))
    for begin in range(0, 4 * dim, 4 * panel):
        for token in range(count):
            there = token * stride
            step = simd.peek_f32(dt + there)
            decay = np.exp(-rate * step)
            learn = b + there
            ask = learn + 4 * groups * state
            source, to = x + there + begin, out + token * out_stride + begin
            if panel == 64:
                _wide_step(memory, learn, ask, source, to, 4 * state, decay, step, skip)
            else:
                for i in range(0, 4 * panel, 64):
                    _step(
                        memory + i, 4 * panel, learn, ask, source + i, to + i, 4 * state, decay,
                        step, skip,
                    )  # fmt: skip
        memory += 4 * state * panel


@inner
def _gated(args, token):
    """out = norm(out * silu(z)) of a token, each group by itself, if there is a norm."""
    z = simd.peek_i64(args + X) + token * simd.peek_i64(args + X_STRIDE)
    out = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE)
    weight, groups = simd.peek_i64(args + NORM), simd.peek_i64(args + GROUPS)
    width, normed = _values(args) // groups, weight != 0
    before = simd.splat_f32(simd.peek_f32(args + Z_FACTOR))
    for _ in range(groups):
        total = simd.splat_f32(np.float32(0.0))
        for i in range(0, 4 * width, 64):
            gate = activated(_SILU, simd.mul(simd.load_f32(z + i), before))
            v = simd.mul(simd.load_f32(out + i), gate)
            simd.store_f32(out + i, v)
            total = simd.mul_add(v, v, total)
        if normed:
            mean = simd.sum_f32(total) / np.float32(width)
            factor = simd.splat_f32(np.float32(1.0) / np.sqrt(mean + simd.peek_f32(args + EPS)))
            for i in range(0, 4 * width, 64):
                v = simd.mul(simd.load_f32(out + i), factor)
                simd.store_f32(out + i, simd.mul(v, simd.load_f32(weight + i)))
        z, out, weight = z + 4 * width, out + 4 * width, weight + 4 * width


@job
def mamba_job(pool, thread, threads, args):
    """What heads need, then heads, then gates and norms."""
    sequences, channels = simd.peek_i64(args + SEQUENCES), _channels(args)
    scratch = simd.peek_i64(args + SCRATCH) + thread * simd.peek_i64(args + SCRATCH_EACH)
    parts = (channels + TOGETHER - 1) // TOGETHER
    item = take(pool, 0)
    while item < parts * sequences:
        span = simd.peek_i64(args + SPANS) + item // parts * _SPAN_BYTES
        first = item % parts * TOGETHER
        _convolve(args, span, first, min(TOGETHER, channels - first), scratch)
        finish(pool, 0)
        item = take(pool, 0)
    wait(pool, 0, parts * sequences)
    count = sequences * simd.peek_i64(args + HEADS)
    item = take(pool, 1)
    while item < count:
        _head(args, item)
        finish(pool, 1)
        item = take(pool, 1)
    wait(pool, 1, count)
    item = take(pool, 2)
    while item < simd.peek_i64(args + TOKENS):
        _gated(args, item)
        item = take(pool, 2)
