"""bfloat16 and 8-bit moments in SIMD registers.

Moments of 8 bits are codes of the dynamic map of Dettmers et al., "8-bit Optimizers via Block-wise
Quantization" (arXiv 2110.02861), times the largest magnitude of their block: code i is entry i of
the sorted map, as bitsandbytes' `create_dynamic_map` has it (`reference.optim.dynamic_map`). The
map has seven decades, each cut into equal steps, twice as many as in the one below, and its entries
are the middles of steps. The number of the step that a magnitude lies in is therefore a concave
function of straight lines, the least of seven, and the middle of a step a convex one, the largest
of seven: no table is looked up.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from qoff.kernels.cpu.jit.emit import (
    I8,
    LANES,
    V_F32,
    V_I32,
    at,
    call_llvm,
    const_f32,
    const_i32,
    fma,
    load,
    maximum,
)
from qoff.kernels.cpu.jit.simd import f32x16, vector_intrinsic

_DECADES = 7
_V_I8, _V_I16 = ir.VectorType(I8, LANES), ir.VectorType(ir.IntType(16), LANES)
_i64 = types.int64


@vector_intrinsic(f32x16, f32x16)
def sqrt(b, x):
    return call_llvm(b, "llvm.sqrt.v16f32", V_F32, [x])


@vector_intrinsic(f32x16, f32x16)
def sign(b, x):
    """-1, 0 or 1; NaN of NaN."""
    one = call_llvm(b, "llvm.copysign.v16f32", V_F32, [const_f32(1.0), x])
    return b.select(b.fcmp_ordered("!=", x, const_f32(0.0)), one, x)


@vector_intrinsic(f32x16, _i64)
def load_bf16(b, address):
    """16 bfloat16 numbers, widened."""
    words = b.zext(load(b, address, 0, _V_I16), V_I32)
    return b.bitcast(b.shl(words, const_i32(16)), V_F32)


@vector_intrinsic(types.void, _i64, f32x16)
def store_bf16(b, address, value):
    """16 numbers rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = b.bitcast(value, V_I32)
    odd = b.and_(b.lshr(bits, const_i32(16)), const_i32(1))
    rounded = b.add(b.add(bits, const_i32(0x7FFF)), odd)
    quiet = b.or_(bits, const_i32(0x400000))
    rounded = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
    words = b.trunc(b.lshr(rounded, const_i32(16)), _V_I16)
    b.store(words, at(b, address, 0, _V_I16), align=1)


def _lines(signed):
    """Slope and offset of each decade's line from a magnitude to the number of its step."""
    for decade in range(_DECADES):
        steps = 2 ** (decade + (0 if signed else 1))
        yield 10.0 ** (_DECADES - 1 - decade) * steps / 0.9, steps * 8 / 9 - (0 if signed else 1)


def _magnitude(b, code, signed):
    """Of the step of a number, its middle; that of step 0 is 0, and behind the last one is 1."""
    value = const_f32(0.0)
    for slope, offset in _lines(signed):
        line = fma(b, code, const_f32(1 / slope), const_f32((0.5 - offset) / slope))
        value = maximum(b, line, value)
    return b.select(b.fcmp_ordered("<", value, const_f32(1.0)), value, const_f32(1.0))


def _step(b, magnitude, signed, least, last):
    """The step that a magnitude lies in, int32 from `least` to `last`."""
    found = const_f32(float(last))
    for slope, offset in _lines(signed):
        line = fma(b, magnitude, const_f32(slope), const_f32(offset))
        found = b.select(b.fcmp_ordered("<", line, found), line, found)
    return b.fptosi(maximum(b, found, const_f32(float(least))), V_I32)


def _fabs(b, x):
    return call_llvm(b, "llvm.fabs.v16f32", V_F32, [x])


@vector_intrinsic(f32x16, _i64, f32x16)
def load_signed(b, address, scale):
    """16 codes of the map with a sign, times the scale of their block."""
    codes = b.sub(b.zext(load(b, address, 0, _V_I8), V_I32), const_i32(127))
    number = b.sitofp(codes, V_F32)
    value = _magnitude(b, _fabs(b, number), signed=True)
    return b.fmul(call_llvm(b, "llvm.copysign.v16f32", V_F32, [value, number]), scale)


@vector_intrinsic(f32x16, _i64, f32x16)
def load_unsigned(b, address, scale):
    """16 codes of the map without a sign, times the scale of their block."""
    number = b.sitofp(b.zext(load(b, address, 0, _V_I8), V_I32), V_F32)
    return b.fmul(_magnitude(b, number, signed=False), scale)


@vector_intrinsic(types.void, _i64, f32x16, f32x16)
def store_signed(b, address, value, inverse):
    """16 numbers as codes of the map with a sign; inverse: of the scale."""
    value = b.fmul(value, inverse)
    step = _step(b, _fabs(b, value), True, 0, 128)
    below = b.select(b.icmp_signed("<", step, const_i32(127)), step, const_i32(127))  # no -1
    negative = b.fcmp_ordered("<", value, const_f32(0.0))
    code = b.select(negative, b.neg(below), step)
    codes = b.trunc(b.add(code, const_i32(127)), _V_I8)
    b.store(codes, at(b, address, 0, _V_I8), align=1)


@vector_intrinsic(types.void, _i64, f32x16, f32x16)
def store_unsigned(b, address, value, inverse):
    """16 numbers >= 0 as codes of the map without a sign; inverse: of the scale.

    None becomes 0: a square mean of 0 beside a mean that is not would make a step of any size.
    """
    step = _step(b, b.fmul(value, inverse), False, 1, 255)
    b.store(b.trunc(step, _V_I8), at(b, address, 0, _V_I8), align=1)
