"""Activations of 16 outputs at once, as compiled functions."""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined
from qoff.kernels.layout.ending import ACTIVATIONS
from qoff.kernels.layout.ending import XIELU as XIELU_NAME
from qoff.kernels.layout.qexperts import ACTIVATIONS as GATES

# By name, from 1 on; 0 is none.
NUMBERS = {name: i + 1 for i, name in enumerate(dict.fromkeys((*ACTIVATIONS, *GATES, XIELU_NAME)))}
_SILU, _GELU, _RELU = NUMBERS["silu"], NUMBERS["gelu"], NUMBERS["relu"]
_RELU2 = NUMBERS["relu2"]
CLAMPED_SWIGLU, XIELU = NUMBERS["clamped_swiglu"], NUMBERS[XIELU_NAME]


@inlined
def sigmoid(x, factor):
    one = simd.splat_f32(np.float32(1.0))
    power = simd.exp(simd.mul(x, simd.splat_f32(np.float32(-factor))))
    return simd.div(one, simd.add(one, power))


@inlined
def _gelu(x):
    """x * (1 + erf(x / sqrt 2)) / 2; erf by Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most."""
    one = simd.splat_f32(np.float32(1.0))
    z = simd.mul(simd.absolute(x), simd.splat_f32(np.float32(0.7071067811865476)))
    t = simd.div(one, simd.mul_add(z, simd.splat_f32(np.float32(0.3275911)), one))
    poly = simd.splat_f32(np.float32(1.061405429))
    poly = simd.mul_add(poly, t, simd.splat_f32(np.float32(-1.453152027)))
    poly = simd.mul_add(poly, t, simd.splat_f32(np.float32(1.421413741)))
    poly = simd.mul_add(poly, t, simd.splat_f32(np.float32(-0.284496736)))
    poly = simd.mul_add(poly, t, simd.splat_f32(np.float32(0.254829592)))
    minus = simd.splat_f32(np.float32(-1.0))
    tail = simd.mul(simd.mul(poly, t), simd.exp(simd.mul(simd.mul(z, z), minus)))  # erfc(z)
    # x * (1 + erf) / 2 is x - x * erfc / 2 for x > 0 and x * erfc / 2 below: max(x, 0) - |x| ...
    zero = simd.splat_f32(np.float32(0.0))
    half = simd.splat_f32(np.float32(-0.5))
    return simd.mul_add(simd.mul(simd.absolute(x), half), tail, simd.maximum(zero, x))


@inlined
def activated(kind, x):
    """An activation of 16 numbers, `kind` one of NUMBERS but the last two; NaN stays NaN."""
    if kind == _SILU:
        one = simd.splat_f32(np.float32(1.0))
        negative = simd.mul(x, simd.splat_f32(np.float32(-1.0)))
        return simd.div(x, simd.add(one, simd.exp(negative)))
    if kind == _GELU:
        return _gelu(x)
    if kind in (_RELU, _RELU2):
        x = simd.maximum(simd.splat_f32(np.float32(0.0)), x)
        return simd.mul(x, x) if kind == _RELU2 else x
    one = simd.splat_f32(np.float32(1.0))  # (1 + tanh(u)) / 2 = sigmoid(2 u)
    square = simd.mul_add(simd.mul(x, x), simd.splat_f32(np.float32(0.044715)), one)
    return simd.mul(x, sigmoid(simd.mul(x, square), np.float32(1.5957691216057308)))


@inlined
def _below(limit, x):
    """The smaller of a limit and each number; NaN stays NaN."""
    minus = simd.splat_f32(np.float32(-1.0))
    return simd.mul(minus, simd.maximum(simd.splat_f32(-limit), simd.mul(minus, x)))


@inlined
def _less_one(x):
    """exp(x) - 1 of numbers up to 0, with a relative error below 1e-6; NaN stays NaN.

    That of 2x is p (p + 2), p that of x. Taylor's polynomial gives that of x / 32.
    """
    x = simd.maximum(simd.splat_f32(np.float32(-20.0)), x)  # beyond, it is -1
    x = simd.mul(x, simd.splat_f32(np.float32(1 / 32)))
    one, two = simd.splat_f32(np.float32(1.0)), simd.splat_f32(np.float32(2.0))
    poly = simd.splat_f32(np.float32(1.0))
    for divisor in (7.0, 6.0, 5.0, 4.0, 3.0, 2.0):
        poly = simd.mul_add(simd.mul(poly, simd.splat_f32(np.float32(1.0 / divisor))), x, one)
    value = simd.mul(poly, x)
    for _ in range(5):
        value = simd.mul(value, simd.add(value, two))
    return value


@inlined
def xielu(alpha_p, alpha_n, beta, eps, x):
    """xIELU of 16 numbers, see `layout.ending.Xielu`; NaN stays NaN."""
    low = _below(np.float32(0.0), x)
    minus = simd.mul(low, simd.splat_f32(np.float32(-1.0)))
    negative = simd.mul(simd.splat_f32(alpha_n), simd.add(_less_one(_below(eps, low)), minus))
    square = simd.mul(simd.splat_f32(alpha_p), simd.mul(x, x))
    return simd.mul_add(simd.splat_f32(beta), x, simd.where_positive(x, square, negative))


@inlined
def gated(kind, limit, gate, up):
    """The gated activation of 16 outputs, `kind` one of NUMBERS but the last; NaN stays NaN.

    limit: see `Ending`; 0 for none.
    """
    if kind != CLAMPED_SWIGLU:
        gate = activated(kind, gate)
        if limit != np.float32(0.0):
            gate, up = _below(limit, gate), _below(limit, simd.maximum(simd.splat_f32(-limit), up))
        return simd.mul(gate, up)
    seven = np.float32(7.0)
    gate, up = _below(seven, gate), _below(seven, simd.maximum(simd.splat_f32(-seven), up))
    gate = simd.mul(gate, sigmoid(gate, np.float32(1.702)))
    return simd.mul_add(up, gate, gate)
