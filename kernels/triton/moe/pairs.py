"""A product of a mixture of experts for few pairs of a token and an expert: each by itself.

A program computes some rows of one pair, as `linear.gemv` does for a token, or without tensor cores
as `linear.fma` does. Pairs of one expert each read its codes, from the second-level cache at best.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.triton.launch.overlap import wait_for_earlier
from qoff.kernels.triton.linear.fma import FmaConfig, fma_sums
from qoff.kernels.triton.linear.gemv import GemvConfig, gemv_sums, groups_per_step, in_pairs

from .product import Product, expert_of, finish

GEMV = GemvConfig(block_n=32)  # rows of a program: 16 of gate and 16 of up
FMA = FmaConfig(block_n=32, block_bytes=128)


@triton.jit(do_not_specialize=["per_token", "code_distance", "scale_distance", "steps"])
def experts_gemv_kernel(
    x, codes, scale_min, bias, topk_weights, out, topk_ids, per_token, code_distance,
    scale_distance, N, row_bytes, x_stride, steps, FORM: tl.constexpr,
):  # fmt: skip
    """Rows program_id(0) * BLOCK_N .. of pair program_id(1); see `gemv_sums` and `finish`."""
    wait_for_earlier(FORM.overlap)
    BLOCK_N: tl.constexpr = FORM.config.block_n
    pair = tl.program_id(1)
    first_row = tl.program_id(0) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    expert = tl.load(topk_ids + pair)
    codes, scales = expert_of(codes, scale_min, expert, code_distance, scale_distance)
    x_row = x + (pair // per_token).to(tl.int64) * x_stride
    y = gemv_sums(x_row, codes, scales, row, 1, N, row_bytes, x_stride, 0, steps, FORM)
    column = tl.arange(0, y.shape[1])
    finish(y, first_row, pair + column, column < 1, expert, bias, topk_weights, out, N, FORM)


@triton.jit(do_not_specialize=["per_token", "code_distance", "scale_distance"])
def experts_fma_kernel(
    x, codes, scale_min, bias, topk_weights, out, topk_ids, per_token, code_distance,
    scale_distance, N, row_bytes, x_stride, FORM: tl.constexpr,
):  # fmt: skip
    """Rows program_id(0) * BLOCK_N .. of pair program_id(1); see `fma_sums` and `finish`."""
    wait_for_earlier(FORM.overlap)
    BLOCK_N: tl.constexpr = FORM.config.block_n
    pair = tl.program_id(1)
    first_row = tl.program_id(0) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    expert = tl.load(topk_ids + pair)
    codes, scales = expert_of(codes, scale_min, expert, code_distance, scale_distance)
    x_row = x + (pair // per_token).to(tl.int64) * x_stride
    y = fma_sums(x_row, codes, scales, row, N, row_bytes, FORM)[:, None]
    column = tl.arange(0, 1)
    finish(y, first_row, pair + column, column < 1, expert, bias, topk_weights, out, N, FORM)


def gemv_pairs(p: Product) -> Tensor:
    """The product, on tensor cores."""
    groups = groups_per_step(1, p.group_bytes)
    step = groups * p.group_bytes * GEMV.warps
    p = p._replace(x=in_pairs(p.x))
    return p.compute(experts_gemv_kernel, p.pairs, (p.topk_ids,), GEMV, step, groups)


def fma_pairs(p: Product) -> Tensor:
    """The product, without tensor cores."""
    groups = max(1, FMA.block_bytes // p.group_bytes)
    return p.compute(experts_fma_kernel, p.pairs, (p.topk_ids,), FMA, groups=groups)
