"""Rows of a quantized matrix as float32: what an embedding looks up."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.errors import OpError

from ..packing import ROW_BLOCK
from ..qtensor import QTensor


def embedding(ids: Tensor, weight: QTensor) -> Tensor:
    """Dequantize the rows `ids` (int64 [T]) of a cpu16 weight [N, K] to float32 [T, K].

    Raises OpError for an id outside of [0, N) or another packing.
    """
    if weight.packing != "cpu16":
        raise OpError(f"embedding: the CPU kernel needs packing cpu16, not {weight.packing}")
    n, k = weight.shape
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < n):
        raise OpError(
            f"embedding: ids from {int(ids.min())} to {int(ids.max())}, rows 0 to {n - 1}"
        )
    blocks, lanes = ids // ROW_BLOCK, ids % ROW_BLOCK
    codes = weight.codes[blocks, :, lanes]  # [T, K / 8 or K / 4, 4]
    if weight.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2)  # [T, K / 8, 2, 4]
    groups = codes.reshape(len(ids), -1, weight.group_size).float()
    scale, minimum = weight.scale_min[blocks, :, :, lanes].float()[..., None].unbind(2)
    return (groups * scale + minimum).view(len(ids), k)
