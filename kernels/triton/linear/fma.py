"""y = x W^T for a few tokens without tensor cores, for GPUs on which Triton cannot use them (7.5).

Each program takes a few rows, a long piece of K at a time, in float32: about four instructions per
weight, which such GPUs have. Every token reads the codes anew.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .nibbles import byte_values, load_scale_min, low_high
from .product import Case, Epilogue, form, rows_of, write

TOKENS_MAX = 4


@dataclass(frozen=True)
class FmaConfig:
    """block_n: rows of a program. block_bytes: of codes of a row in a step, at most."""

    block_n: int = 4
    block_bytes: int = 1024
    warps: int = 4

    @property
    def options(self) -> dict[str, Any]:
        """Of the compiler."""
        return {"num_warps": self.warps, "num_stages": 1, **LAUNCH}


@triton.jit
def fma_sums(x, codes, scale_min, row, N, row_bytes, FORM: tl.constexpr):
    """Rows of W times a token, whose row `x` is, GROUPS groups at a time: float32 [BLOCK_N].

    row: [BLOCK_N], those from N on are read as the last one.
    """
    BLOCK_N: tl.constexpr = row.shape[0]
    BITS: tl.constexpr = FORM.bits
    GROUPS: tl.constexpr = FORM.groups
    GROUP_BYTES: tl.constexpr = FORM.group_bytes
    SPREAD: tl.constexpr = 8 // BITS
    safe_row = tl.minimum(row, N - 1)
    group = tl.arange(0, GROUPS)
    byte = tl.arange(0, GROUP_BYTES)
    element = byte if BITS == 8 else (byte // 16) * 32 + byte % 16
    code_row = codes + safe_row[:, None, None].to(tl.int64) * row_bytes
    code_pointer = code_row + (group * GROUP_BYTES)[None, :, None] + byte[None, None, :]
    x_element = (group * GROUP_BYTES * SPREAD)[None, :, None] + element[None, None, :]
    x_pointer = x + x_element
    pair = group[None, :] * N + safe_row[:, None]
    total = tl.zeros((BLOCK_N, GROUPS, GROUP_BYTES), tl.float32)
    groups = row_bytes // GROUP_BYTES
    for first in range(0, groups, GROUPS):
        inside = first + group < groups
        wide = inside[None, :, None] & (row >= 0)[:, None, None] & (byte >= 0)[None, None, :]
        x_wide = inside[None, :, None] & (byte >= 0)[None, None, :]
        packed = tl.load(code_pointer + first * GROUP_BYTES, mask=wide, other=0)
        live = inside[None, :] & (row >= 0)[:, None]
        scale, minimum = load_scale_min(scale_min, pair + first * N, live, BITS)
        x_here = x_pointer + first * (GROUP_BYTES * SPREAD)
        values = tl.load(x_here, mask=x_wide, other=0.0).to(tl.float32)
        x_sum = values
        if BITS == 4:
            low, high = low_high(packed, tl.float16, FORM.asm)
            second = tl.load(x_here + 16, mask=x_wide, other=0.0).to(tl.float32)
            part = low.to(tl.float32) * values + high.to(tl.float32) * second
            x_sum += second
        else:
            part = byte_values(packed, tl.float16, FORM.asm).to(tl.float32) * values
        total += part * scale[:, :, None]
        total += x_sum * minimum[:, :, None]
    return tl.sum(tl.reshape(total, (BLOCK_N, GROUPS * GROUP_BYTES)), axis=1)


@triton.jit
def fma_kernel(
    x, codes, scale_min, bias, residual, out, N, row_bytes, x_stride, FORM: tl.constexpr
):
    """The rows of W of program_id(0) times token program_id(1)."""
    row = rows_of(tl.program_id(0), FORM.config.block_n, FORM)
    token = tl.program_id(1)
    x_row = x + token.to(tl.int64) * x_stride
    y = fma_sums(x_row, codes, scale_min, row, N, row_bytes, FORM)[:, None]
    write(y, row, token + tl.arange(0, 1), token + 1, 0, bias, residual, out, 0, N, FORM)


def fma(
    x: Tensor, weight: QTensor, bias: Tensor | None, config: FmaConfig, end: Epilogue
) -> Tensor:
    """x @ W.T + bias and what `end` says; operands as `w4_linear` takes them."""
    kernel, grid = _bound(Case.of(x, weight, bias, end), config)
    out = end.target(x, weight)
    operands = (x, weight.codes, weight.scale_min, bias, end.residual, out)
    kernel(grid, *operands, *weight.codes.shape, x.stride(0))
    return out


@cache
def _bound(case: Case, config: FmaConfig) -> tuple[BoundKernel, tuple[int, int, int]]:
    group_bytes = case.group * case.bits // 8
    groups = min(config.block_bytes // group_bytes, next_power_of_2(case.k // case.group))
    options = {
        "activation": "silu" if case.silu_mul else "",
        "residual": case.residual,
    }
    of = form(config, case.bits, group_bytes, False, case.bias, groups, **options)
    grid = (cdiv(case.n, config.block_n), case.m, 1)
    return BoundKernel(fma_kernel, FORM=of, **config.options), grid
