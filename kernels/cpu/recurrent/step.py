"""How far a token goes: what forgetting is measured by."""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner


@inner
def softplus(x):
    """log(1 + exp(x)), as torch has it."""
    if x <= np.float32(20.0):
        return np.log1p(np.exp(x))
    return x


@inlined
def softplus_16(x):
    """log(1 + exp(x)) of 16 numbers, with a relative error below 1e-6.

    It is max(x, 0) + log(1 + y) with y = exp(-|x|), up to 1, and log(1 + y) = 2 atanh(y / (2 + y)),
    a series of odd powers of at most 1/3.
    """
    y = simd.exp(simd.mul(simd.absolute(x), simd.splat_f32(np.float32(-1.0))))
    s = simd.div(y, simd.add(y, simd.splat_f32(np.float32(2.0))))
    square = simd.mul(s, s)
    series = simd.splat_f32(np.float32(2.0 / 13.0))
    series = simd.mul_add(series, square, simd.splat_f32(np.float32(2.0 / 11.0)))
    series = simd.mul_add(series, square, simd.splat_f32(np.float32(2.0 / 9.0)))
    series = simd.mul_add(series, square, simd.splat_f32(np.float32(2.0 / 7.0)))
    series = simd.mul_add(series, square, simd.splat_f32(np.float32(2.0 / 5.0)))
    series = simd.mul_add(series, square, simd.splat_f32(np.float32(2.0 / 3.0)))
    series = simd.mul_add(series, square, simd.splat_f32(np.float32(2.0)))
    return simd.mul_add(s, series, simd.maximum(x, simd.splat_f32(np.float32(0.0))))
