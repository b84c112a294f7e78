"""y = x W^T for a few to some hundred tokens, with Hopper's `wgmma` fed from registers.

The product is y^T = W x^T: `wgmma` takes its left operand from registers, so the weights that a
warp dequantizes never go to shared memory. The right operand lies in shared memory in the order of
x. Four neighbouring lanes hold eight neighbouring inputs of a row, two each, so a lane reads codes
as two neighbouring bytes: with split32 these are two inputs and, in the high nibbles, the two that
lie 16 further on, which are the next 16 that an instruction takes.

A weight is (code - centre) * scale + (minimum + centre * scale), as in `skinny`.

`wgmma` reads its left operand while later instructions run. Triton 3.6 leaves products of a step in
flight when the next step begins, and its ptxas (12.8) gives registers that they read to
temporaries. So a step ends with a wait for its products (`_finish`).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.overlap import wait_for_earlier
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .nibbles import dot16, load_scale_min
from .planes import halves
from .product import (
    PLAIN,
    SPLITS_MAX,
    SUMS_BYTES,
    SUMS_TOKENS,
    Case,
    Config,
    Epilogue,
    Prepared,
    ended,
    multiply,
    prepare,
    splits_for,
    write,
)

# What follows takes two bytes of codes ($2, or $1) and a pair each of factors and of middles, and
# gives pairs of weights. `prmt` puts the bytes into the halves of a register, `lop3` cuts nibbles
# out and puts the exponent above them: 1024 + code (float16) or 128 + code (bfloat16), and
# 1024 + 16 * code for high nibbles in float16; 0xea is (a & b) | c. Then code - centre, exactly:
# 0xe408 is -1032, 0x2c00 1 / 16, 0xd480 -72 and 0xe480 -1152 as float16, 0x4180 16, 0xc300 -128 and
# 0xc308 -136 as bfloat16.
_NIBBLES_F16 = tl.constexpr("""{
    .reg .b32 pair, low, high, exponent, centre, part, part_centre;
    mov.b32 exponent, 0x64006400;
    mov.b32 centre, 0xe408e408;
    mov.b32 part, 0x2c002c00;
    mov.b32 part_centre, 0xd480d480;
    prmt.b32 pair, $2, 0, 0x4140;
    lop3.b32 low, pair, 0x000f000f, exponent, 0xea;
    lop3.b32 high, pair, 0x00f000f0, exponent, 0xea;
    add.f16x2 low, low, centre;
    fma.rn.f16x2 high, high, part, part_centre;
    fma.rn.f16x2 $0, low, $3, $4;
    fma.rn.f16x2 $1, high, $3, $4;
}""")
_NIBBLES_BF16 = tl.constexpr("""{
    .reg .b32 pair, low, high, exponent, one, centre;
    mov.b32 exponent, 0x43004300;
    mov.b32 one, 0x3f803f80;
    mov.b32 centre, 0xc308c308;
    prmt.b32 pair, $2, 0, 0x4140;
    lop3.b32 low, pair, 0x000f000f, exponent, 0xea;
    shr.u32 pair, pair, 4;
    lop3.b32 high, pair, 0x000f000f, exponent, 0xea;
    fma.rn.bf16x2 low, low, one, centre;
    fma.rn.bf16x2 high, high, one, centre;
    fma.rn.bf16x2 $0, low, $3, $4;
    fma.rn.bf16x2 $1, high, $3, $4;
}""")
_BYTES_F16 = tl.constexpr("""{
    .reg .b32 pair, centre;
    mov.b32 centre, 0xe480e480;
    prmt.b32 pair, $1, 0x64646464, 0x4140;
    add.f16x2 pair, pair, centre;
    fma.rn.f16x2 $0, pair, $2, $3;
}""")
_BYTES_BF16 = tl.constexpr("""{
    .reg .b32 pair, low, high, exponent, one, sixteen, offset, centre;
    mov.b32 exponent, 0x43004300;
    mov.b32 one, 0x3f803f80;
    mov.b32 sixteen, 0x41804180;
    mov.b32 offset, 0xc300c300;
    mov.b32 centre, 0xc308c308;
    prmt.b32 pair, $1, 0, 0x4140;
    lop3.b32 low, pair, 0x000f000f, exponent, 0xea;
    shr.u32 pair, pair, 4;
    lop3.b32 high, pair, 0x000f000f, exponent, 0xea;
    fma.rn.bf16x2 low, low, one, offset;
    fma.rn.bf16x2 high, high, one, centre;
    fma.rn.bf16x2 pair, high, sixteen, low;
    fma.rn.bf16x2 $0, pair, $2, $3;
}""")
_FINISH = tl.constexpr("wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;")
_TWICE_F16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")
_TWICE_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")


@dataclass(frozen=True)
class GemmConfig(Config):
    """block_n, block_m: rows of W (a multiple of 16 for each warp) and tokens of a program.
    row_bytes: bytes of codes of a row in a step, 16 at least."""

    wgmma: ClassVar[bool] = True
    registers: int = 0
    block_n: int = 128
    block_m: int = 64
    row_bytes: int = 64

    @property
    def step(self) -> int:
        """Bytes of a row that a program takes at once."""
        return self.row_bytes


# Tiles that do not spill. Two programs of four warps share an SM, so that one dequantizes while the
# other multiplies; the largest tile has eight warps.
_TILES = (
    GemmConfig(warps=8, block_m=256),
    GemmConfig(block_n=64, block_m=128),
)
FEW = tl.constexpr(64)  # tokens, up to which programs along K matter more than tiles
_FULL_BLOCK = 128  # rows of a program, if there are so many for each SM
_WARPS = 8  # of an SM
# To read and dequantize a weight takes an SM as long as to multiply it by so many tokens; to write
# and add up a partial sum as long as a product along so many inputs.
_DEQUANTIZE_TOKENS, _PARTIAL_INPUTS = 64, 512


@triton.jit
def _spread(values, REPEAT: tl.constexpr):
    """[N, groups] to [N, groups * REPEAT]: each value REPEAT times."""
    ROWS: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(values[:, :, None], (ROWS, GROUPS, REPEAT))
    return tl.reshape(wide, (ROWS, GROUPS * REPEAT))


@triton.jit
def _twice(values, DTYPE: tl.constexpr):
    """Float32 values, each rounded to DTYPE in both halves of a uint32."""
    return tl.inline_asm_elementwise(
        _TWICE_F16 if tl.float16 == DTYPE else _TWICE_BF16,
        "=r,r",
        [values],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _unpaired(pairs, DTYPE: tl.constexpr):
    """Pairs of DTYPE in uint32 [N, P] as DTYPE [N, 2 * P]."""
    even, odd = halves(pairs, DTYPE)
    return tl.reshape(tl.join(even, odd), (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def _ordered(low, high):
    """Inputs [N, 2 * BYTES] in their order, of those in low and in high nibbles."""
    ROWS: tl.constexpr = low.shape[0]
    BYTES: tl.constexpr = low.shape[1]
    both = tl.reshape(tl.join(low, high), (ROWS, BYTES // 16, 16, 2))
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (ROWS, 2 * BYTES))


@triton.jit
def _weights(codes, scale, minimum, DTYPE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Weights [N, inputs] of two bytes of codes each, uint16 [N, P], and scales [N, groups]."""
    CENTRE: tl.constexpr = 8.0 if BITS == 4 else 128.0
    REPEAT: tl.constexpr = codes.shape[1] // scale.shape[1]
    middle = minimum + CENTRE * scale
    if ASM:
        factor, middle = (
            _spread(_twice(scale, DTYPE), REPEAT),
            _spread(_twice(middle, DTYPE), REPEAT),
        )
        codes = codes.to(tl.uint32)
        if BITS == 4:
            low, high = tl.inline_asm_elementwise(
                _NIBBLES_F16 if tl.float16 == DTYPE else _NIBBLES_BF16,
                "=r,=r,r,r,r",
                [codes, factor, middle],
                dtype=(tl.uint32, tl.uint32),
                is_pure=True,
                pack=1,
            )
            weights = _ordered(_unpaired(low, DTYPE), _unpaired(high, DTYPE))
        else:
            pairs = tl.inline_asm_elementwise(
                _BYTES_F16 if tl.float16 == DTYPE else _BYTES_BF16,
                "=r,r,r,r",
                [codes, factor, middle],
                dtype=tl.uint32,
                is_pure=True,
                pack=1,
            )
            weights = _unpaired(pairs, DTYPE)
    else:  # the interpreter has no bfloat16 arithmetic
        factor = _spread(scale.to(DTYPE).to(tl.float32), 2 * REPEAT)
        middle = _spread(middle.to(DTYPE).to(tl.float32), 2 * REPEAT)
        bytes_ = tl.join(codes & 255, codes >> 8)
        bytes_ = tl.reshape(bytes_, (codes.shape[0], 2 * codes.shape[1]))
        if BITS == 4:
            low = ((bytes_ & 15).to(tl.float32) - CENTRE) * factor + middle
            high = ((bytes_ >> 4).to(tl.float32) - CENTRE) * factor + middle
            weights = _ordered(low, high)
        else:
            weights = (bytes_.to(tl.float32) - CENTRE) * factor + middle
    return weights


@triton.jit
def _finish(step):
    """Wait for all products; `step` is only there because inline assembly wants an operand."""
    tl.inline_asm_elementwise(_FINISH, "=r,r", [step], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def gemm_sums(
    x, codes, scale_min, row, token, there, N, row_bytes, x_stride, start, steps, FORM: tl.constexpr
):
    """Rows of W times rows of x: float32 [BLOCK_N, BLOCK_M].

    row: [BLOCK_N], of those from N on scales are 0. token: [BLOCK_M], rows of x. there: [BLOCK_M],
    tokens that exist; in blocks of up to FEW nothing is read for the others, whose sums are 0.
    start: first of the `steps` pieces of BYTES along K, of which there is one at least: were there
    none, the sums would be set to zero where `wgmma` may still write, and be waited for each step.
    """
    BLOCK_N: tl.constexpr = row.shape[0]
    BLOCK_M: tl.constexpr = token.shape[0]
    DTYPE: tl.constexpr = x.dtype.element_ty
    BYTES: tl.constexpr = FORM.config.row_bytes
    PAIRS: tl.constexpr = BYTES // 2
    GROUP_BYTES: tl.constexpr = FORM.group_bytes
    GROUPS: tl.constexpr = max(1, BYTES // GROUP_BYTES)
    INPUTS: tl.constexpr = BYTES * (8 // FORM.bits)
    tl.assume(steps > 0)
    safe_row = tl.minimum(row, N - 1)
    pair = tl.arange(0, PAIRS)
    element = tl.arange(0, INPUTS)
    group = tl.arange(0, GROUPS)
    code_row = codes.to(tl.pointer_type(tl.uint16)) + safe_row[:, None].to(tl.int64) * (
        row_bytes // 2
    )
    code_pointer = code_row + start * PAIRS + pair[None, :]
    x_pointer = x + token[None, :].to(tl.int64) * x_stride + start * INPUTS + element[:, None]
    read = (there | (BLOCK_M > FEW))[None, :] & (element >= 0)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, steps, num_stages=FORM.config.stages):
        done = (start + step) * BYTES
        live = (row < N)[:, None] & (group >= 0)[None, :]
        if FORM.even:
            packed = tl.load(code_pointer + step * PAIRS)
            inputs = tl.load(x_pointer + step * INPUTS, mask=read, other=0.0)
        else:
            left = row_bytes - done
            inside = (row >= 0)[:, None] & (pair < left // 2)[None, :]
            packed = tl.load(code_pointer + step * PAIRS, mask=inside, other=0)
            inside = (element < left * (8 // FORM.bits))[:, None] & read
            inputs = tl.load(x_pointer + step * INPUTS, mask=inside, other=0.0)
            live = live & (group * GROUP_BYTES < left)[None, :]
        first_group = done // GROUP_BYTES
        index = (first_group + group)[None, :] * N + row[:, None]
        scale, minimum = load_scale_min(scale_min, index, live, FORM.bits)
        weights = _weights(packed, scale, minimum, DTYPE, FORM.bits, FORM.asm)
        total = dot16(weights, inputs, total, FORM.asm)
        if FORM.wgmma:
            _finish(step)
    return total


@triton.jit(do_not_specialize=["M", "steps"])
def gemm_kernel(
    x, codes, scale_min, bias, residual, out, M, N, row_bytes, x_stride, steps, FORM: tl.constexpr
):
    """Rows program_id(1) * BLOCK_N .. of W times tokens program_id(0) * BLOCK_M .., part
    program_id(2) of K; see `gemm_sums` and `write`. Programs that share rows of W run together."""
    BLOCK_N: tl.constexpr = FORM.config.block_n
    BLOCK_M: tl.constexpr = FORM.config.block_m
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    some = tl.minimum(token, M - 1)
    start = tl.program_id(2) * steps
    wait_for_earlier(FORM.overlap)
    y = gemm_sums(
        x, codes, scale_min, row, some, token < M, N, row_bytes, x_stride, start, steps, FORM
    )
    write(y, row, token, M, tl.program_id(2), bias, residual, out, M, N, FORM)


def choose(tokens: int, rows: int, row_bytes: int, group_bytes: int, gpu: Gpu) -> GemmConfig:
    """The configuration without a measured one: for few tokens enough programs along K, for more
    the tile that takes the least time by a rough count of cycles."""
    if tokens <= FEW.value:
        return _for_few(tokens, rows, row_bytes, gpu)
    configs = _configs(row_bytes)
    return min(configs, key=lambda config: _cost(config, tokens, rows, row_bytes, gpu))


def _for_few(tokens: int, rows: int, row_bytes: int, gpu: Gpu) -> GemmConfig:
    """Large blocks of rows where each SM has one, since each reads all of x: by computation alone.

    Otherwise what was fastest, or nearly so, of a dozen tiles on an H200, for 4, 16 and 64 tokens.
    """
    block_m = max(16, next_power_of_2(tokens))
    if rows >= _FULL_BLOCK * gpu.processors:
        return GemmConfig(
            warps=8,
            stages=4,
            registers=128,  # two programs an SM
            block_n=_FULL_BLOCK,
            block_m=block_m,
            row_bytes=128 if block_m == 16 else 64,
        )
    tile = GemmConfig(block_n=64, block_m=block_m, row_bytes=128 if tokens <= 32 else 64)
    most = row_bytes // max(SUMS_BYTES, 4 * tile.row_bytes)
    splits = splits_for(cdiv(rows, tile.block_n), 1.9 * gpu.processors, most)
    return replace(tile, splits=splits)


def _configs(row_bytes: int) -> Iterator[GemmConfig]:
    """Each tile with each number of programs along K."""
    for tile in _TILES:
        yield tile
        splits = 2
        while splits <= min(SPLITS_MAX, row_bytes // max(SUMS_BYTES, 4 * tile.row_bytes)):
            if tile.block_m <= SUMS_TOKENS:
                yield replace(tile, splits=splits)
            splits *= 2


def _cost(config: GemmConfig, tokens: int, rows: int, row_bytes: int, gpu: Gpu) -> float:
    """In products of a weight and a token that an SM does; a row has about two inputs in a byte.

    K is split only as far as all programs run at once.
    """
    programs = cdiv(rows, config.block_n) * cdiv(tokens, config.block_m)
    together = _WARPS // config.warps
    rounds = cdiv(programs * config.splits, together * gpu.processors) * together
    if config.splits > 1 and rounds > together:
        return math.inf
    work = 2 * row_bytes / config.splits * (config.block_m + _DEQUANTIZE_TOKENS)
    if config.splits > 1:
        work += _PARTIAL_INPUTS * config.block_m
    return rounds * config.block_n * work


def gemm(
    x: Tensor, weight: QTensor, bias: Tensor | None, config: GemmConfig, end: Epilogue
) -> Tensor:
    """x @ W.T + bias and what `end` says; operands as `w4_linear` takes them.

    Where one program has all of K, it has no registers left for what `end` says.
    """
    within = end if config.splits > 1 else PLAIN
    y = multiply(_prepared(Case.of(x, weight, bias, within), config), x, weight, bias, within)
    return y if within is end else ended(y, end)


@cache
def _prepared(case: Case, config: GemmConfig) -> Prepared:
    programs = (cdiv(case.m, config.block_m), cdiv(case.n, config.block_n))
    return prepare(gemm_kernel, programs, config, config.step, case)
