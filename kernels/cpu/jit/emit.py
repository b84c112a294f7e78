"""LLVM instructions on vectors of 16 lanes: functions that emit them through an IRBuilder.

LLVM splits the vectors where the processor's registers are narrower, so the same code runs on
AVX-512, AVX2 or NEON; only the dot product of bytes is chosen by the processor. Addresses are int64
values; loads and stores need no alignment.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from qoff.kernels.processor import host_features

LANES = 16


class _BFloatType(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self):
        return "bfloat"


I8, I16, I32, I64, F16, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)
V_I16 = ir.VectorType(I16, LANES)
V_I32 = ir.VectorType(I32, LANES)
V_F32 = ir.VectorType(F32, LANES)
V_F16 = ir.VectorType(F16, LANES)
V_BF16 = ir.VectorType(_BFloatType(), 2 * LANES)  # a pair of neighbours in each lane


def at(b, address, offset, pointee):
    """Pointer to `pointee` at `address + offset` bytes (offset: int or i64 value)."""
    if isinstance(offset, int):
        offset = ir.Constant(I64, offset)
    return b.inttoptr(b.add(address, offset), pointee.as_pointer())


def load(b, address, offset, type_):
    return b.load(at(b, address, offset, type_), align=1)


def store(b, value, address, offset):
    b.store(value, at(b, address, offset, value.type), align=1)


def prefetch(b, address, offset, write=False):
    """Ask for the cache line at `address + offset` to be brought into the second-level cache.

    write: as one's own, to be written.
    """
    fnty = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, fnty, "llvm.prefetch.p0")
    write, second_level, data = (ir.Constant(I32, value) for value in (int(write), 2, 1))
    b.call(function, [at(b, address, offset, I8), write, second_level, data])


def splat(b, scalar, vector_type):
    """All lanes equal to `scalar`."""
    one = b.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, vector_type.count), [0] * vector_type.count)
    return b.shuffle_vector(one, ir.Constant(vector_type, ir.Undefined), mask)


def const_i32(value):
    return ir.Constant(V_I32, [value] * LANES)


def const_i64(value):
    return ir.Constant(I64, value)


def const_f32(value):
    return ir.Constant(V_F32, [value] * LANES)


def call_llvm(b, name, result, args):
    """Call an LLVM intrinsic by its mangled name."""
    fnty = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, fnty, name), args)


def fma(b, x, y, z):
    return call_llvm(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])


def maximum(b, x, y):
    """The larger; y where one is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def minimum(b, x, y):
    """The smaller; y where one is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def absolute(b, x):
    return call_llvm(b, f"llvm.fabs.v{x.type.count}f32", x.type, [x])


def nearest(b, x):
    """To the nearest whole number; halves to the even one."""
    return call_llvm(b, f"llvm.nearbyint.v{x.type.count}f32", x.type, [x])


def align_stack(b):
    """Have the function's stack begin at a cache line, so that no spilled vector is in two.

    LLVM spills vectors to wherever the stack is, unless it has to be aligned for other memory.
    """
    memory = cgutils.alloca_once(b, V_I32)
    memory.align = 64
    kind = ir.FunctionType(ir.VoidType(), [memory.type])
    b.call(ir.InlineAsm(kind, "", "r", side_effect=True), [memory])  # which keeps it


def loop(b, count, carried):
    """Open a loop over 0..count-1: (index, phis, close); close(next values) returns the last."""
    before = b.block
    body, after = b.append_basic_block("loop"), b.append_basic_block("after")
    b.branch(body)
    b.position_at_end(body)
    index = b.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    phis = []
    for value in carried:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)

    def close(values):
        following = b.add(index, ir.Constant(I64, 1))
        index.add_incoming(following, b.block)
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, b.block)
        b.cbranch(b.icmp_signed("<", following, count), body, after)
        b.position_at_end(after)
        return values

    return index, phis, close


def switch(b, number, cases):
    """Run the one of `cases` (number -> function) that `number` says."""
    after = b.append_basic_block("switch_done")
    choice = b.switch(number, after)
    for case, emit in cases.items():
        block = b.append_basic_block("case")
        choice.add_case(const_i64(case), block)
        b.position_at_end(block)
        emit()
        b.branch(after)
    b.position_at_end(after)


FEATURES = host_features()


# Dot products of bfloat16. LLVM 15, of numba 0.61, has them with other types.
HAS_BF16 = "avx512bf16" in FEATURES and llvm.llvm_version_info[0] >= 20


def dot_bf16(b, acc, x, y):
    """acc[lane] += sum over a pair of x * y, in float32; vectors of i32 that hold the pairs."""
    pairs = [b.bitcast(vector, V_BF16) for vector in (x, y)]
    return call_llvm(b, "llvm.x86.avx512bf16.dpbf16ps.512", V_F32, [acc, *pairs])


def rounded_bf16(b, first, second):
    """Two vectors of float32 as bfloat16, one behind the other: 32 int16."""
    both = call_llvm(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", V_BF16, [second, first])
    return b.bitcast(both, ir.VectorType(I16, 2 * LANES))


def dot_u8s8(b, acc, u8, s8, bits=(8, 7), features=FEATURES):
    """acc[lane] += sum over 4 bytes of u8 (unsigned) * s8 (signed); exact in int32.

    bits: u8 is below 2**bits[0], and s8 no larger in magnitude than 2**bits[1]; the fewer, the less
    work for processors without such an instruction. One a register where the processor has it
    (VNNI; i8mm of ARM), one or three with ARM's dot products of signed bytes alone, three to nine
    on AVX2 and AVX-512, plain 32-bit multiplications elsewhere.
    """
    if "avx512vnni" in features:
        return _vpdpbusd(b, acc, u8, s8, 512)
    if width := register_lanes(features):
        parts = LANES // width
        return _by_parts(
            b, parts, lambda x, y, z: dots(b, x, [(y, z)], bits, features=features), acc, u8, s8
        )
    if "i8mm" in features:
        return _by_parts(b, 4, lambda x, y, z: _neon(b, "usdot", x, y, z), acc, u8, s8)
    if "dotprod" in features:
        signed_too = bits[0] < 8
        return _by_parts(b, 4, lambda x, y, z: _sdot(b, x, y, z, signed_too), acc, u8, s8)
    for byte in range(4):
        shift = const_i32(8 * byte)
        unsigned = b.and_(b.lshr(u8, shift), const_i32(255))
        signed = b.ashr(b.shl(s8, const_i32(24 - 8 * byte)), const_i32(24))
        acc = b.add(acc, b.mul(unsigned, signed))
    return acc


def adds_words(features=FEATURES):
    """Whether products of bytes are added up as 16-bit words: AVX2 and AVX-512BW without VNNI."""
    return bool({"avx512bw", "avx2"} & features) and not {"avx512vnni", "avxvnni"} & features


def register_lanes(features=FEATURES):
    """How many sums a register of `dots` has, 16 or 8; 0 where there are none.

    It pays to take one register of sums after the other where 16 sums are two of 16 registers, and
    where products are added up as words.
    """
    if adds_words(features):
        return 16 if "avx512bw" in features else 8
    return 8 if "avxvnni" in features and "avx512vnni" not in features else 0


def dots(b, acc, factors, bits=(8, 7), weight=1, features=FEATURES):
    """acc[lane] += weight * sum over pairs (u8, s8) and their 4 bytes of products; exact in int32.

    Vectors of `register_lanes`. bits: as of `dot_u8s8`. weight: a power of two up to 256.
    """
    if adds_words(features):
        return _dots_in_words(b, acc, factors, sum(bits), weight)
    total = acc if weight == 1 else _filled(acc.type, 0)
    for u8, s8 in factors:
        total = _vpdpbusd(b, total, u8, s8, 256)
    if weight == 1:
        return total
    return b.add(acc, b.shl(total, _filled(acc.type, weight.bit_length() - 1)))


def _dots_in_words(b, acc, factors, product_bits, weight):
    """By pairs of products that are added up as 16-bit words, for as many of `factors` as fit.

    These become 32-bit sums together. 255 * 128 * 2 does not fit: bytes of such products are halved
    into nibbles, of which 15 * 128 * 2 does, eight times.
    """
    together = words_together(product_bits)
    if together == 0:
        mask = _filled(acc.type, 0x0F0F0F0F)
        for shift in (0, 4):
            by = _filled(acc.type, shift)
            nibbles = [(b.and_(b.lshr(u8, by), mask), s8) for u8, s8 in factors]
            acc = _dots_in_words(b, acc, nibbles, product_bits - 4, weight << shift)
        return acc
    for start in range(0, len(factors), together):
        found = [words_of(b, u8, s8) for u8, s8 in factors[start : start + together]]
        total = found[0]
        for more in found[1:]:
            total = b.add(total, more)
        acc = b.add(acc, widened(b, total, weight))
    return acc


def words_together(product_bits):
    """How many sums of two products of so many bits fit into a 16-bit word."""
    return 1 << (14 - product_bits) if product_bits < 15 else 0


def words_of(b, u8, s8):
    """Sums of two neighbouring products of bytes, as 16-bit words."""
    wide = u8.type.count == 16
    name = "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw"
    words = ir.VectorType(I16, 2 * u8.type.count)
    return call_llvm(b, name, words, [_bytes(b, u8), _bytes(b, s8)])


def widened(b, words, weight):
    """Sums of two neighbouring 16-bit words, times `weight`, in 32 bits."""
    kind = ir.VectorType(I32, words.type.count // 2)
    name = "llvm.x86.avx512.pmaddw.d.512" if kind.count == 16 else "llvm.x86.avx2.pmadd.wd"
    return call_llvm(b, name, kind, [words, _filled(words.type, weight)])


def _filled(type_, value):
    return ir.Constant(type_, [value] * type_.count)


def _bytes(b, x):
    return b.bitcast(x, ir.VectorType(I8, 4 * x.type.count))


def _vpdpbusd(b, acc, u8, s8, width):
    if llvm.llvm_version_info[0] >= 22:  # since then the operands are vectors of bytes
        u8, s8 = _bytes(b, u8), _bytes(b, s8)
    return call_llvm(b, f"llvm.x86.avx512.vpdpbusd.{width}", acc.type, [acc, u8, s8])


def lanes(b, first, second, start, count):
    """`count` lanes of two vectors in a row, from lane `start` on."""
    mask = ir.Constant(ir.VectorType(I32, count), [start + i for i in range(count)])
    return b.shuffle_vector(first, second, mask)


def _neon(b, name, acc, x, y):
    """ARM's dot product of bytes with a register of four sums."""
    name = f"llvm.aarch64.neon.{name}.v4i32.v16i8"
    return call_llvm(b, name, acc.type, [acc, _bytes(b, x), _bytes(b, y)])


def _sdot(b, acc, u8, s8, signed_too):
    """By dot products of signed bytes; of 8 bits, (u - 128) * s + 64 * s + 64 * s."""
    if signed_too:
        return _neon(b, "sdot", acc, u8, s8)
    top, half = (_filled(acc.type, value) for value in (-0x7F7F7F80, 0x40404040))
    for x in (b.xor(u8, top), half, half):
        acc = _neon(b, "sdot", acc, x, s8)
    return acc


def _by_parts(b, parts, function, *vectors):
    """Apply `function` to the vectors, or to a half or a quarter of them after the other."""
    if parts == 1:
        return function(*vectors)
    width = LANES // parts
    return joined(
        b,
        [
            function(*(lanes(b, v, v, start, width) for v in vectors))
            for start in range(0, LANES, width)
        ],
    )


def joined(b, parts):
    """One vector of the lanes of 1, 2 or 4."""
    while len(parts) > 1:
        width = 2 * parts[0].type.count
        parts = [lanes(b, x, y, 0, width) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
