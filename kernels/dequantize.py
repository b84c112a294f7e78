"""Quantized matrices as dense ones, by the device's kernel."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from .layout.packing import ROW_BLOCK
from .layout.qtensor import QTensor
from .layout.widening import read_bits
from .operands import FLOATS

_PIECE_BYTES = 1 << 23  # of what is dequantized at a time


class _Kept(threading.local):
    """Memory that a thread uses again: to clear new pages takes longer than to fill them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns] with anything in it, until the next call."""
        nbytes = rows * columns * dtype.itemsize
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype).view(rows, columns)


_dense, _products = _Kept(), _Kept()


def dequantize(weight: QTensor, dtype: torch.dtype, kept: bool = False) -> Tensor:
    """Return a matrix [N, K] in `dtype`, bit for bit as `QTensor.dequantize` does.

    kept: on a CPU it may lie where the thread's next such call writes to.
    """
    if weight.packing == "rows16" and weight.device.type == "cpu":
        from .cpu.linear import dequantize as kernel  # compiled when it is imported

        if dtype in kernel.DTYPES:
            n, k = weight.shape
            rows = -(-n // ROW_BLOCK) * ROW_BLOCK
            out = _dense.empty(rows, k, dtype) if kept else torch.empty(rows, k, dtype=dtype)
            return kernel.dequantize(weight, out)
    elif weight.device.type == "cuda" and weight.packing == "split32" and dtype in FLOATS:
        from .triton.linear.dequantize import dequantize as launch

        if weight.bits == read_bits(weight.bits, weight.packing):
            return launch(weight, dtype)
    return weight.dequantize(dtype)


def pieces(weight: QTensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The rows of a matrix piece by piece, whole blocks of 16 of up to 8 MiB, dense.

    A piece is gone when the next one comes.
    """
    n, k = weight.shape
    rows = max(1, _PIECE_BYTES // dtype.itemsize // k // ROW_BLOCK) * ROW_BLOCK
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        yield slice(start, stop), dequantize(weight.rows(start, stop), dtype, kept=True)


def times_matrix(x: Tensor, weight: QTensor) -> Tensor:
    """Return x @ W, [M, N] @ [N, K], in the dtype of x: the backward pass of a linear layer.

    On a CPU both are rounded to bfloat16 where it multiplies that, with sums in float32, and are
    float32 elsewhere; on a GPU they have the dtype of x. No more than a piece of W is dense.
    """
    dtype, shape = x.dtype, (len(x), weight.shape[1])
    if x.is_cpu:
        from .cpu.linear.dequantize import DTYPES

        dtype = DTYPES[-1]
    narrow, total = x.to(dtype), x.new_empty(shape, dtype=torch.float32)
    for rows, dense in pieces(weight, dtype):
        some, first = narrow[:, rows], rows.start == 0
        if dtype == torch.float32:
            torch.addmm(total, some, dense, beta=float(not first), out=total)
        else:
            out = _products.empty(*shape, dtype) if x.is_cpu else None
            part = torch.mm(some, dense, out=out)
            total = total.copy_(part) if first else total.add_(part)
    return total.to(x.dtype)
