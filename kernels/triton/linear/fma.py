"""y = x W^T for a few tokens without tensor cores, for GPUs on which Triton cannot use them (7.5).

Each program takes a few rows, a long piece of K at a time, in float32: about four instructions per
weight, which such GPUs have. Every token reads the codes anew.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch.options import LAUNCH

from .nibbles import byte_values, load_scale_min, low_high
from .product import form

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
        scale, minimum = load_scale_min(scale_min, pair + first * N, live)
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
def fma_kernel(x, codes, scale_min, bias, out, N, row_bytes, x_stride, FORM: tl.constexpr):
    """Rows program_id(0) * BLOCK_N .. of W times token program_id(1)."""
    BLOCK_N: tl.constexpr = FORM.config.block_n
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    y = fma_sums(x + token * x_stride, codes, scale_min, row, N, row_bytes, FORM)
    if FORM.bias:
        y += tl.load(bias + tl.minimum(row, N - 1)).to(tl.float32)
    tl.store(out + token * N + row, y.to(out.dtype.element_ty), mask=row < N)


def fma(x: Tensor, weight: QTensor, bias: Tensor | None, config: FmaConfig) -> Tensor:
    """x @ W.T + bias; operands as `w4_linear` takes them."""
    (n, row_bytes), bits = weight.codes.shape, weight.bits
    group_bytes = weight.group_size * bits // 8
    groups = triton.next_power_of_2(row_bytes // group_bytes)
    groups = min(config.block_bytes // group_bytes, groups)
    out = x.new_empty(len(x), n)
    fma_kernel[(triton.cdiv(n, config.block_n), len(x))](
        x,
        weight.codes,
        weight.scale_min,
        bias,
        out,
        n,
        row_bytes,
        x.stride(0),
        FORM=form(config, bits, group_bytes, False, bias is not None, groups),
        **config.options,
    )
    return out
