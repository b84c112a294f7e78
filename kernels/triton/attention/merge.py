"""Joining the results of attention over disjoint sets of keys, on a GPU."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.operands import FLOATS_AND_32, require
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.overlap import (
    let_next_begin,
    overlap_options,
    overlaps,
    wait_for_earlier,
)
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .kv_tiles import LOG2E
from .rotate import rotated


@dataclass(frozen=True)
class MergeConfig:
    """`rows` heads of a token each in a program, with the loads of `parts` parts under way."""

    rows: int
    parts: int
    num_warps: int


@triton.jit(do_not_specialize=["parts", "rows"])
def merge_kernel(
    outs, lses, out, lse, parts, rows,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Online softmax over the parts, PARTS at a time; most of a row's parts are in one thread.

    With STAGES of 2 the next ones are copied to shared memory meanwhile.
    """
    wait_for_earlier(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, D_PADDED)
    inside = row < rows
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    joined = tl.zeros((ROWS, D_PADDED), tl.float32)
    for first in tl.range(0, parts, PARTS, num_stages=STAGES):
        part = first + tl.arange(0, PARTS)
        there = (part < parts)[:, None] & inside[None, :]
        at = part.to(tl.int64)[:, None] * rows + row[None, :]
        log = tl.load(lses + at, mask=there, other=float("-inf")) * LOG2E
        mask = there[:, :, None] & (channel < D)[None, None, :]
        values = tl.load(outs + at[:, :, None] * D + channel[None, None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(log, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(log - base[None, :])
        keep = tl.exp2(top - base)
        # A part without keys may hold anything, NaN too.
        used = tl.where(weight[:, :, None] > 0.0, values.to(tl.float32), 0.0)
        joined = joined * keep[:, None] + tl.sum(used * weight[:, :, None], axis=0)
        total = total * keep + tl.sum(weight, axis=0)
        top = new_top
    let_next_begin(OVERLAP)
    joined = joined / tl.where(total > 0.0, total, 1.0)[:, None]
    if RUN > 1:
        joined = rotated(joined, RUN, True)
    result = joined.to(out.dtype.element_ty)
    mask = inside[:, None] & (channel < D)[None, :]
    tl.store(out + row[:, None] * D + channel[None, :], result, mask=mask)
    tl.store(lse + row, (top + tl.log2(total)) / LOG2E, mask=inside)


def merge_bytes(tokens: int, heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes that `merge` allocates: its results."""
    return tokens * heads * (head_dim * itemsize + 4)


def merge(outs: Tensor, lses: Tensor, config: MergeConfig | None = None) -> tuple[Tensor, Tensor]:
    """Join partial attention results outs [P, T, H, D] by their log-sum-exps, float32 [P, T, H].

    outs: float16, bfloat16 or float32. Returns the output [T, H, D] in their dtype and its natural
    log-sum-exp [T, H]. A part with -inf counts nothing, whatever it holds; where all have -inf, the
    output is 0 and the log-sum-exp -inf. Values are those of `reference.kv_blocks.merge`. Raises
    OpError.
    """
    require("outs", outs, FLOATS_AND_32, ("P", "T", "H", "D"), outs.device)
    require("lses", lses, (torch.float32,), outs.shape[:3], outs.device)
    if not outs.shape[0]:
        raise OpError("there is nothing to merge: outs [P, T, H, D] has no parts")
    return join(outs, lses, outs.shape[0], config=config)


def join(
    outs: Tensor,
    lses: Tensor,
    most_parts: int,
    run: int = 1,
    config: MergeConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """`merge` of checked operands, by the kernel for up to so many parts of the same heads.

    run: channels that are rotated back together, see `rotation.value_run`; 1 for none.
    """
    parts, tokens, heads, head_dim = outs.shape
    out, lse = outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
    kernel, together = _bound(outs.device, outs.dtype, head_dim, most_parts, run, config)
    kernel((cdiv(tokens * heads, together), 1, 1), outs, lses, out, lse, parts, tokens * heads)
    return out, lse


@cache
def _bound(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    most_parts: int,
    run: int,
    config: MergeConfig | None,
) -> tuple[BoundKernel, int]:
    """The kernel, and the rows of a program: heads of a token."""
    # At most 32 values a thread of eight warps.
    together = min(32, next_power_of_2(most_parts), max(1, 8192 // next_power_of_2(head_dim)))
    config = config or _configured(device, dtype, head_dim, together)
    kernel = BoundKernel(
        merge_kernel,
        D=head_dim,
        D_PADDED=next_power_of_2(head_dim),
        PARTS=config.parts,
        ROWS=config.rows,
        RUN=run,
        STAGES=2 if most_parts > config.parts else 1,
        OVERLAP=overlaps(device),
        num_warps=config.num_warps,
        num_stages=1,
        **overlap_options(device),
    )
    return kernel, config.rows


@cache
def _configured(device: torch.device, dtype: torch.dtype, head_dim: int, parts: int) -> MergeConfig:
    entry = tuned.lookup("merge", device, f"{str(dtype)[6:]}-{head_dim}-{parts}")
    if entry:
        return MergeConfig(**entry)
    padded = next_power_of_2(head_dim)
    rows = max(1, 1024 // (parts * padded))
    values = parts * rows * padded
    return MergeConfig(rows, parts, num_warps=1 if values <= 1024 else min(8, values // 512))
