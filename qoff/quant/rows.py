"""Moving rows of quantized matrices, and whole groups of columns, without touching a code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from qoff.errors import QuantizationError
from qoff.kernels.layout.packing import ROW_BLOCK
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.scales import common

Weight = TypeVar("Weight", QTensor, Tensor)


def concat_rows(parts: Sequence[QTensor]) -> QTensor:
    """Stack matrices of the same K, bits and group one below the other, in the first's packing.

    Scales become float32 where they are not stored alike. Raises QuantizationError for parts that
    differ.
    """
    if not parts:
        raise QuantizationError("concat_rows needs at least one matrix")
    first = parts[0]
    for part in parts:
        if _kind(part) != _kind(first):
            raise QuantizationError(
                "only rows of the same length, bits, group and device can be joined, "
                f"not (K, bits, group, device) {_kind(first)} with {_kind(part)}"
            )
    blocks = all(part.packing == "rows16" and part.shape[0] % ROW_BLOCK == 0 for part in parts)
    halves = parts if blocks else [part.to_packing("split32") for part in parts]
    dtype = common(part.scale_min.dtype for part in parts)
    halves = [part.with_scales(dtype) for part in halves]
    joined = replace(
        halves[0],
        codes=torch.cat([part.codes for part in halves]),
        scale_min=torch.cat([part.scale_min for part in halves], dim=0 if blocks else 1),
        shape=(sum(part.shape[0] for part in parts), first.shape[1]),
    )
    return joined.to_packing(first.packing)


def reordered(weight: Weight, order: Tensor) -> Weight:
    """Rows `order`, int64, of a QTensor or a dense tensor [N, ...], as the same kind."""
    if isinstance(weight, Tensor):
        return weight[order.to(weight.device)]
    blocks = whole_blocks(weight, order)
    if blocks is not None:
        blocks, shape = blocks.to(weight.device), (len(order), weight.shape[1])
        codes, scale_min = weight.codes[blocks], weight.scale_min[blocks]
        return replace(weight, codes=codes, scale_min=scale_min, shape=shape)
    half, order = weight.to_packing("split32"), order.to(weight.device)
    codes, scale_min = half.codes[order], half.scale_min[:, order]
    moved = replace(half, codes=codes, scale_min=scale_min, shape=(len(order), half.shape[1]))
    return moved.to_packing(weight.packing)


def with_columns(weight: QTensor | Tensor, order: Tensor, name: str) -> QTensor | Tensor:
    """Columns `order`, int64, of a QTensor or a dense matrix [N, K], as the same kind.

    name: what errors call it. Raises QuantizationError where these are no whole groups of a
    QTensor.
    """
    if isinstance(weight, Tensor):
        return weight[:, order.to(weight.device)].contiguous()
    (n, k), group = weight.shape, weight.group_size
    groups = order[::group] // group
    columns = (groups[:, None] * group + torch.arange(group, device=order.device)).flatten()
    if len(order) != k or not torch.equal(columns, order):
        raise QuantizationError(
            f"{name}: quantized columns are moved in whole groups of {group}; use a file in 16 bits"
        )
    found, groups = weight.to_packing("split32"), groups.to(weight.device)
    codes = found.codes.view(n, k // group, -1)[:, groups].flatten(1)
    return replace(found, codes=codes, scale_min=found.scale_min[groups]).to_packing(weight.packing)


def whole_blocks(weight: QTensor, order: Tensor) -> Tensor | None:
    """The blocks of 16 rows of packing rows16 that make up the rows `order`, None if none do.

    A last block of fewer rows must be the last one of the matrix, whose padding it keeps.
    """
    if weight.packing != "rows16":
        return None
    starts, n = order[::ROW_BLOCK], len(order)
    rows = (starts[:, None] + torch.arange(ROW_BLOCK, device=order.device)).flatten()[:n]
    ends = n % ROW_BLOCK == 0 or int(order[-1]) == weight.shape[0] - 1
    whole = ends and bool((starts % ROW_BLOCK == 0).all()) and torch.equal(rows, order)
    return starts // ROW_BLOCK if whole else None


def _kind(q: QTensor) -> tuple[int, int, int, torch.device]:
    return q.shape[1], q.bits, q.group_size, q.device


def split_rows(data: Tensor | QTensor, into: int) -> Tensor | QTensor:
    """Rows [N, K] as so many each, one after the other, [N * into, K / into]; codes stay."""
    if isinstance(data, Tensor):
        return data.reshape(len(data) * into, -1)
    found, (n, k) = data.to_packing("split32"), data.shape
    scale_min = found.scale_min.unflatten(0, (into, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    codes, shape = found.codes.view(n * into, -1), (n * into, k // into)
    found = replace(found, codes=codes, scale_min=scale_min.contiguous(), shape=shape)
    return found.to_packing(data.packing)


def merge_rows(data: QTensor, of: int) -> QTensor:
    """The other way round: [N, K] from [N * of, K / of]."""
    found, (n, k) = data.to_packing("split32"), data.shape
    scale_min = found.scale_min.unflatten(1, (-1, of)).permute(2, 0, 1, 3).flatten(0, 1)
    codes, shape = found.codes.reshape(n // of, -1), (n // of, k * of)
    found = replace(found, codes=codes, scale_min=scale_min.contiguous(), shape=shape)
    return found.to_packing(data.packing)
