"""The norm of what recurrent layers find, and their gates, on a GPU."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.device_cache import PassTables
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["rows", "slots"])
def gated_norm_kernel(
    found,  # [M, GROUPS * DIM], in the order of the slots
    z,  # rows z_stride apart, in the order of the batch, as the result
    order,  # [M], or not read
    row_start,
    weight,  # or not read
    out, rows, slots, z_stride, eps, z_factor,
    GROUPS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    ORDERED: tl.constexpr, GATED_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """A group of channels of some tokens; rows of no token are 0. See `gated_norm`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    channel = tl.arange(0, PAD)
    inside = channel < DIM
    there = row < tl.load(row_start + slots)
    place = row
    if ORDERED:
        place = tl.load(order + row, mask=there, other=0)
    column = (group * DIM + channel)[None, :]
    mask = there[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * (GROUPS * DIM) + column
    x = tl.load(found + at, mask=mask, other=0.0).to(tl.float32)
    by = tl.load(z + place.to(tl.int64)[:, None] * z_stride + column, mask=mask, other=0.0)
    by = by.to(tl.float32) * z_factor
    by = tl.where(SIGMOID, 1.0, by) / (1.0 + tl.exp(-by))
    if GATED_FIRST:
        x *= by
        by = tl.full([ROWS, PAD], 1.0, tl.float32)
    if NORMED:
        gains = weight + channel
        if GATED_FIRST:
            gains += group * DIM
        gain = tl.load(gains, mask=inside, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None] * gain[None, :]
    x *= by
    at = place.to(tl.int64)[:, None] * (GROUPS * DIM) + column
    mask = (row < rows)[:, None] & inside[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)


def gated_norm(
    found: Tensor,
    z: Tensor,
    weight: Tensor | None,
    groups: int,
    eps: float,
    step: PassTables,
    out: Tensor,
    *,
    gated_first: bool,
    sigmoid: bool = False,
    z_factor: float = 1.0,
) -> None:
    """out = norm(found) * silu(z), each group by itself; gated_first: norm(found * silu(z)).

    sigmoid: sigmoid(z) is in place of silu(z).

    found: [M, values] in the order of the slots. z: [M, values or more], whose rows may lie apart,
    in the order of the batch, as out [M, values] is; its rows of no token become 0. weight: of a
    group, of all of them; gated_first: of all channels; None: there is no norm. z_factor: what z is
    multiplied by before.
    """
    tokens, values = out.shape
    ordered = step.order is not None
    kernel, rows = _bound(
        values // groups, groups, ordered, gated_first, sigmoid, weight is not None
    )
    kernel(
        (cdiv(tokens, rows), groups, 1), found, z, step.order, step.row_start, weight, out, tokens,
        len(step.start), z.stride(0), eps, z_factor,
    )  # fmt: skip


@cache
def _bound(
    dim: int, groups: int, ordered: bool, gated_first: bool, sigmoid: bool, normed: bool
) -> tuple[BoundKernel, int]:
    """The kernel, and the tokens of a program."""
    pad = next_power_of_2(dim)
    rows = max(1, 1024 // pad)
    kernel = BoundKernel(
        gated_norm_kernel,
        GROUPS=groups,
        DIM=dim,
        PAD=pad,
        ROWS=rows,
        ORDERED=ordered,
        GATED_FIRST=gated_first,
        SIGMOID=sigmoid,
        NORMED=normed,
        num_warps=min(8, max(1, rows * pad // 512)),
        num_stages=1,
    )
    return kernel, rows
