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

from qoff.kernels.triton.linear.planes import byte_planes, halves, nibble_planes

from .kv_tiles import load_code_rows, load_where


@triton.jit
def raised_pairs(first, second, BITS: tl.constexpr, ASM: tl.constexpr):
    """Four float16 planes of uint16 tiles of pairs of bytes: even, odd, even, odd channels.

    8 bits: 1024 + code, two planes from each tile. Fewer: 1024 + code of the low nibbles, twice,
    and 1024 + 16 * code of the high nibbles, twice; `second` is not read.
    """
    if BITS <= 4:
        a, b, c, d = nibble_planes(first, tl.float16, True, ASM)
    else:
        a, b = byte_planes(first, tl.float16, ASM)
        c, d = byte_planes(second, tl.float16, ASM)
    return a, b, c, d


@triton.jit
def load_code_pairs(
    codes, token, pair, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Codes of the low and the high channels, uint16 tiles (one tile below 8 bits).

    token and pair: [64, 1] and [1, PAIRS], or [1, 64] and [PAIRS, 1] for a turned tile. An element
    is two bytes, of neighbouring channels. 0 beyond HEAD_DIM / 4 pairs.
    """
    QUARTER: tl.constexpr = HEAD_DIM // 4
    WIDTH: tl.constexpr = 2 * QUARTER if BITS == 8 else QUARTER
    at = codes.to(tl.pointer_type(tl.uint16))
    inside = pair < QUARTER
    first = load_code_rows(at, token, pair, inside, WIDTH, BITS, PAIRS == QUARTER)
    second = first
    if BITS == 8:
        second = load_code_rows(at + QUARTER, token, pair, inside, WIDTH, BITS, PAIRS == QUARTER)
    return first, second


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
