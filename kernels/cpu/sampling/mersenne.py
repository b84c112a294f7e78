"""torch's random numbers on the CPU: the Mersenne Twister, a row of a vocabulary at a time.

Matsumoto and Nishimura, "Mersenne Twister: a 623-dimensionally equidistributed uniform
pseudo-random number generator", 1998. A number of float64 takes two words, the first of which has
its 21 highest bits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit import emit, simd
from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.simd import f32x16, vector_intrinsic

from .scratch import STATE

_SHIFTED = 397
_LEFT, _NEXT, _FIRST = 8, 16, 24  # bytes into the struct of `read_state`
_i64 = types.int64
_WORDS = ir.VectorType(emit.I32, 2 * emit.LANES)


@vector_intrinsic(types.void, _i64)
def _twist(b, address):
    """Make the next 16 words, from those of the 624 before `address`."""
    bits = emit.const_i32
    this, following, far = (
        emit.load(b, address, 4 * (i - STATE), emit.V_I32) for i in (0, 1, _SHIFTED)
    )
    mixed = b.or_(b.and_(this, bits(0x80000000)), b.and_(following, bits(0x7FFFFFFF)))
    odd = b.sub(bits(0), b.and_(following, bits(1)))
    word = b.xor(far, b.xor(b.lshr(mixed, bits(1)), b.and_(odd, bits(0x9908B0DF))))
    emit.store(b, word, address, 0)


def _tempered(b, y, constant):
    y = b.xor(y, b.lshr(y, constant(11)))
    y = b.xor(y, b.and_(b.shl(y, constant(7)), constant(0x9D2C5680)))
    y = b.xor(y, b.and_(b.shl(y, constant(15)), constant(0xEFC60000)))
    return b.xor(y, b.lshr(y, constant(18)))


@vector_intrinsic(f32x16, _i64)
def floors(b, address):
    """The 21 highest bits of the 16 numbers whose words are at an address: at most the numbers."""
    words = emit.load(b, address, 0, _WORDS)
    firsts = ir.Constant(emit.V_I32, list(range(0, 2 * emit.LANES, 2)))
    highest = _tempered(b, b.shuffle_vector(words, words, firsts), emit.const_i32)
    highest = b.and_(highest, emit.const_i32(0x1FFFFF))
    return b.fmul(b.sitofp(highest, emit.V_F32), emit.const_f32(2.0**-21))


@vector_intrinsic(_i64, _i64)
def _word(b, address):
    constant = lambda value: ir.Constant(emit.I32, value)  # noqa: E731
    return b.zext(_tempered(b, emit.load(b, address, 0, emit.I32), constant), emit.I64)


@inner
def uniform(address):
    """The number in [0, 1) whose two words are at an address, as `torch.rand` in float64 has it."""
    bits = (_word(address) & 0x1FFFFF) << 32 | _word(address + 4)
    return np.float64(bits) * 2.0**-53


@vector_intrinsic(types.void, _i64, _i64)
def _poke_word(b, address, word):
    b.store(b.trunc(word, emit.I32), emit.at(b, address, 0, emit.I32), align=1)


@inner
def read_state(state, words):
    """Bring the words of a generator's `get_state` to the beginning; how many of them are used.

    It is a struct: int64 seed, int32 words left and one, int32 whether it is seeded, int64 the next
    word, and the words, in 64 bits each.
    """
    for i in range(STATE):
        _poke_word(words + 4 * i, simd.peek_i64(state + _FIRST + 8 * i))
    left = simd.peek_i32(state + _LEFT)
    return STATE + 1 - left


@inner
def write_state(state, words, used):
    """Write the words at the beginning, of which so many are used, back into the struct."""
    for i in range(STATE):
        simd.poke_i64(state + _FIRST + 8 * i, simd.peek_i32(words + 4 * i) & 0xFFFFFFFF)
    _poke_word(state + _LEFT, STATE + 1 - used)
    simd.poke_i64(state + _NEXT, used)


@inner
def make_words(words, used, numbers):
    """Make the words of the next numbers behind a state, of which so many words are used."""
    end = (used + 2 * numbers + STATE - 1) // STATE * STATE
    for i in range(STATE, max(end, used + 2 * numbers + 2 * emit.LANES), emit.LANES):
        _twist(words + 4 * i)


@inner
def advance(words, used, numbers):
    """Bring the state behind these numbers to the beginning; how many of its words are used."""
    end = used + 2 * numbers
    first = (end - 1) // STATE * STATE
    for i in range(0, 4 * STATE, 64):
        simd.store_f32(words + i, simd.load_f32(words + 4 * first + i))
    return end - first
