"""Scores that level off: soft_cap * tanh(score / soft_cap), as Gemma 2 has them."""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner


@inner
def capped(scores, soft_cap):
    """16 capped scores; tanh(x) is 1 - 2 / (exp(2 x) + 1)."""
    one = simd.splat_f32(np.float32(1.0))
    power = simd.exp(simd.mul(scores, simd.splat_f32(np.float32(2.0) / soft_cap)))
    less = simd.div(simd.splat_f32(np.float32(-2.0)), simd.add(power, one))
    return simd.mul(simd.add(less, one), simd.splat_f32(soft_cap))


@inner
def cap_scores(scores, count, soft_cap):
    """Cap `count` scores in memory, a multiple of 16."""
    for i in range(0, 4 * count, 64):
        simd.store_f32(scores + i, capped(simd.load_f32(scores + i), soft_cap))
