"""Tiles of two bytes of codes each, as planes of the even and of the odd bytes, for `gemv`.

Masks alone cut planes out of a register of four bytes: the bytes 0 and 2 lie as two floats would.
What they are multiplied with comes in pairs of neighbours, too, and is parted alike.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

# Four bytes $4 to low nibbles of the even and of the odd bytes ($0, $1) and high ones ($2, $3), put
# below an exponent: 1024 + code in float16, 128 + code in bfloat16. 0xea is (a & b) | c.
_PARTED = """{{
    .reg .b32 part;
    lop3.b32 $0, $4, 0x000f000f, {exponent}, 0xea;
    shr.u32 part, $4, 8;
    lop3.b32 $1, part, 0x000f000f, {exponent}, 0xea;
    shr.u32 part, $4, 4;
    lop3.b32 $2, part, 0x000f000f, {exponent}, 0xea;
    shr.u32 part, $4, 12;
    lop3.b32 $3, part, 0x000f000f, {exponent}, 0xea;
}}"""
NIBBLES_F16 = tl.constexpr(_PARTED.format(exponent="0x64006400"))
NIBBLES_BF16 = tl.constexpr(_PARTED.format(exponent="0x43004300"))
# The same in five instructions instead of seven, with 1024 + 16 * code of the high nibbles.
RAISED_F16 = tl.constexpr("""{
    .reg .b32 part;
    shr.u32 part, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, part, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $2, $4, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $3, part, 0x00f000f0, 0x64006400, 0xea;
}""")
# Four bytes $2 to 1024 + byte, the even and the odd ones.
BYTES_F16 = tl.constexpr("""{
    .reg .b32 part;
    shr.u32 part, $2, 8;
    lop3.b32 $0, $2, 0x00ff00ff, 0x64006400, 0xea;
    lop3.b32 $1, part, 0x00ff00ff, 0x64006400, 0xea;
}""")
# The bytes themselves: 16 * (high - 128) + (low - 128) of the offset nibbles.
BYTES_BF16 = tl.constexpr("""{
    .reg .b32 l0, l1, h0, h1, one, offset, sixteen;
    mov.b32 one, 0x3f803f80;
    mov.b32 offset, 0xc300c300;
    mov.b32 sixteen, 0x41804180;
    lop3.b32 l0, $2, 0x000f000f, 0x43004300, 0xea;
    shr.u32 l1, $2, 8;
    lop3.b32 l1, l1, 0x000f000f, 0x43004300, 0xea;
    shr.u32 h0, $2, 4;
    lop3.b32 h0, h0, 0x000f000f, 0x43004300, 0xea;
    shr.u32 h1, $2, 12;
    lop3.b32 h1, h1, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 l0, l0, one, offset;
    fma.rn.bf16x2 l1, l1, one, offset;
    fma.rn.bf16x2 h0, h0, one, offset;
    fma.rn.bf16x2 h1, h1, one, offset;
    fma.rn.bf16x2 $0, h0, sixteen, l0;
    fma.rn.bf16x2 $1, h1, sixteen, l1;
}""")
# 1.0 for every two bytes. Made from the codes so that the tile gets their layout.
ONES_F16 = tl.constexpr("mov.b32 $0, 0x3c003c00; // $1")
ONES_BF16 = tl.constexpr("mov.b32 $0, 0x3f803f80; // $1")


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """The low and the high 16 bits of uint32 `pairs` as two tiles of DTYPE."""
    even = (pairs & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    odd = (pairs >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return even, odd


@triton.jit
def ones_like(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A tile of ones of the shape of `codes` (uint16), in the layout of the codes."""
    if ASM:
        ones = tl.inline_asm_elementwise(
            ONES_F16 if tl.float16 == DTYPE else ONES_BF16,
            "=r,r",
            [codes],
            dtype=DTYPE.value,
            is_pure=True,
            pack=2,
        )
    else:
        ones = tl.full(codes.shape, 1.0, DTYPE)
    return ones


@triton.jit
def nibble_planes(codes, DTYPE: tl.constexpr, RAISED: tl.constexpr, ASM: tl.constexpr):
    """Even and odd low nibbles, even and odd high ones of uint16 `codes`, as four tiles of DTYPE.

    All are too large by 1024 (float16) or 128 (bfloat16). RAISED, float16 alone: high ones times
    16 before that.
    """
    if ASM:
        NIBBLES: tl.constexpr = NIBBLES_F16 if tl.float16 == DTYPE else NIBBLES_BF16
        a, b, c, d = tl.inline_asm_elementwise(
            RAISED_F16 if RAISED else NIBBLES,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value),
            is_pure=True,
            pack=2,
        )
    else:
        EXPONENT: tl.constexpr = 0x6400 if tl.float16 == DTYPE else 0x4300
        SHIFT: tl.constexpr = 0 if RAISED else 4
        MASK: tl.constexpr = 0xF0 if RAISED else 15
        a = ((codes & 15) | EXPONENT).to(DTYPE, bitcast=True)
        b = (((codes >> 8) & 15) | EXPONENT).to(DTYPE, bitcast=True)
        c = (((codes >> SHIFT) & MASK) | EXPONENT).to(DTYPE, bitcast=True)
        d = (((codes >> (8 + SHIFT)) & MASK) | EXPONENT).to(DTYPE, bitcast=True)
    return a, b, c, d


@triton.jit
def byte_planes(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The even and the odd bytes of uint16 `codes`, as two tiles of DTYPE; float16: 1024 + byte."""
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            BYTES_F16 if tl.float16 == DTYPE else BYTES_BF16,
            "=r,=r,r",
            [codes],
            dtype=(DTYPE.value, DTYPE.value),
            is_pure=True,
            pack=2,
        )
    elif tl.float16 == DTYPE:
        even = ((codes & 255) | 0x6400).to(DTYPE, bitcast=True)
        odd = ((codes >> 8) | 0x6400).to(DTYPE, bitcast=True)
    else:
        even = (codes & 255).to(tl.float32).to(DTYPE)
        odd = (codes >> 8).to(tl.float32).to(DTYPE)
    return even, odd
