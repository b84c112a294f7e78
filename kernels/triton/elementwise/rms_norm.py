"""RMS norm of rows, with the residual sum before it fused in, on a GPU: one pass over memory."""

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
    residual,
    weight,
    out,
    new_residual,
    tokens,
    columns,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two from `columns` up
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = norm(x + residual) * weight, new_residual = x + residual; without ADD only x."""
    wait_for_earlier(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    within = column < columns
    mask = (row < tokens)[:, None] & within[None, :]
    offset = row[:, None] * columns + column[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(new_residual + offset, value.to(new_residual.dtype.element_ty), mask=mask)
    let_next_begin(OVERLAP)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / columns + eps)
    normed = value * inverse[:, None] * gain[None, :]
    tl.store(out + offset, normed.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return norm(x + residual) * weight and x + residual; without a residual the latter is x.

    x, residual: contiguous [T, C] of one dtype, float16, bfloat16 or float32; weight: [C] of any of
    these. The sum is rounded to the dtype of x where it is returned, but not where it is normed.
    Values are those of `reference.elementwise.rms_norm` and `add_rms_norm`. Raises OpError.
    """
    require("x", x, FLOATS_AND_32, ("T", "C"), x.device)
    tokens, columns = x.shape
    require("weight", weight, FLOATS_AND_32, (columns,), x.device)
    if residual is not None:
        require("residual", residual, (x.dtype,), x.shape, x.device)
    out = torch.empty_like(x)
    new_residual = x if residual is None else torch.empty_like(x)
    kernel, rows = _bound(columns, residual is not None, x.device)
    added = x if residual is None else residual
    kernel((cdiv(tokens, rows), 1, 1), x, added, weight, out, new_residual, tokens, columns, eps)
    return out, new_residual


@cache
def _bound(columns: int, add: bool, device: torch.device) -> tuple[BoundKernel, int]:
    """The kernel, and the rows of a program."""
    width = next_power_of_2(columns)
    rows = max(1, 1024 // width)  # short rows (the norm of a head) share a program
    sizes = {"ROWS": rows, "COLUMNS": width, "ADD": add, "OVERLAP": overlaps(device)}
    # 16 values a thread, so that a row needs few loads one after another.
    warps = min(32, max(1, rows * width // 512))
    options = {"num_warps": warps, "num_stages": 1, **overlap_options(device)}
    return BoundKernel(rms_norm_kernel, **sizes, **options), rows
