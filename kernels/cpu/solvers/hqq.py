"""Half-quadratic splitting, and compact scales near what it finds: 16 groups at a time.

Each lane of a vector has a group of its own, so nothing is added up across lanes.
`kernels.reference.hqq` and `quant.solvers.compact` say what is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.emit import (
    F32,
    I32,
    I64,
    LANES,
    V_F16,
    V_F32,
    V_I32,
    absolute,
    const_f32,
    const_i32,
    const_i64,
    fma,
    load,
    loop,
    maximum,
    nearest,
    splat,
    store,
)
from qoff.kernels.cpu.jit.emit import minimum as emit_minimum
from qoff.kernels.cpu.jit.powers import exp2, log2
from qoff.kernels.cpu.jit.simd import vector_intrinsic
from qoff.kernels.layout.hqq import BETA, CLIP, ITERATIONS, KAPPA, NORM, SPANS, TINY, ZEROS
from qoff.kernels.layout.scales import EXPONENT, MANTISSA, SHIFT, STEPS

from .parts import by_parts

_INFINITE = float("inf")
_PART = 1 << 16  # weights for a thread, at least
_i64, _f32 = types.int64, types.float32
Range = tuple[Tensor, Tensor]


def _level(b, moved, top):
    """The code nearest to what is in units of codes."""
    return emit_minimum(b, maximum(b, nearest(b, moved), const_f32(0.0)), top)


def _rows(b, tile, size, carried, each):
    """`each(number, *carried)` of all numbers, one after another; its last values."""
    index, phis, close = loop(b, size, carried)
    number = load(b, b.add(tile, b.shl(index, const_i64(6))), 0, V_F32)
    return close(each(number, *phis))


def _size(b, x):
    return maximum(b, absolute(b, x), const_f32(TINY))


def _power(b, x, exponent):
    return exp2(b, b.fmul(log2(b, x), const_f32(exponent)))


def _inverse(b, scale):
    """1 / scale; of 0, 0."""
    none = b.fcmp_ordered("==", scale, const_f32(0.0))
    return b.select(none, const_f32(0.0), b.fdiv(const_f32(1.0), scale))


def _split(b, tile, size, scale, minimum, top, inverse_beta):
    """The loss of a range; slope and offset that bring it closer, in units of the scale."""
    zero = const_f32(0.0)
    inverse = _inverse(b, scale)
    moved_zero = b.fmul(b.fsub(zero, minimum), inverse)

    def each(number, lost, levels, dense, squares, products):
        moved = fma(b, number, inverse, moved_zero)
        level = _level(b, moved, top)
        residual = b.fsub(moved, level)
        distance = _size(b, residual)
        slope = _power(b, distance, NORM - 1)
        # The paper's residual - shrink(residual) is residual clamped to size**(p-1) / beta.
        limit = b.fmul(slope, inverse_beta)
        part = maximum(b, emit_minimum(b, residual, limit), b.fsub(zero, limit))
        return [
            fma(b, slope, distance, lost),
            b.fadd(levels, level),
            b.fadd(dense, part),
            fma(b, level, level, squares),
            fma(b, level, part, products),
        ]

    lost, levels, dense, squares, products = _rows(b, tile, size, [zero] * 5, each)
    count = b.fdiv(const_f32(1.0), splat(b, b.sitofp(size, F32), V_F32))
    mean_level, mean_dense = b.fmul(levels, count), b.fmul(dense, count)
    covariance = b.fsub(products, b.fmul(mean_dense, levels))
    variance = b.fsub(squares, b.fmul(mean_level, levels))
    differ = b.fcmp_ordered(">", variance, const_f32(0.5))  # else what is left is rounding
    slope = b.select(differ, b.fdiv(covariance, variance), zero)
    offset = b.fsub(mean_dense, b.fmul(slope, mean_level))
    lost = b.fmul(lost, _power(b, maximum(b, scale, const_f32(TINY)), NORM))
    lost = b.select(b.fcmp_ordered("==", scale, zero), zero, lost)
    held = b.and_(
        b.and_(b.fcmp_ordered(">=", scale, zero), b.fcmp_ordered("<", scale, const_f32(_INFINITE))),
        b.fcmp_ordered("<", absolute(b, minimum), const_f32(_INFINITE)),
    )
    return b.select(held, lost, const_f32(_INFINITE)), slope, offset


def _loss(b, tile, size, scale, minimum, top):
    """The sum of |error|**NORM of the values that a range gives; infinite if one of them is."""
    inverse = _inverse(b, scale)

    def each(number, lost, largest):
        level = _level(b, b.fmul(b.fsub(number, minimum), inverse), top)
        error = absolute(b, b.fsub(b.fadd(b.fmul(level, scale), minimum), number))
        distance = maximum(b, error, const_f32(TINY))
        return [b.fadd(lost, _power(b, distance, NORM)), maximum(b, error, largest)]

    lost, largest = _rows(b, tile, size, [const_f32(0.0)] * 2, each)
    finite = b.fcmp_ordered("<", largest, const_f32(_INFINITE))
    return b.select(finite, lost, const_f32(_INFINITE))


def _emit_hqq(half, b, tile, size, scales, minima, top):
    """Of 16 groups [size, 16]: scales and minima, those of the whole range, become the found ones.

    half: they are stored in float16.
    """

    def stored(x):
        return b.fpext(b.fptrunc(x, V_F16), V_F32) if half else x

    start = load(b, scales, 0, V_F32), load(b, minima, 0, V_F32)
    levels = splat(b, top, V_F32)
    narrow = b.fsub(const_f32(1.0), b.fdiv(const_f32(CLIP), levels))
    scale = stored(b.fmul(start[0], narrow))
    minimum = stored(fma(b, start[0], const_f32(CLIP / 2), start[1]))
    carried = [scale, minimum, scale, minimum, const_f32(_INFINITE), const_f32(1 / BETA)]
    _, (scale, minimum, *best, error, beta), close = loop(b, const_i64(ITERATIONS), carried)
    lost, slope, offset = _split(b, tile, size, scale, minimum, levels, beta)
    wins = b.fcmp_ordered("<", lost, error)
    best = [b.select(wins, x, y) for x, y in zip((scale, minimum), best, strict=True)]
    error = b.select(wins, lost, error)
    moved = stored(fma(b, slope, scale, scale)), stored(fma(b, offset, scale, minimum))
    _, _, scale, minimum, _, _ = close([*moved, *best, error, b.fmul(beta, const_f32(1 / KAPPA))])
    found = _loss(b, tile, size, scale, minimum, levels)
    wins = b.fcmp_ordered("<", found, _loss(b, tile, size, *start, levels))
    store(b, b.select(wins, scale, start[0]), scales, 0)
    store(b, b.select(wins, minimum, start[1]), minima, 0)


def _emit_compact(b, tile, size, scales, minima, top, bits, spans, zeros):
    """Bytes of compact scales near the scales and minima of 16 groups [size, 16]."""
    scale, minimum = load(b, scales, 0, V_F32), load(b, minima, 0, V_F32)
    levels, steps = splat(b, top, V_F32), splat(b, b.fadd(top, ir.Constant(F32, 1.0)), V_F32)
    half = b.fmul(levels, const_f32(0.5))
    middle, highest = fma(b, half, scale, minimum), fma(b, levels, scale, minimum)
    # Where 0 is not between the ends of a range, a span reaches to it.
    reach = maximum(b, b.fmul(highest, b.fdiv(steps, levels)), b.fsub(const_f32(0.0), minimum))
    span = b.bitcast(maximum(b, b.fmul(scale, steps), reach), V_I32)
    below = b.sub(b.ashr(span, const_i32(SHIFT)), const_i32(EXPONENT << MANTISSA))
    below = _clamped(b, below, 0, 255)
    exponent = b.shl(b.sub(ir.Constant(I64, EXPONENT), bits), const_i64(23))
    exponent = splat(b, b.trunc(exponent, I32), V_I32)
    count = b.fdiv(const_f32(1.0), splat(b, b.sitofp(size, F32), V_F32))
    best = [const_i32(0), const_i32(0)]
    error = const_f32(_INFINITE)
    for above in range(SPANS):
        chosen = _clamped(b, b.add(below, const_i32(above)), 0, 255)
        wide = b.bitcast(b.add(b.shl(chosen, const_i32(SHIFT)), exponent), V_F32)
        inverse, unit = b.fdiv(const_f32(1.0), wide), b.fmul(wide, steps)
        least = b.fsub(middle, b.fmul(half, wide))
        for _ in range(ZEROS):
            zero = b.fdiv(b.fmul(least, const_f32(-STEPS)), unit)
            zero = _clamped(b, b.fptosi(nearest(b, zero), V_I32), 0, STEPS - 1)
            stored = b.fmul(b.sitofp(zero, V_F32), b.fmul(unit, const_f32(-1 / STEPS)))

            def each(number, total, lost, stored=stored, inverse=inverse, wide=wide):
                level = _level(b, b.fmul(b.fsub(number, stored), inverse), levels)
                missing = b.fsub(number, b.fmul(level, wide))
                distance = _size(b, b.fsub(missing, stored))
                return [b.fadd(total, missing), b.fadd(lost, _power(b, distance, NORM))]

            total, lost = _rows(b, tile, size, [const_f32(0.0)] * 2, each)
            least = b.fmul(total, count)
            wins = b.fcmp_ordered("<", lost, error)
            best = [b.select(wins, x, y) for x, y in zip((chosen, zero), best, strict=True)]
            error = b.select(wins, lost, error)
    for found, address in zip(best, (spans, zeros), strict=True):
        narrow = b.trunc(found, ir.VectorType(ir.IntType(8), LANES))
        store(b, narrow, address, 0)


def _clamped(b, x, least, most):
    x = b.select(b.icmp_signed("<", x, const_i32(least)), const_i32(least), x)
    return b.select(b.icmp_signed(">", x, const_i32(most)), const_i32(most), x)


@vector_intrinsic(types.void, _i64, _i64, _i64, _i64, _f32)
def _in_float32(b, tile, size, scales, minima, top):
    _emit_hqq(False, b, tile, size, scales, minima, top)


@vector_intrinsic(types.void, _i64, _i64, _i64, _i64, _f32)
def _in_float16(b, tile, size, scales, minima, top):
    _emit_hqq(True, b, tile, size, scales, minima, top)


_compact = vector_intrinsic(types.void, _i64, _i64, _i64, _i64, _f32, _i64, _i64, _i64)(
    _emit_compact
)


@inner
def _turned(groups, first, tile):
    """Sixteen groups from `first` on, number by number; of those that are not there, zeros."""
    count = min(LANES, len(groups) - first)
    tile[:, count:] = 0
    for lane in range(count):
        for i in range(groups.shape[1]):
            tile[i, lane] = groups[first + lane, i]
    return count


@inner
def _hqq(groups, scales, minima, bits, half):
    size, top = groups.shape[1], np.float32(2**bits - 1)
    tile = np.empty((size, LANES), np.float32)
    scale, minimum = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for first in range(0, len(groups), LANES):
        count = _turned(groups, first, tile)
        at = slice(first, first + count)
        scale[:count], minimum[:count] = scales[at], minima[at]
        where = tile.ctypes.data, size, scale.ctypes.data, minimum.ctypes.data, top
        if half:
            _in_float16(*where)
        else:
            _in_float32(*where)
        scales[at], minima[at] = scale[:count], minimum[:count]


@inner
def _compacted(groups, scales, minima, bits, spans, zeros):
    size, top = groups.shape[1], np.float32(2**bits - 1)
    tile = np.empty((size, LANES), np.float32)
    scale, minimum = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    span, zero = np.empty(LANES, np.uint8), np.empty(LANES, np.uint8)
    for first in range(0, len(groups), LANES):
        count = _turned(groups, first, tile)
        at = slice(first, first + count)
        scale[:count], minimum[:count] = scales[at], minima[at]
        _compact(
            tile.ctypes.data, size, scale.ctypes.data, minimum.ctypes.data, top, bits,
            span.ctypes.data, zero.ctypes.data,
        )  # fmt: skip
        spans[at], zeros[at] = span[:count], zero[:count]


def hqq(groups: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> Range:
    """See `kernels.reference.hqq.hqq`; that range or the whole one, whichever loses less."""
    found = [x.float().reshape(-1).clone() for x in (scale, minimum)]
    half = scale.dtype == torch.float16
    _by_groups(lambda own, *ranges: _hqq(own, *ranges, bits, half), groups, *found)
    first, second = (x.view_as(scale).to(scale.dtype) for x in found)
    return first, second


def compact(groups: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> Range:
    """See `quant.solvers.compact`: spans and zero points, uint8 [N, G], that lose least by NORM.

    scale, minimum: float32 [N, G], of spans that there are.
    """
    ranges = [x.reshape(-1) for x in (scale, minimum)]
    found = [torch.empty(x.shape, dtype=torch.uint8) for x in ranges]
    _by_groups(
        lambda own, scales, minima, *bytes_: _compacted(own, scales, minima, bits, *bytes_),
        groups, *ranges, *found,
    )  # fmt: skip
    spans, zeros = (x.view_as(scale) for x in found)
    return spans, zeros


def _by_groups(do: Callable[..., None], groups: Tensor, *others: Tensor) -> None:
    """`do` with some groups [N, G, g] and what is theirs of the others."""
    flat = groups.reshape(-1, groups.shape[2])
    each = max(_PART // flat.shape[1], -(-len(flat) // torch.get_num_threads()))
    by_parts(do, each, flat, *others)
