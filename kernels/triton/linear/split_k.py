"""Partial sums of matmuls that split K over programs, added in a fixed order."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.triton.launch.options import LAUNCH

_BLOCK = 256


@triton.jit
def add_splits_kernel(
    partial, bias, out, size, N, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """out = bias + the sum of SPLITS partial results of `size` = M * N elements each."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + split * size + index, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + index % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)


def partial_sums(splits: int, out: Tensor) -> Tensor:
    """Memory for the partial sums of `splits` programs along K of a result `out` [M, N]."""
    return torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)


def partial_bytes(tokens: int, rows: int, splits: int) -> int:
    """Bytes of `partial_sums` for a result [tokens, rows]; none without programs along K."""
    return 4 * splits * tokens * rows if splits > 1 else 0


def add_splits(partial: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [M, N] = bias [N] + the sum of float32 partial [splits, M, N]."""
    add_splits_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        partial,
        bias,
        out,
        out.numel(),
        out.shape[1],
        SPLITS=partial.shape[0],
        BIAS=bias is not None,
        BLOCK=_BLOCK,
        num_warps=2,
        num_stages=3,
        **LAUNCH,
    )
