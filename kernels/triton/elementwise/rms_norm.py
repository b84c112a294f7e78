"""RMS norm of rows on a GPU: one pass over memory."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.operands import FLOATS_AND_32, require
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.overlap import (
    let_next_begin,
    overlap_options,
    overlaps,
    wait_for_earlier,
)
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["tokens"])
def rms_norm_kernel(
    x,
    weight,
    out,
    tokens,
    columns,
    eps,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two from `columns` up
    OVERLAP: tl.constexpr,
):
    """out = scale * norm(x) * weight."""
    wait_for_earlier(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    within = column < columns
    mask = (row < tokens)[:, None] & within[None, :]
    offset = row[:, None] * columns + column[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)
    let_next_begin(OVERLAP)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / columns + eps) * scale
    normed = value * inverse[:, None] * gain[None, :]
    tl.store(out + offset, normed.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """Return scale * norm(x) * weight.

    x: contiguous [T, C], float16, bfloat16 or float32; weight: [C] of any of these. Values are
    those of `reference.elementwise.rms_norm`. Raises OpError.
    """
    require("x", x, FLOATS_AND_32, ("T", "C"), x.device)
    tokens, columns = x.shape
    require("weight", weight, FLOATS_AND_32, (columns,), x.device)
    out = torch.empty_like(x)
    kernel, rows = _bound(columns, x.device)
    kernel((cdiv(tokens, rows), 1, 1), x, weight, out, tokens, columns, eps, scale)
    return out


@cache
def _bound(columns: int, device: torch.device) -> tuple[BoundKernel, int]:
    """The kernel, and the rows of a program."""
    width = next_power_of_2(columns)
    rows = max(1, 1024 // width)  # short rows (the norm of a head) share a program
    sizes = {"ROWS": rows, "COLUMNS": width, "OVERLAP": overlaps(device)}
    # 16 values a thread, so that a row needs few loads one after another.
    warps = min(32, max(1, rows * width // 512))
    options = {"num_warps": warps, "num_stages": 1, **overlap_options(device)}
    return BoundKernel(rms_norm_kernel, **sizes, **options), rows
