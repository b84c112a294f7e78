"""y = x W^T for some tens of tokens: weights dequantized in registers, products by `mma.sync`.

A weight is (code - centre) * scale + (minimum + centre * scale) in the dtype of x, with the centre
in the middle of the codes: both terms then round to a few parts in ten thousand of the weight's
size even in bfloat16. Codes are the left operand, x^T the right one. The leading dimension of the
products splits K over warps, so that none dequantizes what another does; see `gemm` for `wgmma`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import WARPS_OVER_ROWS
from qoff.kernels.triton.launch.overlap import wait_for_earlier
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .nibbles import byte_values, dot16, load_scale_min, low_high
from .product import (
    SPLITS_MAX,
    Case,
    Config,
    Epilogue,
    Prepared,
    multiply,
    prepare,
    rows_of,
    write,
)


@dataclass(frozen=True)
class SkinnyConfig(Config):
    """block_n, block_m: rows of W (a multiple of 16) and tokens of a program. row_bytes: bytes of
    codes of a row in a step, 32 at least. parts: steps that different warps do at once."""

    wgmma: ClassVar[bool] = False
    registers: int = 255
    block_n: int = 64
    block_m: int = 16
    row_bytes: int = 64
    parts: int = 4

    @property
    def step(self) -> int:
        """Bytes of a row that a program takes at once."""
        return self.parts * self.row_bytes


@triton.jit
def _spread(values, DTYPE: tl.constexpr, REPEAT: tl.constexpr):
    """[P, N, groups] to DTYPE [P, N, groups * REPEAT]: each value REPEAT times."""
    PARTS: tl.constexpr = values.shape[0]
    ROWS: tl.constexpr = values.shape[1]
    GROUPS: tl.constexpr = values.shape[2]
    wide = tl.broadcast_to(values.to(DTYPE)[:, :, :, None], (PARTS, ROWS, GROUPS, REPEAT))
    return tl.reshape(wide, (PARTS, ROWS, GROUPS * REPEAT))


@triton.jit
def _weights(codes, OFFSET: tl.constexpr, factor, middle, ASM: tl.constexpr):
    """(codes - OFFSET) * factor + middle; the difference is exact."""
    DTYPE: tl.constexpr = codes.dtype
    if ASM:
        weights = tl.fma((codes - OFFSET).to(DTYPE), factor, middle)
    else:  # the interpreter has no bfloat16 arithmetic, and truncates to it instead of rounding
        exact = codes.to(tl.float32) - OFFSET
        weights = exact * factor.to(tl.float32) + middle.to(tl.float32)
    return weights


@triton.jit
def _load(pointer, inside, EVEN: tl.constexpr):
    """Zero where it is not inside; with EVEN everything is."""
    return tl.load(pointer) if EVEN else tl.load(pointer, mask=inside, other=0)


@triton.jit
def skinny_sums(
    x, codes, scale_min, row, token, N, row_bytes, x_stride, start, steps, FORM: tl.constexpr
):
    """Rows of W times rows of x: float32 [BLOCK_N, BLOCK_M].

    row: [BLOCK_N], of those from N on scales are 0. token: [BLOCK_M], rows of x. start:
    first of the pieces of BYTES along K, which is a multiple of GROUP_BYTES or a part of it.
    """
    BLOCK_N: tl.constexpr = row.shape[0]
    BLOCK_M: tl.constexpr = token.shape[0]
    DTYPE: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = FORM.bits
    GROUP_BYTES: tl.constexpr = FORM.group_bytes
    BYTES: tl.constexpr = FORM.config.row_bytes
    PARTS: tl.constexpr = FORM.config.parts
    GROUPS: tl.constexpr = max(1, BYTES // GROUP_BYTES)
    SPREAD: tl.constexpr = 8 // BITS  # elements in a byte
    CENTRE: tl.constexpr = 8.0 if BITS == 4 else 128.0
    safe_row = tl.minimum(row, N - 1)
    column = tl.arange(0, BLOCK_M) >= 0  # of x: all, as a mask
    part = tl.arange(0, PARTS)
    byte = tl.arange(0, BYTES)
    group = tl.arange(0, GROUPS)
    element = byte if BITS == 8 else (byte // 16) * 32 + byte % 16

    first_byte = (start + part) * BYTES
    code_row = codes + safe_row[None, :, None].to(tl.int64) * row_bytes
    code_pointer = code_row + first_byte[:, None, None] + byte[None, None, :]
    x_row = x + token[None, None, :].to(tl.int64) * x_stride
    x_pointer = x_row + (first_byte * SPREAD)[:, None, None] + element[None, :, None]
    every = (part >= 0)[:, None, None] & (row >= 0)[None, :, None]
    total = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, steps, num_stages=FORM.config.stages):
        done = step * (PARTS * BYTES)
        left = (row_bytes - done - first_byte)[:, None, None]
        inside = every & (byte[None, None, :] < left)
        packed = _load(code_pointer + done, inside, FORM.even)
        inside = (byte[None, :, None] < left) & column[None, None, :]
        first = _load(x_pointer + done * SPREAD, inside, FORM.even)
        second = first
        if BITS == 4:
            second = _load(x_pointer + done * SPREAD + 16, inside, FORM.even)
        live = every & (row < N)[None, :, None] & (group >= 0)[None, None, :]
        if not FORM.even:
            live = live & ((group * GROUP_BYTES)[None, None, :] < left)
        first_group = (first_byte + done) // GROUP_BYTES
        pair = (first_group[:, None, None] + group[None, None, :]) * N + row[None, :, None]
        scale, minimum = load_scale_min(scale_min, pair, live, BITS)
        factor = _spread(scale, DTYPE, BYTES // GROUPS)
        middle = _spread(minimum + CENTRE * scale, DTYPE, BYTES // GROUPS)
        if BITS == 4:
            low, high = low_high(packed, DTYPE, FORM.asm, True)
            OFFSET: tl.constexpr = (1024.0 if tl.float16 == DTYPE else 128.0) + CENTRE
            low = _weights(low, OFFSET, factor, middle, FORM.asm)
            high = _weights(high, OFFSET, factor, middle, FORM.asm)
            total = dot16(low, first, total, FORM.asm)
            total = dot16(high, second, total, FORM.asm)
        else:
            values = byte_values(packed, DTYPE, FORM.asm)
            values = _weights(values, CENTRE, factor, middle, FORM.asm)
            total = dot16(values, first, total, FORM.asm)
    return tl.sum(total, axis=0)  # [BLOCK_N, BLOCK_M]


@triton.jit(do_not_specialize=["M", "steps"])
def skinny_kernel(
    x, codes, scale_min, bias, residual, out, M, N, row_bytes, x_stride, steps, FORM: tl.constexpr
):
    """The rows of W of program_id(0) times tokens program_id(1) * BLOCK_M .., part program_id(2) of
    K; see `skinny_sums` and `write`."""
    BLOCK_M: tl.constexpr = FORM.config.block_m
    row = rows_of(tl.program_id(0), FORM.config.block_n, FORM)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    some = tl.minimum(token, M - 1)
    start = tl.program_id(2) * steps * FORM.config.parts
    wait_for_earlier(FORM.overlap)
    y = skinny_sums(x, codes, scale_min, row, some, N, row_bytes, x_stride, start, steps, FORM)
    write(y, row, token, M, tl.program_id(2), bias, residual, out, M, N, FORM)


def choose(tokens: int, rows: int, row_bytes: int, group_bytes: int, gpu: Gpu) -> SkinnyConfig:
    """The configuration without a measured one.

    Each block of rows reads all of x, so more tokens want more rows; few rows want programs along
    K until each multiprocessor has one.
    """
    # Scales of small groups need the registers; so do the copies of a tile in older Tritons.
    fits = group_bytes >= 32 and (WARPS_OVER_ROWS or gpu.capability in (90, 120))
    block_m = min(64 if fits else 32, max(8, next_power_of_2(tokens)))
    config = SkinnyConfig(block_m=block_m)
    if block_m > 16 and WARPS_OVER_ROWS:
        config = replace(config, block_n=128, row_bytes=32 if block_m == 64 else 64, parts=2)
    elif block_m > 16:
        config = replace(config, row_bytes=32)
    programs = cdiv(rows, config.block_n) * cdiv(tokens, block_m)
    splits = min(gpu.processors // programs, row_bytes // (2 * config.step), SPLITS_MAX)
    return replace(config, splits=splits if splits >= 2 else 1)


def skinny(
    x: Tensor, weight: QTensor, bias: Tensor | None, config: SkinnyConfig, end: Epilogue
) -> Tensor:
    """x @ W.T + bias and what `end` says; operands as `w4_linear` takes them."""
    return multiply(_prepared(Case.of(x, weight, bias, end), config), x, weight, bias, end)


@cache
def _prepared(case: Case, config: SkinnyConfig) -> Prepared:
    programs = (cdiv(case.n, config.block_n), cdiv(case.m, config.block_m))
    return prepare(skinny_kernel, programs, config, config.step, case)
