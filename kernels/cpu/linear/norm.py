"""Norms of rows on the CPU: where they are an op of their own, and as arguments of others."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, check_rows, fail
from qoff.kernels.layout.ending import Norm

from .norm_job import NormArguments, RowsArguments, norm_job


def norm(
    x: Tensor,
    by: Norm,
    *,
    scale: float = 1.0,
    residual: Tensor | None = None,
    sum_scale: float = 1.0,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Return sum_scale * (scale * norm(x) + residual), each row by itself.

    x, residual, out: float32 [M, K], rows contiguous, K a multiple of 16; out may be the residual,
    but not x. Raises OpError.
    """
    pool = pool or default_pool()
    if out is None:
        out = torch.empty(x.shape)
    a = RowsArguments()
    set_rows("norm", a, x, by, (scale, sum_scale), residual, out)
    if len(x):
        pool.run(norm_job.address, a)
    return out


def set_norm(op: str, a: NormArguments, norm: Norm | None, k: int) -> None:
    """Fill the arguments of a norm of rows of k numbers; None: no norm."""
    if norm is None:
        a.weight = 0
        return
    check_dense(op, "norm", norm.weight, (k,))
    if norm.bias is not None:
        check_dense(op, "bias of the norm", norm.bias, (k,))
    a.weight, a.bias = norm.weight.data_ptr(), address(norm.bias)
    a.centered, a.eps, a.scale = norm.centered, norm.eps, norm.scale


def set_rows(
    op: str,
    a: RowsArguments,
    x: Tensor,
    by: Norm,
    scales: tuple[float, float],
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Fill the arguments of a norm, scaled, and a residual, the sum scaled."""
    if x.dim() != 2 or x.shape[1] % 16:
        fail(op, f"norms are of rows of a multiple of 16 numbers, not of {list(x.shape)}")
    tokens, k = x.shape
    for name, rows in (("x", x), ("out", out), ("residual", residual)):
        if rows is not None:
            check_rows(op, name, rows, tokens, k)
    if out.data_ptr() == x.data_ptr():
        fail(op, "out must not be x")
    set_norm(op, a.norm, by, k)
    a.x, a.x_stride, a.tokens, a.k = x.data_ptr(), 4 * x.stride(0), tokens, k
    a.residual = address(residual)
    a.residual_stride = 0 if residual is None else 4 * residual.stride(0)
    a.out, a.out_stride = out.data_ptr(), 4 * out.stride(0)
    a.scale, a.sum_scale = scales
