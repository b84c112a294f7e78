"""Rows of a quantized matrix as float32: what an embedding looks up."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qoff.errors import OpError

from .layout.packing import ROW_BLOCK
from .layout.qtensor import QTensor
from .upload import on_device


def embedding(ids: Tensor, weight: QTensor) -> Tensor:
    """Dequantize the rows `ids` (int64 [T]) of a weight [N, K] of any packing to float32 [T, K].

    Raises OpError for an id outside of [0, N), unless the ids are on a GPU: to look at them would
    wait for it.
    """
    n, k = weight.shape
    if ids.numel() and not ids.is_cuda and not (int(ids.min()) >= 0 and int(ids.max()) < n):
        raise OpError(
            f"embedding: ids from {int(ids.min())} to {int(ids.max())}, rows 0 to {n - 1}"
        )
    ids = on_device(ids, weight.device)
    if weight.packing == "split32":
        codes, scale_min = weight.codes[ids], weight.scale_min[:, ids].contiguous()
        rows = replace(weight, codes=codes, scale_min=scale_min, shape=(len(ids), k))
        return rows.dequantize()
    blocks, lanes = ids // ROW_BLOCK, ids % ROW_BLOCK
    codes = weight.codes[blocks, :, lanes]  # [T, K / 8 or K / 4, 4]
    if weight.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2)
    groups = codes.reshape(len(ids), k // weight.group_size, weight.group_size).float()
    scale, minimum = weight.scale_min[blocks, :, :, lanes].float()[..., None].unbind(2)
    return (groups * scale + minimum).view(len(ids), k)
