"""The compiled update of weights: one pass over them, their gradients and their moments."""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner, job
from qoff.kernels.cpu.jit.pool import take
from qoff.kernels.cpu.operands import int64s, offsets

from . import lanes
from .scratch import BLOCK, SCRATCH_BYTES

ADAM, SGD, LION = range(3)
_ITEM = 1 << 15  # weights that a thread takes at a time; whole blocks


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
def _numbers(args):
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
def _memory(args):
    """Master, copy, both moments and gradient."""
    return (
        simd.peek_i64(args + MASTER),
        simd.peek_i64(args + WEIGHT),
        simd.peek_i64(args + FIRST),
        simd.peek_i64(args + SECOND),
        simd.peek_i64(args + GRAD),
    )


@inlined
def _flags(args):
    """Whether copies are float16, gradients bfloat16 and decayed, momentum Nesterov's."""
    return (
        simd.peek_i64(args + HALF) != 0,
        simd.peek_i64(args + NARROW) != 0,
        simd.peek_f32(args + L2) != np.float32(0.0),
        simd.peek_i64(args + NESTEROV) != 0,
    )


@inlined
def _gradient(numbers, grad, narrow, decays, at, weight):
    """16 gradients, scaled, and with a share of the weights."""
    g = lanes.load_bf16(grad + 2 * at) if narrow else simd.load_f32(grad + 4 * at)
    g = simd.mul(g, numbers[0])
    return simd.mul_add(numbers[1], weight, g) if decays else g


@inlined
def _next_weight(numbers, p, step):
    return simd.mul_add(numbers[3], step, simd.mul(p, numbers[2]))


@inlined
def _write_weight(master, copy, half, at, p):
    simd.store_f32(master + 4 * at, p)
    if copy != 0:
        if half:
            lanes.store_f16(copy + 2 * at, p)
        else:
            lanes.store_bf16(copy + 2 * at, p)


@inlined
def _by_first(rule, nesterov, g, m, m_next, old, new):
    """The step of a rule with one moment. old, new: factors of moment and gradient in it."""
    if rule == LION:
        return lanes.sign(simd.mul_add(old, m, simd.mul(new, g)))
    return simd.mul_add(old, m_next, g) if nesterov else m_next


@inlined
def _wide(args, rule, start, stop):
    """Weights whose moments are float32."""
    numbers = _numbers(args)
    master, copy, first, second, grad = _memory(args)
    half, narrow, decays, nesterov = _flags(args)
    beta1, rest1, beta2, rest2 = numbers[6:]
    for at in range(start, stop, 16):
        p = simd.load_f32(master + 4 * at)
        g = _gradient(numbers, grad, narrow, decays, at, p)
        m = simd.load_f32(first + 4 * at)
        if rule == LION:
            m_next = simd.mul_add(beta2, m, simd.mul(rest2, g))
        else:
            m_next = simd.mul_add(beta1, m, simd.mul(rest1, g))
        simd.store_f32(first + 4 * at, m_next)
        if rule == ADAM:
            v = simd.load_f32(second + 4 * at)
            v_next = simd.mul_add(beta2, v, simd.mul(simd.mul(g, g), rest2))
            simd.store_f32(second + 4 * at, v_next)
            step = simd.div(m_next, simd.mul_add(lanes.sqrt(v_next), numbers[4], numbers[5]))
        else:
            step = _by_first(rule, nesterov, g, m, m_next, beta1, rest1)
        _write_weight(master, copy, half, at, _next_weight(numbers, p, step))


@inlined
def _share(wanted, largest):
    """wanted / largest, and 0 of 0."""
    return wanted / largest if largest != np.float32(0.0) else np.float32(0.0)


@inlined
def _change(args, numbers, rule, start, scratch):
    """Step one block whose moments are codes; new moments go to scratch, their scales home."""
    master, copy, first, second, grad = _memory(args)
    half, narrow, decays, nesterov = _flags(args)
    beta1, rest1, beta2, rest2 = numbers[6:]
    of_first = simd.peek_i64(args + FIRST_SCALE) + 4 * (start // BLOCK)
    of_second = simd.peek_i64(args + SECOND_SCALE) + 4 * (start // BLOCK)
    m_scale = simd.splat_f32(simd.peek_f32(of_first) * np.float32(1 / 127**2))
    v_scale = m_scale
    if rule == ADAM:
        v_scale = simd.splat_f32(np.sqrt(simd.peek_f32(of_second)) * np.float32(1 / 255**2))
    most_m = most_v = simd.splat_f32(np.float32(0.0))
    for i in range(0, BLOCK, 16):
        at = start + i
        p = simd.load_f32(master + 4 * at)
        g = _gradient(numbers, grad, narrow, decays, at, p)
        m = lanes.load_first(first + at, m_scale)
        if rule == LION:
            m_next = simd.mul_add(beta2, m, simd.mul(rest2, g))
        else:
            m_next = simd.mul_add(beta1, m, simd.mul(rest1, g))
        simd.store_f32(scratch + 4 * i, m_next)
        most_m = simd.larger(most_m, simd.absolute(m_next))
        if rule == ADAM:
            v = lanes.load_second(second + at, v_scale)
            v_next = simd.mul_add(beta2, v, simd.mul(simd.mul(g, g), rest2))
            reciprocal = lanes.reciprocal_root(v_next)
            simd.store_f32(scratch + 4 * (BLOCK + i), reciprocal)
            most_v = simd.larger(most_v, v_next)
            root = simd.mul_add(simd.mul(v_next, reciprocal), numbers[4], numbers[5])
            step = simd.mul(m_next, lanes.reciprocal(root))
        else:
            step = _by_first(rule, nesterov, g, m, m_next, beta1, rest1)
        _write_weight(master, copy, half, at, _next_weight(numbers, p, step))
    simd.poke_f32(of_first, simd.largest(most_m))
    if rule == ADAM:
        simd.poke_f32(of_second, simd.largest(most_v))


@inlined
def _encode(args, rule, start, scratch):
    """Write a block's new moments, which are in scratch, as codes."""
    first, second = simd.peek_i64(args + FIRST), simd.peek_i64(args + SECOND)
    largest = simd.peek_f32(simd.peek_i64(args + FIRST_SCALE) + 4 * (start // BLOCK))
    inverse = simd.splat_f32(_share(np.float32(127**2), largest))
    for i in range(0, BLOCK, 16):
        lanes.store_first(first + start + i, simd.load_f32(scratch + 4 * i), inverse)
    if rule == ADAM:
        largest = simd.peek_f32(simd.peek_i64(args + SECOND_SCALE) + 4 * (start // BLOCK))
        inverse = simd.splat_f32(_share(np.float32(255), np.sqrt(np.sqrt(largest))))
        for i in range(0, BLOCK, 16):
            reciprocal = simd.load_f32(scratch + 4 * (BLOCK + i))
            lanes.store_second(second + start + i, reciprocal, inverse)


@inner
def _some(args, rule, start, stop, scratch):
    if simd.peek_i64(args + FIRST_SCALE) == 0:
        _wide(args, rule, start, stop)
    else:
        numbers = _numbers(args)
        for block in range(start, stop + BLOCK, BLOCK):  # its scale is there a block later
            half = scratch + 2 * 4 * (block & BLOCK)
            if block < stop:
                _change(args, numbers, rule, block, half)
            if block > start:
                _encode(args, rule, block - BLOCK, scratch + 2 * 4 * (~block & BLOCK))


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
