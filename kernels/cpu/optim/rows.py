"""Adafactor's passes over a matrix, which reads its gradients three times and weights once.

With means r of rows and c of columns of squared gradients, an update is g / sqrt(r c / mean(r)), as
in `torch.optim.Adafactor`, and sqrt of at least eps^2: of_rows and of_columns are the reciprocal
roots of both factors, and their product is at most 1 / eps, so that no root is taken here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, fail

from .rows_job import SIZE, SQUARES, STEP, RowsArguments, rows_job

LINE = 16  # columns are a multiple of it
_OP = "rows"
_BLOCKS, _MOST = 16, 64  # blocks of rows at least; rows of a block at most
_NO_FACTORS = 0, 0


def squares(grad: Tensor, scale: float, pool: Pool | None = None) -> tuple[Tensor, Tensor]:
    """Sums of squares of gradients [N, K] times `scale`: of rows [N] and of columns [K], float32.

    grad: float32 or bfloat16, contiguous; K is a multiple of 16, as below. Raises OpError.
    """
    n, k = _shape(grad)
    block = _block(n)
    sums = torch.empty(-(-n // block), k, dtype=torch.float32)
    found = _run(SQUARES, grad, None, sums, None, None, (scale, 0.0, 0.0, 0.0), pool)
    return found, sums.sum(0)


def size(
    grad: Tensor, of_rows: Tensor, of_columns: Tensor, most: float, pool: Pool | None = None
) -> Tensor:
    """The sum of squares of each row's update, [N]: of g min(of_rows of_columns, most).

    of_rows: [N], of_columns: [K], float32. Raises OpError.
    """
    factors = of_rows, of_columns
    return _run(SIZE, grad, factors, None, None, None, (0.0, most, 0.0, 0.0), pool)


def step(
    weights: Tensor,
    grad: Tensor,
    of_rows: Tensor,
    of_columns: Tensor,
    most: float,
    keep: float,
    rate: float,
    copy: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Change weights [N, K], float32: times keep, less rate times the update as above.

    copy: bfloat16 or float16 [N, K], becomes the new weights, rounded. Returns the sums of their
    squares by row, [N]. Raises OpError.
    """
    factors, numbers = (of_rows, of_columns), (0.0, most, keep, -rate)
    return _run(STEP, grad, factors, None, weights, copy, numbers, pool)


def _run(
    kind: int,
    grad: Tensor,
    factors: tuple[Tensor, Tensor] | None,
    sums: Tensor | None,
    weights: Tensor | None,
    copy: Tensor | None,
    numbers: tuple[float, ...],
    pool: Pool | None,
) -> Tensor:
    n, k = _shape(grad)
    if factors is not None:
        check_dense(_OP, "of_rows", factors[0], (n,))
        check_dense(_OP, "of_columns", factors[1], (k,))
    if weights is not None:
        check_dense(_OP, "weights", weights, (n, k))
    halves = torch.bfloat16, torch.float16
    if copy is not None and not (
        copy.dtype in halves and copy.shape == (n, k) and copy.is_contiguous() and copy.is_cpu
    ):
        fail(_OP, f"copy must be bfloat16 or float16 [{n}, {k}], not {copy.dtype} {copy.shape}")
    found, pool = torch.empty(n, dtype=torch.float32), pool or default_pool()
    of_rows, of_columns = _NO_FACTORS if factors is None else map(address, factors)
    arguments = RowsArguments(
        kind, n, k, _block(n), grad.data_ptr(), grad.dtype == torch.bfloat16, of_rows, of_columns,
        found.data_ptr(), address(sums), address(weights), address(copy),
        copy is not None and copy.dtype == torch.float16, *numbers,
    )  # fmt: skip
    pool.run(rows_job.address, arguments)
    return found


def _block(rows: int) -> int:
    return min(_MOST, -(-rows // _BLOCKS))


def _shape(grad: Tensor) -> tuple[int, int]:
    known = grad.dtype in (torch.float32, torch.bfloat16) and grad.is_cpu and grad.is_contiguous()
    if not known or grad.dim() != 2 or grad.shape[1] % LINE:
        fail(
            _OP,
            "gradients must be contiguous float32 or bfloat16 [N, K] on the CPU, K a multiple of "
            f"{LINE}, not {grad.dtype} {list(grad.shape)}",
        )
    return grad.shape[0], grad.shape[1]
