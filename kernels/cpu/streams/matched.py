"""Rows made as large as others on the CPU: `reference.streams.matched`."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.operands import address, check_rows, fail, int64s, offsets


class MatchedArguments(ctypes.Structure):
    """Addresses (0: none), strides in bytes, sizes."""

    _fields_ = (
        *int64s(
            "x", "x_stride", "like", "like_stride", "residual", "residual_stride", "out",
            "out_stride", "tokens", "k",
        ),
        ("sum_scale", ctypes.c_float),
    )  # fmt: skip


(X, X_STRIDE, LIKE, LIKE_STRIDE, RESIDUAL, RESIDUAL_STRIDE, OUT, OUT_STRIDE, M, K,
 SUM_SCALE) = offsets(MatchedArguments)  # fmt: skip
_LEAST = np.float32(1e-5)  # of a mean square that is divided by


@inner
def _mean_square(x, k):
    total = simd.splat_f32(np.float32(0.0))
    for i in range(0, 4 * k, 64):
        v = simd.load_f32(x + i)
        total = simd.mul_add(v, v, total)
    return simd.sum_f32(total) / np.float32(k)


@job
def matched_job(pool, thread, threads, args):
    """Token by token."""
    k, like = simd.peek_i64(args + K), simd.peek_i64(args + LIKE)
    residual = simd.peek_i64(args + RESIDUAL)
    last = simd.splat_f32(simd.peek_f32(args + SUM_SCALE))
    token = take(pool, 0)
    while token < simd.peek_i64(args + M):
        x = simd.peek_i64(args + X) + token * simd.peek_i64(args + X_STRIDE)
        out = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE)
        plus = residual + token * simd.peek_i64(args + RESIDUAL_STRIDE)
        factor = np.float32(1.0)
        if like != 0:
            target = _mean_square(like + token * simd.peek_i64(args + LIKE_STRIDE), k)
            factor = np.sqrt(target) / np.sqrt(max(_mean_square(x, k), _LEAST))
        for i in range(0, 4 * k, 64):
            v = simd.mul(simd.load_f32(x + i), simd.splat_f32(factor))
            if residual != 0:
                v = simd.add(v, simd.load_f32(plus + i))
            simd.store_f32(out + i, simd.mul(v, last))
        token = take(pool, 0)


def matched(
    x: Tensor,
    like: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    sum_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """See `reference.streams.matched`; float32, rows contiguous. Raises OpError."""
    tokens, k = x.shape
    if k % 16:
        fail("matched", f"rows of a multiple of 16 numbers, not {k}")
    if out is None:
        out = torch.empty(tokens, k)
    given = {"x": x, "like": like, "residual": residual, "out": out}
    for name, rows in given.items():
        if rows is not None:
            check_rows("matched", name, rows, tokens, k)
    places = [
        number
        for rows in given.values()
        for number in (address(rows), 0 if rows is None else 4 * rows.stride(0))
    ]
    if tokens:
        default_pool().run(matched_job.address, MatchedArguments(*places, tokens, k, sum_scale))
    return out
