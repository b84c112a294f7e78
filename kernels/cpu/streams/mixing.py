"""Mixtures of streams on the CPU: `reference.streams.predict` and `correct`."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.linear.activation import sigmoid
from qoff.kernels.cpu.operands import check_dense, check_rows, fail, int64s, offsets
from qoff.kernels.layout.streams import StreamRouter

LANES = 16


class MixingArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes; aside: `aside_floats` for each token."""

    _fields_ = (
        *int64s(
            "hidden", "hidden_stride", "rows", "rows_stride", "tokens", "streams", "k", "norm",
            "router", "mixing", "scale", "aside", "aside_stride",
        ),
        ("eps", ctypes.c_float),
    )  # fmt: skip


(HIDDEN, HIDDEN_STRIDE, ROWS, ROWS_STRIDE, M, STREAMS, K, NORM, ROUTER, MIXING, SCALE, ASIDE,
 ASIDE_STRIDE, EPS) = offsets(MixingArguments)  # fmt: skip


def aside_floats(streams: int) -> int:
    """Floats of a token beside its rows: what the router says, 16 times, factors, 16 lanes."""
    return 2 * LANES * streams + streams * streams


@inner
def _route(args, x, found):
    """The router's number for each stream, as 16 lanes each."""
    end = 4 * simd.peek_i64(args + K)
    norm = simd.peek_i64(args + NORM)
    total = simd.splat_f32(np.float32(0.0))
    for i in range(0, end, 64):
        v = simd.load_f32(x + i)
        total = simd.mul_add(v, v, total)
    k = np.float32(simd.peek_i64(args + K))
    root = np.sqrt(simd.sum_f32(total) / k + simd.peek_f32(args + EPS))
    factor = np.float32(1.0) / (root * k)
    for s in range(simd.peek_i64(args + STREAMS)):
        row = simd.peek_i64(args + ROUTER) + s * end
        total = simd.splat_f32(np.float32(0.0))
        for i in range(0, end, 64):
            v = simd.mul(simd.load_f32(x + i), simd.load_f32(norm + i))
            total = simd.mul_add(v, simd.load_f32(row + i), total)
        score = simd.splat_f32(simd.sum_f32(total) * factor)
        share = sigmoid(score, np.float32(2.0))  # (1 + tanh(score)) / 2
        two, less = simd.splat_f32(np.float32(2.0)), simd.splat_f32(np.float32(-1.0))
        simd.store_f32(found + 64 * s, simd.mul_add(share, two, less))


@inner
def _factors(args, routed, count, first, found):
    """`first` + rows of the matrix times what the router says, `count` numbers."""
    streams = simd.peek_i64(args + STREAMS)
    row = simd.peek_i64(args + MIXING)
    for i in range(count):
        total = first
        for s in range(streams):
            total += simd.peek_f32(row) * simd.peek_f32(routed + 64 * s)
            row += 4
        simd.poke_f32(found + 4 * i, total)


@job
def predict_job(pool, thread, threads, args):
    """Token by token."""
    streams, end = simd.peek_i64(args + STREAMS), 4 * simd.peek_i64(args + K)
    token = take(pool, 0)
    while token < simd.peek_i64(args + M):
        x = simd.peek_i64(args + HIDDEN) + token * simd.peek_i64(args + HIDDEN_STRIDE)
        out = simd.peek_i64(args + ROWS) + token * simd.peek_i64(args + ROWS_STRIDE)
        routed = simd.peek_i64(args + ASIDE) + token * simd.peek_i64(args + ASIDE_STRIDE)
        lanes = routed + 64 * streams
        factors = lanes + 64 * streams
        _route(args, x, routed)
        _factors(args, routed, streams * streams, np.float32(0.0), factors)
        for i in range(0, end, 64):
            for s in range(streams):
                simd.store_f32(lanes + 64 * s, simd.load_f32(x + s * end + i))
            for s in range(streams):
                total = simd.load_f32(lanes + 64 * s)
                for t in range(streams):
                    factor = simd.splat_f32(simd.peek_f32(factors + 4 * (s * streams + t)))
                    total = simd.mul_add(simd.load_f32(lanes + 64 * t), factor, total)
                simd.store_f32(x + s * end + i, total)
                if s == 0:
                    simd.store_f32(out + i, total)
        token = take(pool, 0)


@job
def correct_job(pool, thread, threads, args):
    """Token by token."""
    streams, end = simd.peek_i64(args + STREAMS), 4 * simd.peek_i64(args + K)
    scale = simd.peek_i64(args + SCALE)
    token = take(pool, 0)
    while token < simd.peek_i64(args + M):
        x = simd.peek_i64(args + HIDDEN) + token * simd.peek_i64(args + HIDDEN_STRIDE)
        found = simd.peek_i64(args + ROWS) + token * simd.peek_i64(args + ROWS_STRIDE)
        routed = simd.peek_i64(args + ASIDE) + token * simd.peek_i64(args + ASIDE_STRIDE)
        factors = routed + 64 * streams
        _route(args, found, routed)
        _factors(args, routed, streams, np.float32(1.0), factors)
        minus = simd.splat_f32(np.float32(-1.0))
        for i in range(0, end, 64):
            more = simd.mul_add(simd.load_f32(x + i), minus, simd.load_f32(found + i))
            for s in range(streams):
                factor = simd.splat_f32(simd.peek_f32(factors + 4 * s))
                total = simd.mul_add(more, factor, simd.load_f32(x + s * end + i))
                simd.store_f32(x + s * end + i, total)
                if s == 0:
                    simd.store_f32(found + i, simd.mul(total, simd.load_f32(scale + i)))
        token = take(pool, 0)


def predict(hidden: Tensor, router: StreamRouter, mixing: Tensor, out: Tensor) -> Tensor:
    """See `reference.streams.predict`; all is float32, rows are contiguous. Raises OpError."""
    count = router.streams
    check_dense("predict", "mixing", mixing, (count**3,))
    return _run("predict", predict_job.address, hidden, out, router, mixing, None)


def correct(
    hidden: Tensor, found: Tensor, router: StreamRouter, mixing: Tensor, scale: Tensor
) -> Tensor:
    """See `reference.streams.correct`; all is float32, rows are contiguous. Raises OpError."""
    check_dense("correct", "mixing", mixing, (router.streams**2,))
    check_dense("correct", "scale", scale, (found.shape[1],))
    return _run("correct", correct_job.address, hidden, found, router, mixing, scale)


def _run(
    op: str,
    address: int,
    hidden: Tensor,
    rows: Tensor,
    router: StreamRouter,
    mixing: Tensor,
    scale: Tensor | None,
) -> Tensor:
    count, (tokens, k) = router.streams, rows.shape
    if k % LANES:
        fail(op, f"streams have a multiple of {LANES} numbers, not {k}")
    check_rows(op, "hidden", hidden, tokens, count * k)
    check_rows(op, "rows", rows, tokens, k)
    check_dense(op, "norm", router.norm, (k,))
    check_dense(op, "router", router.weight, (count * k,))
    aside = torch.empty(tokens, aside_floats(count))
    if tokens:
        default_pool().run(
            address,
            MixingArguments(
                hidden.data_ptr(), 4 * hidden.stride(0), rows.data_ptr(), 4 * rows.stride(0),
                tokens, count, k, router.norm.data_ptr(), router.weight.data_ptr(),
                mixing.data_ptr(), 0 if scale is None else scale.data_ptr(), aside.data_ptr(),
                4 * aside.stride(0), router.eps,
            ),
        )  # fmt: skip
    return rows
