"""The update of a block whose moments are codes of 8 bits."""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined

from . import lanes
from .scratch import BLOCK
from .weights import (
    ADAM,
    BETA1,
    BETA2,
    EPS,
    FIRST,
    FIRST_SCALE,
    GRAD_SCALE,
    HALF,
    L2,
    LION,
    RATE,
    REST1,
    REST2,
    ROOT,
    SECOND,
    SECOND_SCALE,
    by_first,
    flags,
    gradient,
    memory,
    next_weight,
    write_weight,
)

_INVERSES = 2 * 4 * BLOCK  # behind roots in scratch: factors that make codes of them
_AHEAD = 1024  # weights: so far ahead their blocks are asked for
_SCALES = np.float32(2**-30), np.float32(2**30)  # factors of gradients whose squares are numbers


@inlined
def _share(wanted, largest):
    """wanted / largest, and 0 of 0."""
    return wanted / largest if largest != np.float32(0.0) else np.float32(0.0)


@inlined
def _scales(args, start):
    """Addresses of a block's scales."""
    block = 4 * (start // BLOCK)
    return simd.peek_i64(args + FIRST_SCALE) + block, simd.peek_i64(args + SECOND_SCALE) + block


@inlined
def _is_plain(args):
    """Whether Adam's moments are computed of gradients as they are."""
    scale = simd.peek_f32(args + GRAD_SCALE)
    return simd.peek_f32(args + L2) == np.float32(0.0) and _SCALES[0] < scale < _SCALES[1]


@inlined
def adam_numbers(args):
    """What Adam's blocks have alike, once for many.

    Units of both moments in which a gradient, and its square, are added as they are; factors of
    scales, in these units; and two of the step, m / (root sqrt(v) + eps).
    """
    scale = simd.peek_f32(args + GRAD_SCALE) if _is_plain(args) else np.float32(1.0)
    m_unit, v_unit = (
        simd.peek_f32(args + REST1) * scale,
        simd.peek_f32(args + REST2) * scale * scale,
    )
    m_kept = simd.peek_f32(args + BETA1) / m_unit * np.float32(1 / 127**2)
    v_kept = simd.peek_f32(args + BETA2) / v_unit
    factor = simd.peek_f32(args + RATE) * m_unit
    root, eps = np.float32(0.0), np.float32(np.inf)  # no step
    if abs(factor) > np.float32(1e-30):
        root = simd.peek_f32(args + ROOT) * np.sqrt(v_unit) / factor
        eps = simd.peek_f32(args + EPS) / factor
    return m_unit, v_unit, m_kept, v_kept, simd.splat_f32(root), simd.splat_f32(eps)


@inlined
def adam_scales(args, common, start):
    """Factors of a block's codes, asked for before they are needed."""
    of_first, of_second = _scales(args, start)
    root = np.sqrt(simd.peek_f32(of_second) * common[3])
    return simd.peek_f32(of_first) * common[2], root * np.float32(1 / 255**2)


@inlined
def _prepared(args, numbers, start, scratch):
    """Where the gradients of a block are, and whether in bfloat16; changed ones are in scratch."""
    master, _, _, _, grad = memory(args)
    _, narrow, decays, _ = flags(args)
    if _is_plain(args):
        return grad + (2 if narrow else 4) * start, narrow
    for i in range(0, BLOCK, 16):
        p = simd.load_f32(master + 4 * (start + i))
        simd.store_f32(scratch + 4 * i, gradient(numbers, grad, narrow, decays, start + i, p))
    return scratch, False


@inlined
def _ask(master, grad, narrow, first, second, i):
    """Ask for what is needed `_AHEAD` weights later: the processor sees no stream in bytes."""
    simd.prefetch(master + 4 * (i + _AHEAD))
    if not narrow or i & 31 == 0:
        simd.prefetch(grad + (2 if narrow else 4) * (i + _AHEAD))
    if i & 63 == 0:
        simd.prefetch(first + i + _AHEAD)
        simd.prefetch(second + i + _AHEAD)


@inlined
def adam_block(args, numbers, common, scales, start, scratch, spare):
    """Step one block whose moments are codes; roots of new moments go to scratch, scales home.

    common, scales: see above. spare: memory for its gradients, if they are to be changed.
    """
    grad, narrow = _prepared(args, numbers, start, spare)
    master, copy, first, second, _ = memory(args)
    master, first, second = master + 4 * start, first + start, second + start
    copy = copy + 2 * start if copy != 0 else 0
    half = simd.peek_i64(args + HALF) != 0
    roots, rest = common[4:]
    m_scale, v_scale = simd.splat_f32(scales[0]), simd.splat_f32(scales[1])
    most_m = most_v = simd.splat_f32(np.float32(0.0))
    for i in range(0, BLOCK, 16):
        _ask(master, grad, narrow, first, second, i)
        p = simd.load_f32(master + 4 * i)
        g = simd.load_bf16(grad + 2 * i) if narrow else simd.load_f32(grad + 4 * i)
        m = simd.mul_add(lanes.load_first(first + i), m_scale, g)
        v_root = simd.mul(lanes.load_second(second + i), v_scale)
        v = simd.mul_add(v_root, v_root, simd.mul(g, g))
        size = simd.absolute(m)
        most_m, most_v = simd.larger(most_m, size), simd.larger(most_v, v)
        reciprocal = lanes.reciprocal_root(v)
        simd.store_f32(scratch + 4 * i, simd.mul(m, lanes.reciprocal_root(size)))
        simd.store_f32(scratch + 4 * (BLOCK + i), lanes.reciprocal_root(reciprocal))
        below = simd.mul_add(simd.mul(v, reciprocal), roots, rest)
        p = simd.mul_add(m, lanes.reciprocal(below), simd.mul(p, numbers[2]))
        write_weight(master, copy, half, i, p)
    of_first, of_second = _scales(args, start)
    m_most, v_most = simd.largest(most_m), simd.largest(most_v)
    simd.poke_f32(of_first, m_most * common[0])
    simd.poke_f32(of_second, v_most * common[1])
    simd.poke_f32(scratch + _INVERSES, _share(np.float32(127), np.sqrt(m_most)))
    simd.poke_f32(scratch + _INVERSES + 4, _share(np.float32(255), np.sqrt(np.sqrt(v_most))))


@inlined
def block_of_one(args, numbers, rule, start, scratch):
    """The same of a rule with one moment."""
    master, copy, first, _, grad = memory(args)
    half, narrow, decays, nesterov = flags(args)
    beta1, rest1, beta2, rest2 = numbers[6:]
    of_first, _ = _scales(args, start)
    scale = simd.splat_f32(simd.peek_f32(of_first) * np.float32(1 / 127**2))
    most = simd.splat_f32(np.float32(0.0))
    for i in range(0, BLOCK, 16):
        at = start + i
        p = simd.load_f32(master + 4 * at)
        g = gradient(numbers, grad, narrow, decays, at, p)
        m = simd.mul(lanes.load_first(first + at), scale)
        if rule == LION:
            m_next = simd.mul_add(beta2, m, simd.mul(rest2, g))
        else:
            m_next = simd.mul_add(beta1, m, simd.mul(rest1, g))
        size = simd.absolute(m_next)
        most = simd.larger(most, size)
        simd.store_f32(scratch + 4 * i, simd.mul(m_next, lanes.reciprocal_root(size)))
        step = by_first(rule, nesterov, g, m, m_next, beta1, rest1)
        write_weight(master, copy, half, at, next_weight(numbers, p, step))
    largest = simd.largest(most)
    simd.poke_f32(of_first, largest)
    simd.poke_f32(scratch + _INVERSES, _share(np.float32(127), np.sqrt(largest)))


@inlined
def encode(args, rule, start, scratch):
    """Write a block's new moments, whose roots are in scratch, as codes."""
    first, second = simd.peek_i64(args + FIRST) + start, simd.peek_i64(args + SECOND) + start
    inverse = simd.splat_f32(simd.peek_f32(scratch + _INVERSES))
    for i in range(0, BLOCK, 16):
        lanes.store_first(first + i, simd.load_f32(scratch + 4 * i), inverse)
    if rule == ADAM:
        inverse = simd.splat_f32(simd.peek_f32(scratch + _INVERSES + 4))
        for i in range(0, BLOCK, 16):
            lanes.store_second(second + i, simd.load_f32(scratch + 4 * (BLOCK + i)), inverse)
