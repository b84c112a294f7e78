"""A product of a mixture of experts for few pairs of a token and an expert: each by itself.

A program computes some rows of one pair, as `linear.gemv` does for a token, or without tensor cores
as `linear.fma` does. Pairs of one expert each read its codes, from the second-level cache at best.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.linear.fma import FmaConfig, fma_sums
from qoff.kernels.triton.linear.gemv import COLUMNS, GemvConfig, gemv_sums, groups_per_step
from qoff.kernels.triton.linear.nibbles import use_asm
from qoff.kernels.triton.linear.product import options

from .product import Product, expert_of, finish

GEMV = GemvConfig(block_n=32)  # rows of a program: 16 of gate and 16 of up
FMA = FmaConfig(block_n=32, block_bytes=128)


@triton.jit(do_not_specialize=["per_token", "code_distance", "scale_distance", "steps"])
def experts_gemv_kernel(
    x,
    codes,
    scale_min,
    bias,
    topk_weights,
    out,
    topk_ids,
    per_token,  # pairs that share a row of x
    code_distance,
    scale_distance,
    N,
    row_bytes,
    x_stride,
    steps,
    GROUPS: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    COLS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows program_id(0) * BLOCK_N .. of pair program_id(1); see `gemv_sums` and `finish`."""
    pair = tl.program_id(1)
    first_row = tl.program_id(0) * BLOCK_N
    expert = tl.load(topk_ids + pair)
    expert_codes, scales = expert_of(codes, scale_min, expert, code_distance, scale_distance)
    y = gemv_sums(
        x + (pair // per_token).to(tl.int64) * x_stride,
        expert_codes,
        scales,
        first_row + tl.arange(0, BLOCK_N),
        1,
        N,
        row_bytes,
        x_stride,
        0,
        steps,
        1,
        GROUPS,
        GROUP_BYTES,
        BITS,
        WARPS,
        COLS,
        EVEN,
        STAGES,
        ASM,
    )
    column = tl.arange(0, COLS // GROUPS)
    expert_bias = bias + expert * N if BIAS else bias
    finish(
        y, first_row, pair + column, column < 1, expert_bias, topk_weights, out, N, BIAS, ACTIVATION
    )


@triton.jit(do_not_specialize=["per_token", "code_distance", "scale_distance"])
def experts_fma_kernel(
    x,
    codes,
    scale_min,
    bias,
    topk_weights,
    out,
    topk_ids,
    per_token,
    code_distance,
    scale_distance,
    N,
    row_bytes,
    x_stride,
    GROUP_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows program_id(0) * BLOCK_N .. of pair program_id(1); see `fma_sums` and `finish`."""
    pair = tl.program_id(1)
    first_row = tl.program_id(0) * BLOCK_N
    expert = tl.load(topk_ids + pair)
    expert_codes, scales = expert_of(codes, scale_min, expert, code_distance, scale_distance)
    y = fma_sums(
        x + (pair // per_token).to(tl.int64) * x_stride,
        expert_codes,
        scales,
        first_row + tl.arange(0, BLOCK_N),
        N,
        row_bytes,
        GROUP_BYTES,
        BITS,
        GROUPS,
        ASM,
    )
    column = tl.arange(0, 1)
    expert_bias = bias + expert * N if BIAS else bias
    finish(
        y[:, None], first_row, pair + column, column < 1, expert_bias, topk_weights, out, N, BIAS,
        ACTIVATION,
    )  # fmt: skip


def gemv_pairs(p: Product, config: GemvConfig = GEMV) -> None:
    """Compute the product on tensor cores; `config.splits` does not count."""
    groups = groups_per_step(1, p.group_bytes)
    step = groups * p.group_bytes * config.warps
    steps = triton.cdiv(p.row_bytes, step)
    n = p.weight.shape[0]
    experts_gemv_kernel[(triton.cdiv(n, config.block_n), p.pairs)](
        *p.tensors,
        p.topk_ids,
        *p.sizes,
        steps,
        **_gemv_constants(
            config,
            p.group_bytes,
            p.weight.bits,
            steps * step == p.row_bytes,
            p.bias is not None,
            p.activation,
        ),
        ASM=use_asm(),
        num_warps=config.warps,
        num_stages=config.stages,
        **options(config),
    )


def fma_pairs(p: Product, config: FmaConfig = FMA) -> None:
    """Compute the product without tensor cores."""
    n = p.weight.shape[0]
    experts_fma_kernel[(triton.cdiv(n, config.block_n), p.pairs)](
        *p.tensors,
        p.topk_ids,
        *p.sizes,
        **_fma_constants(config, p.group_bytes, p.weight.bits, p.bias is not None, p.activation),
        ASM=use_asm(),
        num_warps=config.warps,
        num_stages=1,
        **LAUNCH,
    )


def _gemv_constants(
    config: GemvConfig, group_bytes: int, bits: int, even: bool, bias: bool, activation: str
) -> dict[str, Any]:
    """The constants of `experts_gemv_kernel` but ASM."""
    return {
        "GROUPS": groups_per_step(1, group_bytes),
        "GROUP_BYTES": group_bytes,
        "BITS": bits,
        "BLOCK_N": config.block_n,
        "WARPS": config.warps,
        "COLS": COLUMNS,
        "BIAS": bias,
        "ACTIVATION": activation,
        "EVEN": even,
        "STAGES": config.stages,
    }


def _fma_constants(
    config: FmaConfig, group_bytes: int, bits: int, bias: bool, activation: str
) -> dict[str, Any]:
    """The constants of `experts_fma_kernel` but ASM."""
    return {
        "GROUP_BYTES": group_bytes,
        "BITS": bits,
        "BLOCK_N": config.block_n,
        "GROUPS": max(1, config.block_bytes // group_bytes),
        "BIAS": bias,
        "ACTIVATION": activation,
    }
