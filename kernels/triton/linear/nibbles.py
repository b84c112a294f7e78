"""Packed codes to floats inside Triton kernels, without integer-to-float conversions.

`0x6400 | code` read as float16 is 1024 + code, exactly, for codes up to 1023; `0x4300 | code` read
as bfloat16 is 128 + code for codes up to 127. An offset is taken off by one exact subtraction, or
left in where a rank-one term of the caller absorbs it. Conversion instructions run at a quarter of
the rate.

Four codes that one 32-bit register holds become two registers of two floats by one mask and two
byte permutations (`prmt`), in inline assembly; with `ASM` false, as in Triton's interpreter, plain
operations give the same values, bit for bit.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from qoff.kernels.layout import scales

SPAN_SHIFT, SPAN_EXPONENT = tl.constexpr(scales.SHIFT), tl.constexpr(scales.EXPONENT)
ZERO_STEPS = tl.constexpr(scales.STEPS)

# Four packed bytes $4 to low nibbles ($0, $1) and high nibbles ($2, $3), offsets left in. `prmt`
# puts a byte of the second source (the exponent, four times) above each nibble.
_SPLIT = """{{
    .reg .b32 low, high;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, {exponent}, 0x4140;
    prmt.b32 $1, low, {exponent}, 0x4342;
    prmt.b32 $2, high, {exponent}, 0x4140;
    prmt.b32 $3, high, {exponent}, 0x4342;
    {subtract}
}}"""
_SUBTRACT_F16 = (
    ".reg .b32 offset; mov.b32 offset, 0x64006400;"
    " sub.f16x2 $0, $0, offset; sub.f16x2 $1, $1, offset;"
    " sub.f16x2 $2, $2, offset; sub.f16x2 $3, $3, offset;"
)
_SUBTRACT_BF16 = (
    ".reg .b32 one, offset; mov.b32 one, 0x3f803f80; mov.b32 offset, 0xc300c300;"
    " fma.rn.bf16x2 $0, $0, one, offset; fma.rn.bf16x2 $1, $1, one, offset;"
    " fma.rn.bf16x2 $2, $2, one, offset; fma.rn.bf16x2 $3, $3, one, offset;"
)
SPLIT_F16 = tl.constexpr(_SPLIT.format(exponent="0x64646464", subtract=""))
SPLIT_BF16 = tl.constexpr(_SPLIT.format(exponent="0x43434343", subtract=""))
EXACT_F16 = tl.constexpr(_SPLIT.format(exponent="0x64646464", subtract=_SUBTRACT_F16))
EXACT_BF16 = tl.constexpr(_SPLIT.format(exponent="0x43434343", subtract=_SUBTRACT_BF16))

# Four packed bytes $2 to bfloat16 ($0, $1): 16 * (high - 128) + (low - 128) of the offset nibbles.
BYTES_BF16 = tl.constexpr("""{
    .reg .b32 low, high, l0, l1, h0, h1, one, offset, sixteen;
    mov.b32 one, 0x3f803f80;
    mov.b32 offset, 0xc300c300;
    mov.b32 sixteen, 0x41804180;
    and.b32 low, $2, 0x0f0f0f0f;
    shr.u32 high, $2, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 l0, low, 0x43434343, 0x4140;
    prmt.b32 l1, low, 0x43434343, 0x4342;
    prmt.b32 h0, high, 0x43434343, 0x4140;
    prmt.b32 h1, high, 0x43434343, 0x4342;
    fma.rn.bf16x2 l0, l0, one, offset;
    fma.rn.bf16x2 l1, l1, one, offset;
    fma.rn.bf16x2 h0, h0, one, offset;
    fma.rn.bf16x2 h1, h1, one, offset;
    fma.rn.bf16x2 $0, h0, sixteen, l0;
    fma.rn.bf16x2 $1, h1, sixteen, l1;
}""")

# Four packed bytes $2 to 1024 + byte ($0, $1).
BYTES_F16 = tl.constexpr(
    "prmt.b32 $0, $2, 0x64646464, 0x4140; prmt.b32 $1, $2, 0x64646464, 0x4342;"
)


@triton.jit
def low_high(codes, DTYPE: tl.constexpr, ASM: tl.constexpr, OFFSET: tl.constexpr = False):
    """The low and the high nibbles of uint8 `codes` as two tiles of DTYPE (float16 or bfloat16).

    With OFFSET every value is too large by 1024 (float16) or 128 (bfloat16).
    """
    if ASM:
        F16: tl.constexpr = SPLIT_F16 if OFFSET else EXACT_F16
        BF16: tl.constexpr = SPLIT_BF16 if OFFSET else EXACT_BF16
        low, high = tl.inline_asm_elementwise(
            F16 if tl.float16 == DTYPE else BF16,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(DTYPE.value, DTYPE.value),
            is_pure=True,
            pack=4,
        )
    else:
        EXPONENT: tl.constexpr = 0x6400 if tl.float16 == DTYPE else 0x4300
        wide = codes.to(tl.uint16)
        low = ((wide & 15) | EXPONENT).to(DTYPE, bitcast=True)
        high = ((wide >> 4) | EXPONENT).to(DTYPE, bitcast=True)
        if not OFFSET:
            offset = 1024.0 if tl.float16 == DTYPE else 128.0
            low = (low.to(tl.float32) - offset).to(DTYPE)
            high = (high.to(tl.float32) - offset).to(DTYPE)
    return low, high


@triton.jit
def byte_values(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """8-bit `codes` (uint8) as a tile of DTYPE (float16 or bfloat16; both hold 0..255 exactly)."""
    if tl.float16 == DTYPE:
        if ASM:
            values = tl.inline_asm_elementwise(
                BYTES_F16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
            )
        else:
            values = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        values = (values - 1024.0).to(tl.float16)
    elif ASM:
        values = tl.inline_asm_elementwise(
            BYTES_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        values = codes.to(tl.float32).to(tl.bfloat16)
    return values


@triton.jit
def load_scale_min(scale_min, index, mask, BITS: tl.constexpr):
    """Scale and minimum (float32) of the groups at `index`, in units of pairs, of codes of BITS.

    0 where masked; of compact ones, 0 is the minimum alone.
    """
    if scale_min.dtype.element_ty == tl.uint8:
        pairs = tl.load(scale_min.to(tl.pointer_type(tl.uint16)) + index, mask=mask, other=0)
        span = (pairs & 255).to(tl.uint32) << SPAN_SHIFT
        scale = (span + ((SPAN_EXPONENT - BITS) << 23)).to(tl.float32, bitcast=True)
        minimum = (pairs >> 8).to(tl.float32) * (scale * (-(2.0**BITS) / ZERO_STEPS))
    elif scale_min.dtype.element_ty == tl.float16:
        pairs = tl.load(scale_min.to(tl.pointer_type(tl.uint32)) + index, mask=mask, other=0)
        scale = pairs.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        pairs = tl.load(scale_min.to(tl.pointer_type(tl.uint64)) + index, mask=mask, other=0)
        scale = pairs.to(tl.uint32).to(tl.float32, bitcast=True)
        minimum = (pairs >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return scale, minimum


@triton.jit
def dot16(a, b, acc, ASM: tl.constexpr):
    """acc + a @ b of 16-bit floats, accumulated in float32.

    Triton's interpreter multiplies bfloat16 as if it were integers; without ASM the operands
    become float32, which keeps every product exact.
    """
    if ASM:
        acc = tl.dot(a, b, acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return acc
