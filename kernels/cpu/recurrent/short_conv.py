"""Gated short convolutions on the CPU: see `layout.short_conv`."""

from __future__ import annotations

import ctypes

import numpy as np
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.operands import check_dense, check_rows, int64s, offsets
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import SPAN_FIELDS, LayerStates

from .convolution import convolve
from .scratch import TOGETHER, conv_bytes
from .states import check_states

_SPAN_BYTES = 8 * len(SPAN_FIELDS)


class ShortConvArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes; `scratch_each` bytes are a thread's."""

    OF_LAYER = ("weight", "conv")
    _fields_ = int64s(
        "bcx", "bcx_stride", "weight", "conv", "spans", "positions", "sequences", "channels",
        "taps", "out", "out_stride", "scratch", "scratch_each",
    )  # fmt: skip


(BCX, BCX_STRIDE, WEIGHT, CONV, SPANS, POSITIONS, SEQUENCES, CHANNELS, TAPS, OUT, OUT_STRIDE,
 SCRATCH, SCRATCH_EACH) = offsets(ShortConvArguments)  # fmt: skip


@inner
def _multiply(x, by, out, nbytes):
    for i in range(0, nbytes, 64):
        simd.store_f32(out + i, simd.mul(simd.load_f32(x + i), simd.load_f32(by + i)))


@inner
def _part(args, span, first, width, before):
    """All new tokens of a sequence, some channels."""
    channels, past = simd.peek_i64(args + CHANNELS), simd.peek_i64(args + TAPS) - 1
    row, count, slot = simd.peek_i64(span), simd.peek_i64(span + 8), simd.peek_i64(span + 16)
    fresh = simd.peek_i64(simd.peek_i64(args + POSITIONS) + 8 * row) == 0
    stride, out_stride = simd.peek_i64(args + BCX_STRIDE), simd.peek_i64(args + OUT_STRIDE)
    b = simd.peek_i64(args + BCX) + row * stride + 4 * first
    c, x = b + 4 * channels, b + 8 * channels
    out = simd.peek_i64(args + OUT) + row * out_stride + 4 * first
    state = simd.peek_i64(args + CONV) + 4 * (slot * past * channels + first)
    weight = simd.peek_i64(args + WEIGHT) + 4 * first
    for token in range(count):
        at = token * stride
        _multiply(x + at, b + at, x + at, 4 * width)
    convolve(
        x, stride, count, state, 4 * channels, past, fresh, weight, np.float32(1.0), 0, 4 * width,
        before, False,
    )  # fmt: skip
    for token in range(count):
        at = token * stride
        _multiply(x + at, c + at, out + token * out_stride, 4 * width)


@job
def short_conv_job(pool, thread, threads, args):
    """All sequences, in parts of their channels."""
    channels = simd.peek_i64(args + CHANNELS)
    before = simd.peek_i64(args + SCRATCH) + thread * simd.peek_i64(args + SCRATCH_EACH)
    parts = (channels + TOGETHER - 1) // TOGETHER
    item = take(pool, 0)
    while item < parts * simd.peek_i64(args + SEQUENCES):
        span = simd.peek_i64(args + SPANS) + item // parts * _SPAN_BYTES
        first = item % parts * TOGETHER
        _part(args, span, first, min(TOGETHER, channels - first), before)
        item = take(pool, 0)


def short_conv(
    bcx: Tensor,
    weight: Tensor,
    shape: ShortConvShape,
    states: LayerStates,
    ragged: Ragged,
    *,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """A short convolution of a layer's new tokens: see `reference.short_conv.short_conv`.

    bcx, out: float32, rows contiguous; the former is overwritten. Raises OpError.
    """
    op, tokens, pool = "short_conv", len(bcx), pool or default_pool()
    out = bcx.new_empty(tokens, shape.channels) if out is None else out
    check_rows(op, "bcx", bcx, tokens, shape.width)
    check_rows(op, "out", out, tokens, shape.channels)
    check_dense(op, "weight", weight, (shape.taps * shape.channels,))
    check_states(op, states, shape, ragged, tokens)
    arguments = ShortConvArguments(
        bcx=bcx.data_ptr(), bcx_stride=4 * bcx.stride(0), weight=weight.data_ptr(),
        conv=states.conv.data_ptr(), spans=states.spans.data_ptr(),
        positions=ragged.positions.data_ptr(), sequences=len(states.spans),
        channels=shape.channels, taps=shape.taps, out=out.data_ptr(), out_stride=4 * out.stride(0),
        scratch_each=conv_bytes(1, shape),
    )  # fmt: skip
    with pool.lock:
        arguments.scratch = pool.workspace(conv_bytes(pool.threads, shape))
        pool.run(short_conv_job.address, arguments)
    return out
