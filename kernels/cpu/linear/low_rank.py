"""What adapters add to the products of a matrix on the CPU: one job for all rows of a batch.

Its result goes into `w4_linear` as a bias of each row, so norms, gates and activations stay parts
of that. A row without an adapter gets the matrix's own bias.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import default_pool, finish, take, wait
from qoff.kernels.cpu.operands import address, check_dense, check_rows, fail, int64s, offsets
from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.low_rank import BLOCK, LowRanks

from .norm import set_norm
from .norm_job import NormArguments, normalize
from .scratch import low_rank_bytes

_OP = "low_rank"


class LowRankArguments(ctypes.Structure):
    """Addresses and strides in bytes, sizes, the first block of rows that is computed."""

    _fields_ = (
        *int64s("x", "x_stride", "tokens", "k", "n", "first_block", "table", "which", "bias",
                "out", "sums", "width", "normed"),
        ("norm", NormArguments),
    )  # fmt: skip


(X, X_STRIDE, M, K, N, FIRST_BLOCK, TABLE, WHICH, BIAS, OUT, SUMS, WIDTH, NORMED, NORM) = offsets(
    LowRankArguments
)
DOWN, UP, FIRST, RANKS, RANK, _ENTRY = (8 * i for i in range(6))  # in a row of the table


@inner
def _adapter(args, token):
    """The row of the table for a token; 0: nothing is added."""
    number = simd.peek_i64(simd.peek_i64(args + WHICH) + 8 * token)
    if number < 0:
        return 0
    entry = simd.peek_i64(args + TABLE) + _ENTRY * number
    return entry if simd.peek_i64(entry + DOWN) != 0 else 0


@inner
def _down_token(args, thread, token, part, parts):
    """A part of the products of a token with its adapter's `down`."""
    entry = _adapter(args, token)
    if entry == 0:
        return
    k, down = simd.peek_i64(args + K), simd.peek_i64(entry + DOWN)
    x = simd.peek_i64(args + X) + token * simd.peek_i64(args + X_STRIDE)
    if simd.peek_i64(args + NORM) != 0:
        normed = simd.peek_i64(args + NORMED) + thread * 4 * k
        normalize(args + NORM, x, k, 0, k, normed)
        x = normed
    sums = simd.peek_i64(args + SUMS) + 4 * token * simd.peek_i64(args + WIDTH)
    fours = simd.peek_i64(entry + RANKS) // 4
    for four in range(part * fours // parts, (part + 1) * fours // parts):
        a = b = c = d = simd.splat_f32(np.float32(0.0))
        row = down + 16 * four * k
        for i in range(0, 4 * k, 64):
            v = simd.load_f32(x + i)
            a = simd.mul_add(v, simd.load_f32(row + i), a)
            b = simd.mul_add(v, simd.load_f32(row + 4 * k + i), b)
            c = simd.mul_add(v, simd.load_f32(row + 8 * k + i), c)
            d = simd.mul_add(v, simd.load_f32(row + 12 * k + i), d)
        simd.poke_f32(sums + 16 * four, simd.sum_f32(a))
        simd.poke_f32(sums + 16 * four + 4, simd.sum_f32(b))
        simd.poke_f32(sums + 16 * four + 8, simd.sum_f32(c))
        simd.poke_f32(sums + 16 * four + 12, simd.sum_f32(d))


@inner
def _up_block(args, block):
    """16 numbers of every row."""
    n, bias = simd.peek_i64(args + N), simd.peek_i64(args + BIAS)
    width, sums = simd.peek_i64(args + WIDTH), simd.peek_i64(args + SUMS)
    out = simd.peek_i64(args + OUT) + 64 * block
    start = simd.splat_f32(np.float32(0.0))
    if bias != 0:
        start = simd.load_f32(bias + 64 * block)
    of = simd.peek_i64(args + FIRST_BLOCK) + block
    for token in range(simd.peek_i64(args + M)):
        value, entry = start, _adapter(args, token)
        if entry != 0:
            rank = simd.peek_i64(entry + RANK)
            up = simd.peek_i64(entry + UP) + 64 * rank * of
            column = simd.peek_i64(simd.peek_i64(entry + FIRST) + 8 * of)
            at = sums + 4 * (token * width + column)
            for j in range(rank):
                times = simd.splat_f32(simd.peek_f32(at + 4 * j))
                value = simd.mul_add(times, simd.load_f32(up + 64 * j), value)
        simd.store_f32(out + 4 * n * token, value)


@job
def low_rank_job(pool, thread, threads, args):
    """The whole op; its arguments are the fields above."""
    tokens, blocks = simd.peek_i64(args + M), simd.peek_i64(args + N) // 16
    parts = threads if tokens < 2 * threads else 1
    item = take(pool, 0)
    while item < tokens * parts:
        _down_token(args, thread, item // parts, item % parts, parts)
        finish(pool, 0)
        item = take(pool, 0)
    wait(pool, 0, tokens * parts)
    step = max(1, blocks // (8 * threads))
    first = take(pool, 1) * step
    while first < blocks:
        for block in range(first, min(first + step, blocks)):
            _up_block(args, block)
        first = take(pool, 1) * step


def low_rank(
    x: Tensor,
    ranks: LowRanks,
    which: Tensor,
    rows: slice,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See `reference.low_rank`; x, bias: float32, rows of x contiguous. Raises OpError."""
    tokens, k = x.shape
    n, pool = rows.stop - rows.start, default_pool()
    check_rows(_OP, "x", x, tokens, k)
    if rows.start % BLOCK or n % BLOCK or k % 16:
        fail(_OP, f"rows {rows.start} to {rows.stop} of [_, {k}] are not whole blocks of 16")
    if which.shape != (tokens,) or which.dtype != torch.int64 or not which.is_contiguous():
        fail(_OP, f"which must be contiguous int64 [{tokens}], not {list(which.shape)}")
    for one in ranks.each:
        if one is not None:
            check_dense(_OP, "down", one.down, (len(one.down), k))
    if bias is not None:
        check_dense(_OP, "bias", bias, (n,))
    out = torch.empty(tokens, n)
    if tokens == 0:
        return out
    normed = 0 if norm is None else pool.threads * 4 * k
    with pool.lock:
        scratch = pool.workspace(
            low_rank_bytes(pool.threads, tokens, k, ranks.rank, normed=norm is not None)
        )
        a = LowRankArguments(
            x.data_ptr(), 4 * x.stride(0), tokens, k, n, rows.start // BLOCK,
            ranks.table.data_ptr(), which.data_ptr(), address(bias), out.data_ptr(),
            scratch + normed, ranks.rank, scratch,
        )  # fmt: skip
        set_norm(_OP, a.norm, norm, k)
        pool.run(low_rank_job.address, a, keep=(ranks, which))
    return out
