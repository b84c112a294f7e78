"""SIMD registers inside numba: the few vector types and instructions the CPU kernels are made of.

numba has no vector values, so its loops keep accumulators in memory. Here `f32x16` and `i32x16` are
numba types whose LLVM representation is a vector; values of them live in registers. Addresses are
plain int64 numbers.
"""

from __future__ import annotations

import inspect
from functools import partial

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic

from .emit import (
    F16,
    F32,
    I8,
    I32,
    I64,
    LANES,
    V_F16,
    V_F32,
    V_I16,
    V_I32,
    align_stack,
    at,
    const_f32,
    const_i32,
    fma,
    lanes,
    load,
    nearest,
    splat,
)
from .emit import absolute as emit_absolute
from .emit import maximum as emit_maximum
from .emit import prefetch as emit_prefetch


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


@vector_intrinsic(types.void)
def aligned_stack(b):
    """Called in a function with more vectors than there are registers; see `emit.align_stack`."""
    align_stack(b)


@vector_intrinsic(f32x16, _i64)
def load_f32(b, address):
    return load(b, address, 0, V_F32)


@vector_intrinsic(f32x16, _i64)
def load_f16(b, address):
    """16 float16 numbers, widened."""
    return b.fpext(load(b, address, 0, V_F16), V_F32)


@vector_intrinsic(f32x16, _i64)
def load_bf16(b, address):
    """16 bfloat16 numbers, widened."""
    wide = b.zext(load(b, address, 0, V_I16), V_I32)
    return b.bitcast(b.shl(wide, const_i32(16)), V_F32)


@vector_intrinsic(types.void, _i64)
def prefetch(b, address):
    """Ask for the cache line at an address to be brought into the second-level cache."""
    emit_prefetch(b, address, 0)


@vector_intrinsic(types.void, _i64)
def prefetch_write(b, address):
    """Ask for the cache line at an address to be brought near, to be written."""
    emit_prefetch(b, address, 0, write=True)


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
    return emit_maximum(b, x, y)


@vector_intrinsic(f32x16, f32x16, f32x16, f32x16)
def where_positive(b, x, y, z):
    """y where x > 0, otherwise z."""
    return b.select(b.fcmp_ordered(">", x, const_f32(0.0)), y, z)


@vector_intrinsic(f32x16, f32x16)
def absolute(b, x):
    return emit_absolute(b, x)


@vector_intrinsic(f32x16, f32x16)
def hadamard(b, x):
    """The 16 lanes times a Hadamard matrix of +-1."""
    for stride in (1, 2, 4, 8):
        partner = ir.Constant(ir.VectorType(I32, LANES), [lane ^ stride for lane in range(LANES)])
        signs = [-1.0 if lane & stride else 1.0 for lane in range(LANES)]
        x = fma(b, x, ir.Constant(V_F32, signs), b.shuffle_vector(x, x, partner))
    return x


def _halves_sum(b, value, combine):
    """Combine all lanes pairwise, in a fixed tree order."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (lanes(b, value, value, start, width) for start in (0, width))
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
    return _halves_sum(b, x, partial(emit_maximum, b))


@vector_intrinsic(f32x16, f32x16, f32x16)
def larger(b, x, y):
    """The larger of numbers that are not negative; NaN is larger than any."""
    x, y = b.bitcast(x, V_I32), b.bitcast(y, V_I32)
    return b.bitcast(b.select(b.icmp_signed(">", x, y), x, y), V_F32)


@vector_intrinsic(_f32, f32x16)
def largest(b, x):
    """The largest lane of numbers that are not negative; NaN if there is one."""

    def combine(x, y):
        return b.select(b.icmp_signed(">", x, y), x, y)

    return b.bitcast(_halves_sum(b, b.bitcast(x, V_I32), combine), F32)


@vector_intrinsic(i32x16)
def zero_i32(b):
    return const_i32(0)


@vector_intrinsic(types.void, _i64, i32x16)
def store_i8(b, address, value):
    """Store the lowest bytes of 16 integers."""
    narrow = ir.VectorType(I8, LANES)
    b.store(b.trunc(value, narrow), at(b, address, 0, narrow), align=1)


@vector_intrinsic(f32x16, f32x16)
def exp(b, x):
    """e**x with a relative error below 2e-7; 0 below -87.3, capped above 88.3, NaN of NaN.

    Cody-Waite reduction to [-ln2/2, ln2/2] and the degree-6 Taylor-Horner polynomial.
    """
    x = b.select(b.fcmp_ordered(">", x, const_f32(88.3)), const_f32(88.3), x)
    tiny = b.fcmp_ordered("<", x, const_f32(-87.3))
    x = b.select(tiny, const_f32(-87.3), x)
    n = nearest(b, b.fmul(x, const_f32(1.4426950408889634)))
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


@vector_intrinsic(types.void, _i64, _i64)
def poke_i64(b, address, value):
    b.store(value, at(b, address, 0, I64), align=1)


@vector_intrinsic(_i64, _i64)
def peek_i32(b, address):
    return b.sext(load(b, address, 0, I32), I64)


@vector_intrinsic(_i64, _i64)
def peek_u8(b, address):
    return b.zext(load(b, address, 0, I8), I64)


@vector_intrinsic(_f32, _i64, _i64, _i64)
def exponent_f32(b, byte, shift, exponent):
    """The float32 whose bits are `byte` << shift and the biased exponent, added."""
    exponent = b.shl(exponent, ir.Constant(I64, 23))
    return b.bitcast(b.trunc(b.add(b.shl(byte, shift), exponent), I32), F32)


@vector_intrinsic(_f32, _i64)
def peek_f32(b, address):
    return load(b, address, 0, F32)


@vector_intrinsic(_f32, _i64)
def peek_f16(b, address):
    """A float16 number, widened."""
    return b.fpext(load(b, address, 0, F16), F32)


@vector_intrinsic(types.void, _i64, _f32)
def poke_f32(b, address, value):
    b.store(value, at(b, address, 0, F32), align=1)


@vector_intrinsic(_i64, _i64)
def atomic_load(b, address):
    return b.load_atomic(at(b, address, 0, I64), "seq_cst", 8)


@vector_intrinsic(types.void, _i64, _i64)
def atomic_store(b, address, value):
    b.store_atomic(value, at(b, address, 0, I64), "release", 8)


@vector_intrinsic(_i64, _i64, _i64)
def atomic_add(b, address, value):
    """Add and return the value before."""
    return b.atomic_rmw("add", at(b, address, 0, I64), value, "seq_cst")


@vector_intrinsic(_i64, _i64, _i64, _i64)
def compare_and_swap(b, address, expected, value):
    """Store `value` where `expected` is, and say 1; 0 where something else is."""
    done = b.cmpxchg(at(b, address, 0, I64), expected, value, "seq_cst", "seq_cst")
    return b.zext(b.extract_value(done, 1), I64)


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
