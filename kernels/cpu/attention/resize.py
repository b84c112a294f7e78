"""Heads with more or fewer channels, on the CPU."""

from __future__ import annotations

import ctypes

import numpy as np
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.operands import check_rows, fail, int64s, offsets

_OP = "resize_heads"


class ResizeArguments(ctypes.Structure):
    """Addresses, and sizes in bytes: strides, what is before the heads, a head of x and of out."""

    OF_LAYER = ()  # all of it is the pass's
    _fields_ = int64s(
        "x", "x_stride", "out", "out_stride", "tokens", "first", "heads", "own", "to",
    )  # fmt: skip


X, X_STRIDE, OUT, OUT_STRIDE, M, FIRST, HEADS, OWN, TO = offsets(ResizeArguments)


@inner
def _widened(x, out, heads, own, to):
    """The last head first: `out` may begin where `x` does."""
    for head in range(heads - 1, -1, -1):
        for i in range(own - 64, -1, -64):
            simd.store_f32(out + head * to + i, simd.load_f32(x + head * own + i))
        for i in range(own, to, 64):
            simd.store_f32(out + head * to + i, simd.splat_f32(np.float32(0.0)))


@inner
def _narrowed(x, out, heads, own, to):
    for head in range(heads):
        for i in range(0, to, 64):
            simd.store_f32(out + head * to + i, simd.load_f32(x + head * own + i))


@job
def resize_heads_job(pool, thread, threads, args):
    """A row at a time."""
    first, heads = simd.peek_i64(args + FIRST), simd.peek_i64(args + HEADS)
    own, to = simd.peek_i64(args + OWN), simd.peek_i64(args + TO)
    token = take(pool, 0)
    while token < simd.peek_i64(args + M):
        x = simd.peek_i64(args + X) + token * simd.peek_i64(args + X_STRIDE)
        out = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE)
        if x != out:
            for i in range(0, first, 64):
                simd.store_f32(out + i, simd.load_f32(x + i))
        if to > own:
            _widened(x + first, out + first, heads, own, to)
        else:
            _narrowed(x + first, out + first, heads, own, to)
        token = take(pool, 0)


def resize_heads(
    x: Tensor,
    dim: int,
    to: int,
    *,
    first: int = 0,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Return rows whose heads have `to` channels: see `reference.elementwise.resize_heads`.

    x: float32 [M, first + heads * dim], out: [M, first + heads * to], rows contiguous; first, dim
    and to: multiples of 16. out may begin where x does, with rows as far apart. Raises OpError.
    """
    pool = pool or default_pool()
    if x.dim() != 2 or min(dim, to) < 16 or first < 0 or dim % 16 or to % 16 or first % 16:
        fail(_OP, f"rows of heads of multiples of 16 channels, not {dim} and {to} behind {first}")
    heads, rest = divmod(x.shape[1] - first, dim)
    if heads < 0 or rest:
        fail(_OP, f"heads of {dim} channels behind {first}, not {x.shape[1]} numbers")
    columns = first + heads * to
    out = x.new_empty(len(x), columns) if out is None else out
    for name, rows, count in (("x", x, x.shape[1]), ("out", out, columns)):
        check_rows(_OP, name, rows, len(x), count)
    if out.data_ptr() == x.data_ptr() and out.stride(0) != x.stride(0):
        fail(_OP, "rows of out, which begins where x does, have to be as far apart")
    pool.run(
        resize_heads_job.address,
        ResizeArguments(
            x=x.data_ptr(), x_stride=4 * x.stride(0), out=out.data_ptr(),
            out_stride=4 * out.stride(0), tokens=len(x), first=4 * first, heads=heads,
            own=4 * dim, to=4 * to,
        ),
    )  # fmt: skip
    return out
