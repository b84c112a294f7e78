"""Gates of what attention returns, on the CPU."""

from __future__ import annotations

import ctypes

import numpy as np
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.linear.activation import sigmoid
from qoff.kernels.cpu.operands import check_rows, fail, int64s, offsets
from qoff.kernels.cpu.recurrent.step import softplus
from qoff.kernels.layout.ending import GATES

_TOGETHER = 1024  # numbers of a row that are an item, about
_SIGMOID, _SOFTPLUS = GATES.index("sigmoid"), GATES.index("softplus")


class GateArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes; each: numbers that a gate is of."""

    OF_LAYER = ()  # all of it is the pass's
    _fields_ = int64s(
        "x", "x_stride", "by", "by_stride", "out", "out_stride", "tokens", "columns", "each",
        "together", "activation",
    )  # fmt: skip


(X, X_STRIDE, BY, BY_STRIDE, OUT, OUT_STRIDE, M, COLUMNS, EACH, TOGETHER,
 ACTIVATION) = offsets(GateArguments)  # fmt: skip


@inner
def _share(kind, by):
    """What a gate multiplies by."""
    if kind == _SIGMOID:
        return np.float32(1.0) / (np.float32(1.0) + np.exp(-by))
    return softplus(by) if kind == _SOFTPLUS else by


@inner
def _of_groups(kind, x, by, out, first, last, each):
    """Numbers [first, last) of a row, of which `each` neighbouring ones have a gate."""
    for group in range(first // each, last // each):
        share = simd.splat_f32(_share(kind, simd.peek_f32(by + 4 * group)))
        for i in range(4 * each * group, 4 * each * (group + 1), 64):
            simd.store_f32(out + i, simd.mul(simd.load_f32(x + i), share))


@inner
def _of_numbers(kind, x, by, out, first, last):
    """The same where each number has a gate."""
    if kind == _SOFTPLUS:
        for i in range(4 * first, 4 * last, 4):
            simd.poke_f32(out + i, simd.peek_f32(x + i) * softplus(simd.peek_f32(by + i)))
        return
    for i in range(4 * first, 4 * last, 64):
        share = simd.load_f32(by + i)
        if kind == _SIGMOID:
            share = sigmoid(share, np.float32(1.0))
        simd.store_f32(out + i, simd.mul(simd.load_f32(x + i), share))


@job
def gate_job(pool, thread, threads, args):
    """All rows, in parts."""
    columns, each = simd.peek_i64(args + COLUMNS), simd.peek_i64(args + EACH)
    together, kind = simd.peek_i64(args + TOGETHER), simd.peek_i64(args + ACTIVATION)
    parts = (columns + together - 1) // together
    item = take(pool, 0)
    while item < simd.peek_i64(args + M) * parts:
        token, first = item // parts, item % parts * together
        last = min(first + together, columns)
        x = simd.peek_i64(args + X) + token * simd.peek_i64(args + X_STRIDE)
        by = simd.peek_i64(args + BY) + token * simd.peek_i64(args + BY_STRIDE)
        out = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE)
        if each == 1:
            _of_numbers(kind, x, by, out, first, last)
        else:
            _of_groups(kind, x, by, out, first, last, each)
        item = take(pool, 0)


def gate(
    x: Tensor,
    by: Tensor,
    *,
    activation: str = "sigmoid",
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Return x * activation(by): see `reference.delta.gate`.

    x, out: float32 [M, N], rows contiguous, N a multiple of 16; out may be x. by: the same, or
    [M, H], where N / H is a multiple of 16. Raises OpError.
    """
    op, pool = "gate", pool or default_pool()
    out = x.new_empty(x.shape) if out is None else out
    if activation not in GATES:
        fail(op, f"unknown activation {activation!r}; known are {', '.join(map(repr, GATES))}")
    if x.dim() != 2 or x.shape[1] % 16:
        fail(op, f"rows of a multiple of 16 numbers, not {list(x.shape)}")
    columns, gates = x.shape[1], by.shape[-1]
    if gates != columns and (not gates or columns % (16 * gates)):
        fail(op, f"a gate of each number or of a multiple of 16, not {gates} of {columns}")
    for name, rows, count in (("x", x, columns), ("by", by, gates), ("out", out, columns)):
        check_rows(op, name, rows, len(x), count)
    each = columns // gates if columns else 1
    pool.run(
        gate_job.address,
        GateArguments(
            x=x.data_ptr(), x_stride=4 * x.stride(0), by=by.data_ptr(), by_stride=4 * by.stride(0),
            out=out.data_ptr(), out_stride=4 * out.stride(0), tokens=len(x), columns=columns,
            each=each, together=each * max(1, _TOGETHER // each),
            activation=GATES.index(activation),
        ),
    )  # fmt: skip
    return out
