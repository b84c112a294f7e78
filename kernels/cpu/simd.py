"""SIMD registers inside numba: the few vector types and instructions the CPU kernels are made of.

numba has no vector values, so its loops keep accumulators in memory. Here `f32x16` and `i32x16` are
numba types whose LLVM representation is a vector; values of them live in registers. LLVM splits
them where the processor's registers are narrower, so the same code runs on AVX2 or NEON. Addresses
are plain int64 numbers; loads and stores need no alignment.
"""

from __future__ import annotations

import inspect

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic

LANES = 16

I8, I32, I64, F16, F32 = (
    ir.IntType(8),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)
V_I32 = ir.VectorType(I32, LANES)
V_F32 = ir.VectorType(F32, LANES)
V_F16 = ir.VectorType(F16, LANES)


class _Vector(types.Type):
    """A numba type that is one LLVM vector of 16 lanes."""


class _F32x16(_Vector):
    pass


class _I32x16(_Vector):
    pass


f32x16 = _F32x16("f32x16")
i32x16 = _I32x16("i32x16")


@register_default(_F32x16)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, V_F32)


@register_default(_I32x16)
class _I32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, V_I32)


# --- emitters: plain functions over an IRBuilder, used by intrinsics and by whole-tile emitters


def at(b, address, offset, pointee):
    """Pointer to `pointee` at `address + offset` bytes (offset: int or i64 value)."""
    if isinstance(offset, int):
        offset = ir.Constant(I64, offset)
    return b.inttoptr(b.add(address, offset), pointee.as_pointer())


def load(b, address, offset, type_):
    return b.load(at(b, address, offset, type_), align=1)


def splat(b, scalar, vector_type):
    """All lanes equal to `scalar`."""
    one = b.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return b.shuffle_vector(one, ir.Constant(vector_type, ir.Undefined), mask)


def const_i32(value):
    return ir.Constant(V_I32, [value] * LANES)


def const_f32(value):
    return ir.Constant(V_F32, [value] * LANES)


def call_llvm(b, name, result, args):
    """Call an LLVM intrinsic by its mangled name."""
    fnty = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, fnty, name), args)


def fma(b, x, y, z):
    return call_llvm(b, "llvm.fma.v16f32", V_F32, [x, y, z])


def host_features() -> frozenset[str]:
    """Names of the host processor's features, as LLVM spells them."""
    return frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)


_FEATURES = host_features()


def dot_u8s8(b, acc, u8, s8, features=_FEATURES):
    """acc[lane] += sum over 4 bytes of u8 (unsigned) * s8 (signed); exact in int32.

    One instruction where the processor has it (VNNI), five to ten on AVX2 and AVX-512, plain
    32-bit multiplications elsewhere.
    """
    if "avx512vnni" in features:
        return _vpdpbusd(b, acc, u8, s8, 512)
    if "avxvnni" in features:
        return _by_halves(b, lambda *part: _vpdpbusd(b, *part, 256), acc, u8, s8)
    if "avx512bw" in features:
        return _multiply_add(
            b, acc, u8, s8, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"
        )
    if "avx2" in features:
        return _by_halves(
            b,
            lambda *part: _multiply_add(
                b, *part, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"
            ),
            acc,
            u8,
            s8,
        )
    for byte in range(4):
        shift = const_i32(8 * byte)
        unsigned = b.and_(b.lshr(u8, shift), const_i32(255))
        signed = b.ashr(b.shl(s8, const_i32(24 - 8 * byte)), const_i32(24))
        acc = b.add(acc, b.mul(unsigned, signed))
    return acc


def _bytes(b, x):
    return b.bitcast(x, ir.VectorType(I8, 4 * x.type.count))


def _vpdpbusd(b, acc, u8, s8, width):
    if llvm.llvm_version_info[0] >= 22:  # since then the operands are vectors of bytes
        u8, s8 = _bytes(b, u8), _bytes(b, s8)
    return call_llvm(b, f"llvm.x86.avx512.vpdpbusd.{width}", acc.type, [acc, u8, s8])


def _multiply_add(b, acc, u8, s8, by_bytes, by_words):
    """Products of bytes added in pairs to int16, those in pairs to int32.

    255 * 128 * 2 does not fit int16, so the nibbles of u8 go separately: 15 * 128 * 2 does.
    """
    words = ir.VectorType(ir.IntType(16), 2 * acc.type.count)

    def constant(value):
        return ir.Constant(acc.type, [value] * acc.type.count)

    ones = ir.Constant(words, [1] * words.count)
    for shift in (0, 4):
        nibbles = b.and_(b.lshr(u8, constant(shift)), constant(0x0F0F0F0F))
        pairs = call_llvm(b, by_bytes, words, [_bytes(b, nibbles), _bytes(b, s8)])
        sums = call_llvm(b, by_words, acc.type, [pairs, ones])
        acc = b.add(acc, b.shl(sums, constant(shift)))
    return acc


def _lanes(b, first, second, start, count):
    mask = ir.Constant(ir.VectorType(I32, count), [start + i for i in range(count)])
    return b.shuffle_vector(first, second, mask)


def _by_halves(b, function, *vectors):
    """Apply `function` to the lower and to the upper half of the vectors."""
    low, high = (
        function(*(_lanes(b, v, v, start, LANES // 2) for v in vectors))
        for start in (0, LANES // 2)
    )
    return _lanes(b, low, high, 0, LANES)


# --- intrinsics: the same instructions, callable from numba functions


def vector_intrinsic(result, *params):
    """Decorator: `emit(builder, *values)` becomes a numba intrinsic with these numba types."""

    def wrap(emit):
        signature = result(*params)

        def codegen(context, builder, sig, args):
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        def definition(typingctx, *args):
            return signature, codegen

        # numba reads an intrinsic's arity from its signature.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = ["typingctx", *(f"operand{i}" for i in range(len(params)))]
        signature_of_definition = inspect.Signature([inspect.Parameter(n, kind) for n in names])
        definition.__dict__["__signature__"] = signature_of_definition
        definition.__name__ = emit.__name__
        definition.__doc__ = emit.__doc__
        return intrinsic(definition)

    return wrap


_i64, _i32, _f32 = types.int64, types.int32, types.float32


@vector_intrinsic(f32x16, _i64)
def load_f32(b, address):
    return load(b, address, 0, V_F32)


@vector_intrinsic(types.void, _i64, f32x16)
def store_f32(b, address, value):
    b.store(value, at(b, address, 0, V_F32), align=1)


@vector_intrinsic(f32x16, _f32)
def splat_f32(b, scalar):
    return splat(b, scalar, V_F32)


@vector_intrinsic(f32x16, f32x16, f32x16)
def add(b, x, y):
    return b.fadd(x, y)


@vector_intrinsic(f32x16, f32x16, f32x16)
def mul(b, x, y):
    return b.fmul(x, y)


@vector_intrinsic(f32x16, f32x16, f32x16)
def div(b, x, y):
    return b.fdiv(x, y)


@vector_intrinsic(f32x16, f32x16, f32x16, f32x16)
def mul_add(b, x, y, z):
    """x * y + z, rounded once."""
    return fma(b, x, y, z)


@vector_intrinsic(f32x16, f32x16, f32x16)
def maximum(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@vector_intrinsic(f32x16, f32x16)
def absolute(b, x):
    return call_llvm(b, "llvm.fabs.v16f32", V_F32, [x])


def _halves_sum(b, value, combine):
    """Combine all lanes pairwise, in a fixed tree order."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (_lanes(b, value, value, start, width) for start in (0, width))
        value = combine(low, high)
    return b.extract_element(value, ir.Constant(I32, 0))


@vector_intrinsic(_f32, f32x16)
def sum_f32(b, x):
    return _halves_sum(b, x, b.fadd)


@vector_intrinsic(_i32, i32x16)
def sum_i32(b, x):
    return _halves_sum(b, x, b.add)


@vector_intrinsic(_f32, f32x16)
def max_f32(b, x):
    return _halves_sum(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))


@vector_intrinsic(i32x16)
def zero_i32(b):
    return const_i32(0)


@vector_intrinsic(i32x16, i32x16, i32x16)
def add_i32(b, x, y):
    return b.add(x, y)


@vector_intrinsic(i32x16, f32x16)
def round_i32(b, x):
    """Nearest integers, ties to even."""
    return b.fptosi(call_llvm(b, "llvm.nearbyint.v16f32", V_F32, [x]), V_I32)


@vector_intrinsic(types.void, _i64, _i64, i32x16)
def store_high_low(b, high_address, low_address, value):
    """Split value = 256 * high + low, both int8, and store 16 bytes of each."""
    narrow = ir.VectorType(I8, LANES)
    high = b.ashr(b.add(value, const_i32(128)), const_i32(8))
    low = b.sub(value, b.shl(high, const_i32(8)))
    b.store(b.trunc(high, narrow), at(b, high_address, 0, narrow), align=1)
    b.store(b.trunc(low, narrow), at(b, low_address, 0, narrow), align=1)


@vector_intrinsic(f32x16, f32x16)
def exp(b, x):
    """e**x with a relative error below 2e-7; 0 below -87.3, capped above 88.3.

    Cody-Waite reduction to [-ln2/2, ln2/2] and the degree-6 Taylor-Horner polynomial.
    """
    x = b.select(b.fcmp_ordered("<", x, const_f32(88.3)), x, const_f32(88.3))
    tiny = b.fcmp_ordered("<", x, const_f32(-87.3))
    x = b.select(tiny, const_f32(-87.3), x)
    n = call_llvm(b, "llvm.nearbyint.v16f32", V_F32, [b.fmul(x, const_f32(1.4426950408889634))])
    r = fma(b, n, const_f32(-0.693145751953125), x)
    r = fma(b, n, const_f32(-1.428606765330187e-06), r)
    poly = const_f32(1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        poly = fma(b, poly, r, const_f32(coefficient))
    exponent = b.shl(b.add(b.fptosi(n, V_I32), const_i32(127)), const_i32(23))
    result = b.fmul(poly, b.bitcast(exponent, V_F32))
    return b.select(tiny, const_f32(0.0), result)


# --- scalars in memory and between threads


@vector_intrinsic(_i64, _i64)
def peek_i64(b, address):
    return load(b, address, 0, I64)


@vector_intrinsic(_f32, _i64)
def peek_f32(b, address):
    return load(b, address, 0, F32)


@vector_intrinsic(types.void, _i64, _f32)
def poke_f32(b, address, value):
    b.store(value, at(b, address, 0, F32), align=1)


@vector_intrinsic(_i64, _i64)
def atomic_load(b, address):
    return b.load_atomic(at(b, address, 0, I64), "acquire", 8)


@vector_intrinsic(types.void, _i64, _i64)
def atomic_store(b, address, value):
    b.store_atomic(value, at(b, address, 0, I64), "release", 8)


@vector_intrinsic(_i64, _i64, _i64)
def atomic_add(b, address, value):
    """Add and return the value before."""
    return b.atomic_rmw("add", at(b, address, 0, I64), value, "seq_cst")


@vector_intrinsic(types.void)
def spin_pause(b):
    """Tell the core that this is a spin loop."""
    if llvm.get_default_triple().startswith("x86_64"):
        b.call(
            cgutils.get_or_insert_function(
                b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            ),
            [],
        )
    else:
        b.fence("seq_cst")


@vector_intrinsic(types.void, _i64, _i64, _i64, _i64, _i64)
def call_job(b, function, pool, thread, threads, args):
    """Call the compiled `void function(pool, thread, threads, args)` at an address."""
    fnty = ir.FunctionType(ir.VoidType(), [I64, I64, I64, I64])
    b.call(b.inttoptr(function, fnty.as_pointer()), [pool, thread, threads, args])
