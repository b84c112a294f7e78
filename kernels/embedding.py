"""Rows of a quantized matrix as float32: what an embedding looks up."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qoff.errors import OpError

from .layout.qtensor import QTensor
from .upload import on_device


def embedding(
    ids: Tensor,
    weight: QTensor,
    *,
    offset: int = 0,
    scale: float = 1.0,
    rows_each: int = 1,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return residual + scale * the rows ids + offset of a weight [N, K] of any packing, [T, K].

    rows_each: those from ids * rows_each + offset on, so many of each, [T * rows_each, K]; where it
    is more than one, ids beyond the last one have the rows of 0.
    ids: integers [T]. Computed in float32, which the result is, or else what the residual is; out
    may be the residual. Raises OpError for a row that is not there, unless the ids are on a GPU: to
    look at them would wait for it.
    """
    if weight.packing == "rows16" and weight.device.type == "cpu":
        from .cpu.embedding import embedding as job  # compiled when it is imported

        ids = ids.to("cpu", torch.int64)
        return job(
            ids, weight, offset=offset, scale=scale, rows_each=rows_each, residual=residual, out=out
        )
    if rows_each > 1:
        ids = rows_of_each(ids, rows_each, weight.shape[0])
    rows = _dequantized(ids + offset if offset else ids, weight)
    rows = rows * scale if scale != 1 else rows
    if residual is not None:
        rows = residual + rows.to(residual.dtype)
    return rows if out is None else out.copy_(rows)


def rows_of_each(ids: Tensor, count: int, rows: int) -> Tensor:
    """The rows of each id, int64 [T * count], in a matrix of so many; beyond these those of 0."""
    first = (ids * count).where(ids < rows // count, 0)
    return (first[:, None] + torch.arange(count, device=ids.device)).flatten()


def _dequantized(ids: Tensor, weight: QTensor) -> Tensor:
    n, k = weight.shape
    if ids.numel() and ids.is_cpu and not (int(ids.min()) >= 0 and int(ids.max()) < n):
        raise OpError(
            f"embedding: ids from {int(ids.min())} to {int(ids.max())}, rows 0 to {n - 1}"
        )
    if weight.packing != "split32":
        raise OpError(f"embedding: on {weight.device} rows are of packing split32, not rows16")
    ids = on_device(ids, weight.device)
    codes, scale_min = weight.codes[ids], weight.scale_min[:, ids].contiguous()
    rows = replace(weight, codes=codes, scale_min=scale_min, shape=(len(ids), k))
    return rows.dequantize()
