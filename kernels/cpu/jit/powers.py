"""Powers of two, and logarithms."""

from __future__ import annotations

from .emit import V_F32, V_I32, const_f32, const_i32, fma
from .simd import f32x16, vector_intrinsic

# Added to a smaller number: rounds it; the lowest bits are its integer as a float's exponent.
_ROUND = 1.5 * 2.0**23 + 127
_SQRT_HALF = 0x3F3504F3  # the bits of a float32


def exp2(b, x):
    """2**x of numbers up to 127, with a relative error below 3e-7; 0 below -126; NaN of NaN.

    A polynomial of degree 5 in what rounding x leaves, of least relative error on [-1/2, 1/2].
    """
    rounded = b.fadd(x, const_f32(_ROUND))
    rest = b.fsub(x, b.fsub(rounded, const_f32(_ROUND)))
    power = const_f32(0.0013276460235256528)
    for coefficient in (
        0.009675541521454464,
        0.055507133050924876,
        0.2402211972105988,
        0.6931469670487405,
        1.0000000716550577,
    ):
        power = fma(b, power, rest, const_f32(coefficient))
    whole = b.bitcast(b.shl(b.bitcast(rounded, V_I32), const_i32(23)), V_F32)
    enough = b.fcmp_unordered(">=", x, const_f32(-126.0))
    return b.select(enough, b.fmul(power, whole), const_f32(0.0))


def log2(b, x):
    """The logarithm to base 2 of normal positive numbers, with an error below 1e-6.

    A polynomial of degree 7 in m - 1, for the m from sqrt(1/2) to sqrt(2) whose product with a
    power of two x is; at Chebyshev nodes.
    """
    bits = b.bitcast(x, V_I32)
    exponent = b.ashr(b.sub(bits, const_i32(_SQRT_HALF)), const_i32(23))
    rest = b.bitcast(b.sub(bits, b.shl(exponent, const_i32(23))), V_F32)
    rest = b.fsub(rest, const_f32(1.0))
    power = const_f32(0.16818659111263232)
    for coefficient in (
        -0.26796387051669585,
        0.29611955722114497,
        -0.3595244554631847,
        0.4806131254729459,
        -0.7213601785760309,
        1.4426965230465456,
    ):
        power = fma(b, power, rest, const_f32(coefficient))
    return fma(b, power, rest, b.sitofp(exponent, V_F32))


@vector_intrinsic(f32x16, f32x16)
def log2_above(b, x):
    """At least the logarithm to base 2 of numbers that are not negative, and at most 0.09 more.

    A number's bits, as an integer, are its logarithm with a straight line for each power of two.
    """
    bits = b.sitofp(b.bitcast(x, V_I32), V_F32)
    return fma(b, bits, const_f32(2.0**-23), const_f32(-127.0 + 0.0862))
