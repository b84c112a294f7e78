"""Outputs of attention in place, as rotated V would give them, and back."""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner


@inner
def _powers(run):
    """1 / 2**(n // 2) for a run of 2**n channels."""
    factor = np.float32(1.0)
    while run >= 4:
        run //= 4
        factor *= np.float32(0.5)
    return factor


@inner
def _rotate(x, dim, run, factor):
    """Each run of channels at x, 16 or more, times a matrix of +-1 and a factor."""
    vector_factor = simd.splat_f32(factor)
    for i in range(0, 4 * dim, 64):
        simd.store_f32(x + i, simd.mul(simd.hadamard(simd.load_f32(x + i)), vector_factor))
    minus = simd.splat_f32(np.float32(-1.0))
    stride = 64
    while stride < 4 * run:
        for start in range(0, 4 * dim, 2 * stride):
            for i in range(start, start + stride, 64):
                a, b = simd.load_f32(x + i), simd.load_f32(x + stride + i)
                simd.store_f32(x + i, simd.add(a, b))
                simd.store_f32(x + stride + i, simd.mul_add(b, minus, a))
        stride *= 2


@inner
def rotate(x, dim, run):
    """Rotate one head, float32 at address x: see `rotation.rotate_values`."""
    _rotate(x, dim, run, _powers(run))


@inner
def rotate_back(x, dim, run):
    """Undo `rotate`."""
    _rotate(x, dim, run, np.float32(1.0) / (_powers(run) * np.float32(run)))
