"""The compiled update of weights: one pass over them, their gradients and their moments."""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner, job
from qoff.kernels.cpu.jit.pool import take
from qoff.kernels.cpu.operands import int64s, offsets

from . import lanes

ADAM, SGD, LION = range(3)
BLOCK = 256  # moments of 8 bits that share a scale
SCRATCH_BYTES = 2 * 4 * BLOCK  # of a thread
_ITEM = 1 << 14  # weights that a thread takes at a time; whole blocks


class UpdateArguments(ctypes.Structure):
    """Addresses, sizes, and numbers of the rule; see `update.Rule`.

    second: 0 where the rule has one moment. first_scale: 0 where moments are float32. weight: of a
    bfloat16 copy, or 0.
    """

    _fields_ = (
        *int64s(
            "rule", "n", "master", "grad", "narrow", "first", "second", "first_scale",
            "second_scale", "weight", "nesterov", "scratch",
        ),
        *((name, ctypes.c_float) for name in (
            "grad_scale", "keep", "l2", "beta1", "rest1", "beta2", "rest2", "rate", "root", "eps",
        )),
    )  # fmt: skip


(RULE, N, MASTER, GRAD, NARROW, FIRST, SECOND, FIRST_SCALE, SECOND_SCALE, WEIGHT, NESTEROV, SCRATCH,
 GRAD_SCALE, KEEP, L2, BETA1, REST1, BETA2, REST2, RATE, ROOT, EPS) = offsets(
    UpdateArguments
)  # fmt: skip


@inlined
def _number(args, field):
    return simd.splat_f32(simd.peek_f32(args + field))


@inlined
def _gradient(args, at, weight):
    """16 gradients, scaled, and with a share of the weights."""
    grad = simd.peek_i64(args + GRAD)
    if simd.peek_i64(args + NARROW) != 0:
        g = lanes.load_bf16(grad + 2 * at)
    else:
        g = simd.load_f32(grad + 4 * at)
    return simd.mul_add(_number(args, L2), weight, simd.mul(g, _number(args, GRAD_SCALE)))


@inlined
def _next_first(args, rule, g, m):
    """The first moment after this gradient: beta1 * m + rest1 * g, of Lion with its beta2."""
    if rule == LION:
        return simd.mul_add(_number(args, BETA2), m, simd.mul(_number(args, REST2), g))
    return simd.mul_add(_number(args, BETA1), m, simd.mul(_number(args, REST1), g))


@inlined
def _next_second(args, g, v):
    square = simd.mul(simd.mul(g, g), _number(args, REST2))
    return simd.mul_add(_number(args, BETA2), v, square)


@inlined
def _next_weight(args, rule, p, g, m, m_next, v_next):
    if rule == ADAM:
        root = simd.mul_add(lanes.sqrt(v_next), _number(args, ROOT), _number(args, EPS))
        step = simd.div(m_next, root)
    elif rule == LION:
        mixed = simd.mul_add(_number(args, BETA1), m, simd.mul(_number(args, REST1), g))
        step = lanes.sign(mixed)
    elif simd.peek_i64(args + NESTEROV) != 0:
        step = simd.mul_add(_number(args, BETA1), m_next, g)
    else:
        step = m_next
    return simd.mul_add(_number(args, RATE), step, simd.mul(p, _number(args, KEEP)))


@inlined
def _write_weight(args, at, p):
    simd.store_f32(simd.peek_i64(args + MASTER) + 4 * at, p)
    copy = simd.peek_i64(args + WEIGHT)
    if copy != 0:
        lanes.store_bf16(copy + 2 * at, p)


@inlined
def _wide(args, rule, start, stop):
    """Weights whose moments are float32."""
    master, first = simd.peek_i64(args + MASTER), simd.peek_i64(args + FIRST)
    second = simd.peek_i64(args + SECOND)
    for at in range(start, stop, 16):
        p = simd.load_f32(master + 4 * at)
        g = _gradient(args, at, p)
        m = simd.load_f32(first + 4 * at)
        m_next = _next_first(args, rule, g, m)
        simd.store_f32(first + 4 * at, m_next)
        v_next = m_next
        if rule == ADAM:
            v_next = _next_second(args, g, simd.load_f32(second + 4 * at))
            simd.store_f32(second + 4 * at, v_next)
        _write_weight(args, at, _next_weight(args, rule, p, g, m, m_next, v_next))


@inlined
def _inverse(largest):
    """1 / largest, and 0 of 0."""
    return np.float32(1.0) / largest if largest != np.float32(0.0) else np.float32(0.0)


@inlined
def _block(args, rule, start, scratch):
    """One block of weights whose moments are codes."""
    master, first = simd.peek_i64(args + MASTER), simd.peek_i64(args + FIRST)
    second, number = simd.peek_i64(args + SECOND), start // BLOCK
    of_first = simd.peek_i64(args + FIRST_SCALE) + 4 * number
    of_second = simd.peek_i64(args + SECOND_SCALE) + 4 * number
    m_scale = simd.splat_f32(simd.peek_f32(of_first))
    v_scale = m_scale
    if rule == ADAM:
        v_scale = simd.splat_f32(simd.peek_f32(of_second))
    most_m = most_v = simd.splat_f32(np.float32(0.0))
    for i in range(0, BLOCK, 16):
        at = start + i
        p = simd.load_f32(master + 4 * at)
        g = _gradient(args, at, p)
        m = lanes.load_signed(first + at, m_scale)
        m_next = _next_first(args, rule, g, m)
        simd.store_f32(scratch + 4 * i, m_next)
        most_m = simd.larger(most_m, simd.absolute(m_next))
        v_next = m_next
        if rule == ADAM:
            v_next = _next_second(args, g, lanes.load_unsigned(second + at, v_scale))
            simd.store_f32(scratch + 4 * (BLOCK + i), v_next)
            most_v = simd.larger(most_v, v_next)
        _write_weight(args, at, _next_weight(args, rule, p, g, m, m_next, v_next))
    largest = simd.largest(most_m)
    simd.poke_f32(of_first, largest)
    inverse = simd.splat_f32(_inverse(largest))
    for i in range(0, BLOCK, 16):
        lanes.store_signed(first + start + i, simd.load_f32(scratch + 4 * i), inverse)
    if rule == ADAM:
        largest = simd.largest(most_v)
        simd.poke_f32(of_second, largest)
        inverse = simd.splat_f32(_inverse(largest))
        for i in range(0, BLOCK, 16):
            value = simd.load_f32(scratch + 4 * (BLOCK + i))
            lanes.store_unsigned(second + start + i, value, inverse)


@inner
def _some(args, rule, start, stop, scratch):
    if simd.peek_i64(args + FIRST_SCALE) == 0:
        _wide(args, rule, start, stop)
    else:
        for block in range(start, stop, BLOCK):
            _block(args, rule, block, scratch)


@job
def update_job(pool, thread, threads, args):
    """The whole update; its arguments are the fields above."""
    n, rule = simd.peek_i64(args + N), simd.peek_i64(args + RULE)
    scratch = simd.peek_i64(args + SCRATCH) + thread * SCRATCH_BYTES
    start = take(pool, 0) * _ITEM
    while start < n:
        stop = min(start + _ITEM, n)
        if rule == ADAM:
            _some(args, ADAM, start, stop, scratch)
        elif rule == LION:
            _some(args, LION, start, stop, scratch)
        else:
            _some(args, SGD, start, stop, scratch)
        start = take(pool, 0) * _ITEM
