"""Quantized matrices as dense ones, by the device's kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .layout.packing import ROW_BLOCK
from .layout.qtensor import QTensor
from .operands import FLOATS

_PIECE = 1 << 22  # weights that are dequantized at a time


def dequantize(weight: QTensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix [N, K] in `dtype`, bit for bit as `QTensor.dequantize` does."""
    if weight.packing == "rows16" and weight.device.type == "cpu":
        from .cpu.linear import dequantize as kernel  # compiled when it is imported

        if dtype in kernel.DTYPES:
            n, k = weight.shape
            out = torch.empty(-(-n // ROW_BLOCK) * ROW_BLOCK, k, dtype=dtype)
            return kernel.dequantize(weight, out)
    elif weight.device.type == "cuda" and weight.packing == "split32" and dtype in FLOATS:
        from .triton.linear.dequantize import dequantize as launch

        if weight.bits != 6:
            return launch(weight, dtype)
    return weight.dequantize(dtype)


def pieces(weight: QTensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The rows of a matrix piece by piece, whole blocks of 16 of about 4 million weights, dense."""
    n, k = weight.shape
    rows = max(1, _PIECE // k // ROW_BLOCK) * ROW_BLOCK
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        yield slice(start, stop), dequantize(weight.rows(start, stop), dtype)


def times_matrix(x: Tensor, weight: QTensor) -> Tensor:
    """Return x @ W, [M, N] @ [N, K], in the dtype of x: the backward pass of a linear layer.

    On a CPU both are rounded to bfloat16 where it multiplies that, with sums in float32, and are
    float32 elsewhere; on a GPU they have the dtype of x. No more than a piece of W is dense.
    """
    dtype = x.dtype
    if x.device.type == "cpu":
        from .cpu.linear.dequantize import DTYPES

        dtype = DTYPES[-1]
    narrow, total = x.to(dtype), torch.empty(0)
    for rows, dense in pieces(weight, dtype):
        part = (narrow[:, rows] @ dense).float()
        total = part if rows.start == 0 else total.add_(part)
    return total.to(x.dtype)
