"""What adapters add to the products of a matrix, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.low_rank import BLOCK, LowRank, LowRanks
from qoff.kernels.upload import on_device

from .elementwise import wide
from .linear import normalized


def low_rank(
    x: Tensor,
    ranks: LowRanks,
    which: Tensor,
    rows: slice,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return norm(x) @ down.T @ up.T + bias, [M, rows], each row with its own adapter (LoRA).

    x: [M, K]. which: int64 [M], the adapter of each row, -1 for none; in host memory, so that a GPU
    is not waited for. rows: of the matrix, whole blocks of 16. bias: of these rows. The result is
    float32, float64 of such x. (arXiv 2106.09685)
    """
    x = wide(x if norm is None else normalized(x, norm))
    found = x.new_zeros(len(x), rows.stop - rows.start)
    if bias is not None:
        found += bias
    blocks = slice(rows.start // BLOCK, rows.stop // BLOCK)
    numbers, which = which.unique().tolist(), on_device(which, x.device)
    for number in numbers:
        one = None if number < 0 else ranks.each[number]
        if one is not None:
            added = _product(x, one, blocks)
            found += torch.where((which == number)[:, None], added, 0.0)
            del added  # before that of the next adapter
    return found


def _product(x: Tensor, one: LowRank, blocks: slice) -> Tensor:
    """x @ down.T @ up.T of all rows of x, for some blocks of the matrix."""
    up = one.up[blocks].to(x.dtype) * one.times[blocks, None, None]  # [blocks, r, 16]
    count, rank, _ = up.shape
    each, places = (torch.arange(size, device=x.device) for size in (count, rank))
    whole = x.new_zeros(len(one.down), count, BLOCK)
    whole[one.first[blocks, None] + places, each[:, None]] = up
    del up
    return x @ one.down.to(x.dtype).T @ whole.flatten(1)
