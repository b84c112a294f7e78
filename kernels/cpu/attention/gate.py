"""Gates of what attention returns, on the CPU."""

from __future__ import annotations

import ctypes

import numpy as np
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import job
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.linear.activation import sigmoid
from qoff.kernels.cpu.operands import check_rows, fail, int64s, offsets

_TOGETHER = 1024  # numbers of a row that are an item


class GateArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes."""

    OF_LAYER = ()  # all of it is the pass's
    _fields_ = int64s(
        "x", "x_stride", "by", "by_stride", "out", "out_stride", "tokens", "columns", "plain"
    )


X, X_STRIDE, BY, BY_STRIDE, OUT, OUT_STRIDE, M, COLUMNS, PLAIN = offsets(GateArguments)


@job
def gate_job(pool, thread, threads, args):
    """All rows, in parts."""
    columns, plain = simd.peek_i64(args + COLUMNS), simd.peek_i64(args + PLAIN)
    parts = (columns + _TOGETHER - 1) // _TOGETHER
    item = take(pool, 0)
    while item < simd.peek_i64(args + M) * parts:
        token, first = item // parts, item % parts * _TOGETHER
        x = simd.peek_i64(args + X) + token * simd.peek_i64(args + X_STRIDE)
        by = simd.peek_i64(args + BY) + token * simd.peek_i64(args + BY_STRIDE)
        out = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE)
        for i in range(4 * first, 4 * min(first + _TOGETHER, columns), 64):
            share = simd.load_f32(by + i)
            if plain == 0:
                share = sigmoid(share, np.float32(1.0))
            simd.store_f32(out + i, simd.mul(simd.load_f32(x + i), share))
        item = take(pool, 0)


def gate(
    x: Tensor,
    by: Tensor,
    *,
    plain: bool = False,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Return x * sigmoid(by), or with `plain` x * by: see `reference.delta.gate`.

    x, by, out: float32 [M, N], rows contiguous, N a multiple of 16; out may be x. Raises OpError.
    """
    op, pool = "gate", pool or default_pool()
    out = x.new_empty(x.shape) if out is None else out
    if x.dim() != 2 or x.shape[1] % 16:
        fail(op, f"rows of a multiple of 16 numbers, not {list(x.shape)}")
    for name, rows in (("x", x), ("by", by), ("out", out)):
        check_rows(op, name, rows, *x.shape)
    pool.run(
        gate_job.address,
        GateArguments(
            x=x.data_ptr(), x_stride=4 * x.stride(0), by=by.data_ptr(), by_stride=4 * by.stride(0),
            out=out.data_ptr(), out_stride=4 * out.stride(0), tokens=len(x), columns=x.shape[1],
            plain=plain,
        ),
    )  # fmt: skip
    return out
