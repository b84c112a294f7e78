"""bfloat16, float16 and 8-bit moments in SIMD registers.

Moments of 8 bits have a scale in each block of 256, as in Dettmers et al., "8-bit Optimizers via
Block-wise Quantization" (arXiv 2110.02861), but no table: codes are linear in the square root of
what an update needs. With the largest magnitude of the block as its scale,

    m = scale * c * |c| / 127^2          c from -127 to 127
    sqrt(v) = sqrt(scale) * c^2 / 255^2  c from 1 to 255

The second moment is never coded as 0 (Li et al., "Memory Efficient Optimizers with 4-bit States",
arXiv 2309.01507): beside a mean that is not 0, it would make a step of any size. Square roots are
the processor's estimates with 14 bits where it has them, more than codes have.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from qoff.kernels.cpu.jit.emit import (
    HAS_BF16,
    I8,
    LANES,
    V_F16,
    V_F32,
    V_I32,
    absolute,
    at,
    call_llvm,
    const_f32,
    const_i32,
    fma,
    lanes,
    load,
    rounded_bf16,
)
from qoff.kernels.cpu.jit.simd import f32x16, vector_intrinsic
from qoff.kernels.processor import host_features

_FEATURES = host_features()
_LEAST = 1e-36
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


@vector_intrinsic(f32x16, f32x16, f32x16)
def smaller(b, x, y):
    """The smaller of two; x if either is NaN."""
    return b.select(b.fcmp_unordered("<", x, y), x, y)


@vector_intrinsic(types.void, _i64, f32x16)
def store_bf16(b, address, value):
    """16 numbers rounded to bfloat16, ties to even; NaN stays NaN.

    Below 2^-126 they are 0 where the processor rounds them itself.
    """
    if HAS_BF16:
        both = rounded_bf16(b, value, value)
        words = lanes(b, both, both, 0, LANES)
    else:
        bits = b.bitcast(value, V_I32)
        odd = b.and_(b.lshr(bits, const_i32(16)), const_i32(1))
        rounded = b.add(b.add(bits, const_i32(0x7FFF)), odd)
        quiet = b.or_(bits, const_i32(0x400000))
        rounded = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
        words = b.trunc(b.lshr(rounded, const_i32(16)), _V_I16)
    b.store(words, at(b, address, 0, _V_I16), align=1)


@vector_intrinsic(types.void, _i64, f32x16)
def store_f16(b, address, value):
    """16 numbers rounded to float16."""
    b.store(b.fptrunc(value, V_F16), at(b, address, 0, V_F16), align=1)


def _store_rounded(b, address, value, factor, least=None):
    """Products as bytes, by the last bits of their sum with 1.5 * 2^23: ties to even."""
    bits = b.bitcast(fma(b, value, factor, const_f32(1.5 * 2**23)), V_I32)
    codes = b.trunc(bits, _V_I8)
    if least is not None:
        codes = b.select(b.icmp_unsigned(">", codes, least), codes, least)
    b.store(codes, at(b, address, 0, _V_I8), align=1)


@vector_intrinsic(f32x16, f32x16)
def reciprocal_root(b, x):
    """1 / sqrt(x), to a relative error of 2^-14; of a number that is not negative, 1e18 of 0."""
    bits, least = b.bitcast(x, V_I32), b.bitcast(const_f32(_LEAST), V_I32)
    x = b.bitcast(b.select(b.icmp_signed(">", bits, least), bits, least), V_F32)
    if "avx512f" in _FEATURES:
        name = "llvm.x86.avx512.rsqrt14.ps.512"
        return call_llvm(b, name, V_F32, [x, x, ir.Constant(ir.IntType(16), -1)])
    return b.fdiv(const_f32(1.0), call_llvm(b, "llvm.sqrt.v16f32", V_F32, [x]))


@vector_intrinsic(f32x16, f32x16)
def reciprocal(b, x):
    """1 / x, to a relative error of 2^-14."""
    if "avx512f" in _FEATURES:
        name = "llvm.x86.avx512.rcp14.ps.512"
        return call_llvm(b, name, V_F32, [x, x, ir.Constant(ir.IntType(16), -1)])
    return b.fdiv(const_f32(1.0), x)


@vector_intrinsic(f32x16, _i64)
def load_first(b, address):
    """16 first moments of their codes, in parts of the scale / 127^2."""
    x = b.sitofp(b.sext(load(b, address, 0, _V_I8), V_I32), V_F32)
    return b.fmul(x, absolute(b, x))


@vector_intrinsic(f32x16, _i64)
def load_second(b, address):
    """Roots of 16 second moments of their codes, in parts of the scale's root / 255^2."""
    x = b.uitofp(b.zext(load(b, address, 0, _V_I8), V_I32), V_F32)
    return b.fmul(x, x)


@vector_intrinsic(types.void, _i64, f32x16, f32x16)
def store_first(b, address, root, inverse):
    """16 first moments as codes, of roots with their signs. inverse: 127 / the scale's root."""
    _store_rounded(b, address, root, inverse)


@vector_intrinsic(types.void, _i64, f32x16, f32x16)
def store_second(b, address, root, inverse):
    """16 second moments as codes, of fourth roots. inverse: 255 / the scale's fourth root."""
    _store_rounded(b, address, root, inverse, ir.Constant(_V_I8, [1] * LANES))
