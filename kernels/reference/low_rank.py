"""What adapters add to the products of a matrix, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.low_rank import BLOCK, LowRanks

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

    x: [M, K]. which: int64 [M], the adapter of each row, -1 for none. rows: of the matrix, whole
    blocks of 16. bias: of these rows. (arXiv 2106.09685)
    """
    found = x.new_zeros(len(x), rows.stop - rows.start)
    if bias is not None:
        found += bias
    x = x if norm is None else normalized(x, norm)
    blocks = slice(rows.start // BLOCK, rows.stop // BLOCK)
    for number, one in enumerate(ranks.each):
        mine = which == number
        if one is None or not mine.any():
            continue
        up = one.up[blocks]
        down = x[mine] @ one.down.T
        of_block = down[:, one.first[blocks, None] + torch.arange(up.shape[1])]  # [m, blocks, r]
        found[mine] += torch.einsum("mbr,brn->mbn", of_block, up).flatten(1)
    return found
