"""The causal convolution of recurrent layers, and what of it the next pass needs."""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.linear.activation import NUMBERS, activated

_SILU = NUMBERS["silu"]


@inner
def _copy(source, target, nbytes):
    for i in range(0, nbytes, 64):
        simd.store_f32(target + i, simd.load_f32(source + i))


@inner
def clear(target, nbytes):
    for i in range(0, nbytes, 64):
        simd.store_f32(target + i, simd.splat_f32(np.float32(0.0)))


@inner
def convolve(
    x, stride, count, state, row, past, fresh, weight, factor, bias, nbytes, before, silu
):  # fmt: skip
    """Some channels of `count` tokens, in their place, and their `state`: of `past` tokens.

    nbytes: of these channels of a token; row: of all channels, in a state and a tap's weights.
    fresh: the sequence remembers nothing. factor: of the weights. bias: of these channels; 0: none.
    before: room for these channels of `past` tokens.
    """
    for i in range(past):
        if fresh:
            clear(before + i * nbytes, nbytes)
        else:
            _copy(state + i * row, before + i * nbytes, nbytes)
    for i in range(past):
        token = count - past + i
        source = x + token * stride if token >= 0 else before + (token + past) * nbytes
        _copy(source, state + i * row, nbytes)
    for token in range(count - 1, -1, -1):  # what is overwritten is not read again
        for i in range(0, nbytes, 64):
            total = simd.splat_f32(np.float32(0.0))
            for tap in range(past + 1):
                at = token - past + tap
                source = x + at * stride if at >= 0 else before + (at + past) * nbytes
                w = simd.load_f32(weight + tap * row + i)
                total = simd.mul_add(simd.load_f32(source + i), w, total)
            total = simd.mul(total, simd.splat_f32(factor))
            if bias != 0:
                total = simd.add(total, simd.load_f32(bias + i))
            if silu:
                total = activated(_SILU, total)
            simd.store_f32(x + token * stride + i, total)
