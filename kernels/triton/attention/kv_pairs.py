"""Tiles of packed codes as 16-bit pairs of bytes, for decode attention inside Triton kernels.

A 16-bit element holds two neighbouring bytes of one token, and so is as wide as the float16 values
it becomes: four planes (the even and the odd channels of the low and of the high nibbles) come out
of it by masks alone, in whatever layout it is. Elements can be transposed as they are, by the
instructions that transpose float16 matrices.

The planes hold 1024 + code and 1024 + 16 * code: an OR with 0x6400 in each half of a register. The
factor 16 and the 1024 cost nothing per value: queries or results take the factor, and the 1024 is
taken off by a dot of a constant with the same operand, whose rounding therefore cancels.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from .kv_tiles import TOKENS, load_where

# Four packed bytes $4, two pairs, to 1024 + nibble: low nibbles of the even bytes ($0) and of the
# odd bytes ($1), and 1024 + 16 * the high nibbles ($2, $3). 0xea is (a & b) | c.
RAISE_NIBBLE_PAIRS = tl.constexpr("""{
    .reg .b32 odd;
    shr.u32 odd, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, odd, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $2, $4, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $3, odd, 0x00f000f0, 0x64006400, 0xea;
}""")
# Four bytes $2 to 1024 + byte: the even ones ($0) and the odd ones ($1).
RAISE_BYTE_PAIRS = tl.constexpr("""{
    .reg .b32 odd;
    shr.u32 odd, $2, 8;
    lop3.b32 $0, $2, 0x00ff00ff, 0x64006400, 0xea;
    lop3.b32 $1, odd, 0x00ff00ff, 0x64006400, 0xea;
}""")


@triton.jit
def raised_pairs(first, second, BITS: tl.constexpr, ASM: tl.constexpr):
    """Four float16 planes of uint16 tiles of pairs of bytes: even, odd, even, odd channels.

    4 bits: 1024 + code of the low nibbles, twice, and 1024 + 16 * code of the high nibbles, twice;
    `second` is not read. 8 bits: 1024 + code, two planes from each tile.
    """
    if BITS == 4:
        if ASM:
            a, b, c, d = tl.inline_asm_elementwise(
                RAISE_NIBBLE_PAIRS,
                "=r,=r,=r,=r,r",
                [first],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            a = ((first & 0x0F) | 0x6400).to(tl.float16, bitcast=True)
            b = (((first >> 8) & 0x0F) | 0x6400).to(tl.float16, bitcast=True)
            c = ((first & 0xF0) | 0x6400).to(tl.float16, bitcast=True)
            d = (((first >> 8) & 0xF0) | 0x6400).to(tl.float16, bitcast=True)
    else:
        a, b = _raised_byte_pairs(first, ASM)
        c, d = _raised_byte_pairs(second, ASM)
    return a, b, c, d


@triton.jit
def _raised_byte_pairs(codes, ASM: tl.constexpr):
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            RAISE_BYTE_PAIRS,
            "=r,=r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = ((codes & 0xFF) | 0x6400).to(tl.float16, bitcast=True)
        odd = ((codes >> 8) | 0x6400).to(tl.float16, bitcast=True)
    return even, odd


@triton.jit
def load_code_pairs(codes, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, BITS: tl.constexpr):
    """Codes of the low and the high channels, uint16 [64, PAIRS] each (the same tile if 4-bit).

    An element is two bytes, of neighbouring channels. 0 beyond HEAD_DIM / 4 pairs.
    """
    QUARTER: tl.constexpr = HEAD_DIM // 4
    WIDTH: tl.constexpr = HEAD_DIM * BITS // 16
    pair = tl.arange(0, PAIRS)
    place = tl.arange(0, TOKENS)[:, None] * WIDTH + pair[None, :]
    at = codes.to(tl.pointer_type(tl.uint16)) + place
    inside = (pair < QUARTER)[None, :]
    first = load_where(at, inside, PAIRS == QUARTER)
    second = first
    if BITS == 8:
        second = load_where(at + QUARTER, inside, PAIRS == QUARTER)
    return first, second


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """The low and the high 16 bits of uint32 `pairs` as two tiles of DTYPE."""
    even = (pairs & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    odd = (pairs >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return even, odd


@triton.jit
def load_channel_pairs(params, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Four parameters per pair of channels, float16 [PAIRS] each: of the channels 2i, 2i + 1,
    HEAD_DIM / 2 + 2i and HEAD_DIM / 2 + 2i + 1."""
    QUARTER: tl.constexpr = HEAD_DIM // 4
    pair = tl.arange(0, PAIRS)
    at = params.to(tl.pointer_type(tl.uint32)) + pair
    first = load_where(at, pair < QUARTER, PAIRS == QUARTER)
    second = load_where(at + QUARTER, pair < QUARTER, PAIRS == QUARTER)
    a, b = halves(first, tl.float16)
    c, d = halves(second, tl.float16)
    return a, b, c, d
