"""RMSNorm and LayerNorm of rows, as a part of other jobs and as one of its own."""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.operands import int64s, offsets


class NormArguments(ctypes.Structure):
    """One norm: addresses of its weight (0: none) and bias, whether the mean is subtracted.

    scale: what the weight is multiplied by.
    """

    _fields_ = (
        *int64s("weight", "bias", "centered"),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class RowsArguments(ctypes.Structure):
    """out = sum_scale * (scale * norm(x) + residual): addresses, strides in bytes, sizes."""

    _fields_ = (
        ("norm", NormArguments),
        *int64s("x", "x_stride", "tokens", "k", "residual", "residual_stride", "out", "out_stride"),
        ("scale", ctypes.c_float),
        ("sum_scale", ctypes.c_float),
    )
    OF_LAYER = ("norm",)


WEIGHT, BIAS, CENTERED, EPS, WEIGHT_SCALE = offsets(NormArguments)
(NORM, X, X_STRIDE, M, K, RESIDUAL, RESIDUAL_STRIDE, OUT, OUT_STRIDE, SCALE, SUM_SCALE) = offsets(
    RowsArguments
)
LONG = 2048  # numbers of a row that are worth splitting between threads


@inner
def _mean(norm, x, k):
    """What is subtracted from a row."""
    total = simd.splat_f32(np.float32(0.0))
    if simd.peek_i64(norm + CENTERED) != 0:
        for i in range(0, 4 * k, 64):
            total = simd.add(simd.load_f32(x + i), total)
    return simd.sum_f32(total) / np.float32(k)


@inner
def _factor(norm, x, k, mean):
    """scale / sqrt of the mean square of what is left."""
    less = simd.splat_f32(-mean)
    total = simd.splat_f32(np.float32(0.0))
    for i in range(0, 4 * k, 64):
        v = simd.add(simd.load_f32(x + i), less)
        total = simd.mul_add(v, v, total)
    return simd.peek_f32(norm + WEIGHT_SCALE) / np.sqrt(
        simd.sum_f32(total) / np.float32(k) + simd.peek_f32(norm + EPS)
    )


@inner
def _normalized(norm, x, offset, mean, factor):
    """16 numbers of a row, `offset` bytes behind its start."""
    v = simd.add(simd.load_f32(x + offset), simd.splat_f32(-mean))
    weight = simd.load_f32(simd.peek_i64(norm + WEIGHT) + offset)
    v = simd.mul(simd.mul(v, simd.splat_f32(factor)), weight)
    bias = simd.peek_i64(norm + BIAS)
    return simd.add(v, simd.load_f32(bias + offset)) if bias != 0 else v


@inner
def normalize(norm, x, k, first, last, out):
    """Numbers [first, last) of a row of k, normalized, to the same place of `out`."""
    mean = _mean(norm, x, k)
    factor = _factor(norm, x, k, mean)
    for i in range(4 * first, 4 * last, 64):
        simd.store_f32(out + i, _normalized(norm, x, i, mean, factor))


@inner
def norm_all(pool, phase, threads, args):
    """All rows; long ones are split when there are few. What a part writes, no other reads."""
    tokens, k = simd.peek_i64(args + M), simd.peek_i64(args + K)
    residual, scale = simd.peek_i64(args + RESIDUAL), simd.splat_f32(simd.peek_f32(args + SCALE))
    last = simd.splat_f32(simd.peek_f32(args + SUM_SCALE))
    parts = threads if tokens < 2 * threads and k >= LONG else 1
    item = take(pool, phase)
    while item < tokens * parts:
        token, part = item // parts, item % parts
        x = simd.peek_i64(args + X) + token * simd.peek_i64(args + X_STRIDE)
        out = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE)
        plus = residual + token * simd.peek_i64(args + RESIDUAL_STRIDE)
        mean = _mean(args + NORM, x, k)
        factor = _factor(args + NORM, x, k, mean)
        for i in range(part * (k // 16) // parts, (part + 1) * (k // 16) // parts):
            v = simd.mul(_normalized(args + NORM, x, 64 * i, mean, factor), scale)
            if residual != 0:
                v = simd.add(v, simd.load_f32(plus + 64 * i))
            simd.store_f32(out + 64 * i, simd.mul(v, last))
        item = take(pool, phase)


@job
def norm_job(pool, thread, threads, args):
    """The whole op; its arguments are those of `RowsArguments`."""
    norm_all(pool, 0, threads, args)
