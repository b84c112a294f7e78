"""The steps of quantizing K and V to records, on vectors: what `reference.kv_blocks` means by them.

Every operation is one of the reference, in its order, so that results are the same bits.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit.emit import (
    I8,
    LANES,
    V_F16,
    V_F32,
    V_I32,
    at,
    call_llvm,
    const_f32,
    const_i32,
    lanes,
    load,
    nearest,
    splat,
    store,
)
from qoff.kernels.cpu.jit.simd import f32x16, i32x16, vector_intrinsic

_BYTES = ir.VectorType(I8, LANES)
_f32, _i64 = types.float32, types.int64


def _bound(b, kind, x, y):
    """The smaller ("minimum") or larger ("maximum") of two vectors; NaN where one is."""
    name = f"llvm.{kind}.v{x.type.count}f32"
    return call_llvm(b, name, x.type, [x, y])


def _of_lanes(b, kind, x):
    """The smallest or largest lane."""
    width = LANES
    while width > 1:
        width //= 2
        x = _bound(b, kind, lanes(b, x, x, 0, width), lanes(b, x, x, width, width))
    return b.extract_element(x, ir.Constant(ir.IntType(32), 0))


@vector_intrinsic(f32x16, f32x16, f32x16)
def lower(b, x, y):
    """The smaller; NaN where one is."""
    return _bound(b, "minimum", x, y)


@vector_intrinsic(f32x16, f32x16, f32x16)
def upper(b, x, y):
    """The larger; NaN where one is."""
    return _bound(b, "maximum", x, y)


@vector_intrinsic(_f32, f32x16)
def lowest(b, x):
    """The smallest lane; NaN if there is one."""
    return _of_lanes(b, "minimum", x)


@vector_intrinsic(_f32, f32x16)
def highest(b, x):
    """The largest lane; NaN if there is one."""
    return _of_lanes(b, "maximum", x)


@vector_intrinsic(f32x16, f32x16, f32x16, _f32)
def step_of(b, low, high, top):
    """The distance of levels, 0 to `top`, from low to high."""
    return b.fdiv(b.fsub(high, low), splat(b, top, V_F32))


@vector_intrinsic(f32x16, f32x16, f32x16, f32x16, _f32)
def moved(b, x, low, high, part):
    """x and a part of the distance from low to high."""
    return b.fadd(x, b.fmul(b.fsub(high, low), splat(b, part, V_F32)))


@vector_intrinsic(types.void, _i64, _i64, f32x16, f32x16, f32x16, f32x16, _f32)
def anchor(b, scale_at, minimum_at, first, low, high, step, top):
    """Store scale and minimum, float32, with a level at `first`: `kv_blocks._anchored`."""
    tops, zero = splat(b, top, V_F32), const_f32(0.0)
    flat = b.fcmp_ordered("==", step, zero)
    level = b.select(flat, zero, b.fdiv(b.fsub(first, low), step))
    below = b.fcmp_ordered("<", level, b.fmul(tops, const_f32(0.5)))
    farther = b.fadd(b.select(below, b.fsub(tops, level), level), const_f32(1 / 64))
    steps = call_llvm(b, "llvm.floor.v16f32", V_F32, [farther])
    span = b.select(below, b.fsub(high, first), b.fsub(first, low))
    scale = b.fdiv(span, steps)
    under = b.select(below, b.fsub(tops, steps), steps)
    rounded = b.fpext(b.fptrunc(scale, V_F16), V_F32)
    store(b, scale, scale_at, 0)
    store(b, b.fsub(first, b.fmul(under, rounded)), minimum_at, 0)


@vector_intrinsic(f32x16, _i64, f32x16)
def store_f16(b, address, value):
    """Store 16 numbers as float16, and return them as they were rounded."""
    narrow = b.fptrunc(value, V_F16)
    store(b, narrow, address, 0)
    return b.fpext(narrow, V_F32)


@vector_intrinsic(f32x16, f32x16)
def divisor(b, scale):
    """What distances from the minimum are divided by; infinity where the scale is 0."""
    none = b.fcmp_ordered("==", scale, const_f32(0.0))
    return b.select(none, const_f32(float("inf")), scale)


@vector_intrinsic(i32x16, f32x16, f32x16, f32x16, _f32)
def levels(b, x, minimum, by, top):
    """The nearest of the levels 0 to `top`."""
    level = b.fdiv(b.fsub(x, minimum), by)
    level = nearest(b, level)
    tops, zero = splat(b, top, V_F32), const_f32(0.0)
    level = b.select(b.fcmp_ordered(">", level, zero), level, zero)
    return b.fptosi(b.select(b.fcmp_ordered("<", level, tops), level, tops), V_I32)


@vector_intrinsic(i32x16, i32x16, i32x16)
def joined(b, low, high):
    """Codes of 4 bits, two to a byte."""
    return b.or_(low, b.shl(high, const_i32(4)))


@vector_intrinsic(types.void, _i64, _i64, _i64)
def transpose_bytes(b, source, to, stride):
    """Store 16 rows of 16 bytes, one behind the other, as columns; the new rows `stride` apart."""

    def interleaved(x, y, first):
        pairs = [place for i in range(first, first + 8) for place in (i, LANES + i)]
        return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), LANES), pairs))

    rows = [load(b, source, LANES * i, _BYTES) for i in range(LANES)]
    for _ in range(4):
        pairs = zip(rows[:8], rows[8:], strict=True)
        rows = [interleaved(x, y, first) for x, y in pairs for first in (0, 8)]
    address = to
    for row in rows:
        b.store(row, at(b, address, 0, _BYTES), align=1)
        address = b.add(address, stride)
