"""What both updates have alike: arguments, and what is read and written of 16 weights."""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined
from qoff.kernels.cpu.operands import int64s, offsets

from . import lanes

ADAM, SGD, LION = range(3)


class UpdateArguments(ctypes.Structure):
    """Addresses, sizes, and numbers of the rule; see `update.Rule`.

    second: 0 where the rule has one moment. first_scale: 0 where moments are float32. weight: of a
    copy in bfloat16, or in float16 where `half` is 1; 0: there is none.
    """

    _fields_ = (
        *int64s(
            "rule", "n", "master", "grad", "narrow", "first", "second", "first_scale",
            "second_scale", "weight", "half", "nesterov", "scratch",
        ),
        *((name, ctypes.c_float) for name in (
            "grad_scale", "keep", "l2", "beta1", "rest1", "beta2", "rest2", "rate", "root", "eps",
        )),
    )  # fmt: skip


(RULE, N, MASTER, GRAD, NARROW, FIRST, SECOND, FIRST_SCALE, SECOND_SCALE, WEIGHT, HALF, NESTEROV,
 SCRATCH, GRAD_SCALE, KEEP, L2, BETA1, REST1, BETA2, REST2, RATE, ROOT, EPS) = offsets(
    UpdateArguments
)  # fmt: skip


@inlined
def _number(args, field):
    return simd.splat_f32(simd.peek_f32(args + field))


@inlined
def rule_numbers(args):
    """Of the rule, once for a loop: grad_scale, l2, keep, rate, root, eps, and four of means."""
    return (
        _number(args, GRAD_SCALE),
        _number(args, L2),
        _number(args, KEEP),
        _number(args, RATE),
        _number(args, ROOT),
        _number(args, EPS),
        _number(args, BETA1),
        _number(args, REST1),
        _number(args, BETA2),
        _number(args, REST2),
    )


@inlined
def memory(args):
    """Master, copy, both moments and gradient."""
    return (
        simd.peek_i64(args + MASTER),
        simd.peek_i64(args + WEIGHT),
        simd.peek_i64(args + FIRST),
        simd.peek_i64(args + SECOND),
        simd.peek_i64(args + GRAD),
    )


@inlined
def flags(args):
    """Whether copies are float16, gradients bfloat16 and decayed, momentum Nesterov's."""
    return (
        simd.peek_i64(args + HALF) != 0,
        simd.peek_i64(args + NARROW) != 0,
        simd.peek_f32(args + L2) != np.float32(0.0),
        simd.peek_i64(args + NESTEROV) != 0,
    )


@inlined
def gradient(numbers, grad, narrow, decays, at, weight):
    """16 gradients, scaled, and with a share of the weights."""
    g = simd.load_bf16(grad + 2 * at) if narrow else simd.load_f32(grad + 4 * at)
    g = simd.mul(g, numbers[0])
    return simd.mul_add(numbers[1], weight, g) if decays else g


@inlined
def next_weight(numbers, p, step):
    return simd.mul_add(numbers[3], step, simd.mul(p, numbers[2]))


@inlined
def write_weight(master, copy, half, at, p):
    simd.store_f32(master + 4 * at, p)
    if copy != 0:
        if half:
            lanes.store_f16(copy + 2 * at, p)
        else:
            lanes.store_bf16(copy + 2 * at, p)


@inlined
def by_first(rule, nesterov, g, m, m_next, old, new):
    """The step of a rule with one moment. old, new: factors of moment and gradient in it."""
    if rule == LION:
        return lanes.sign(simd.mul_add(old, m, simd.mul(new, g)))
    return simd.mul_add(old, m_next, g) if nesterov else m_next
