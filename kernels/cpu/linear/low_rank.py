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
from qoff.kernels.cpu.jit.compiled import inlined, inner, job
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.cpu.operands import address, check_dense, check_rows, fail, int64s, offsets
from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.low_rank import BLOCK, DTYPES, LowRank, LowRanks

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
# In a row of the table.
DOWN, UP, FIRST, TIMES, RANKS, RANK, DTYPE, _ENTRY = (8 * i for i in range(8))


@inner
def _adapter(args, token):
    """The row of the table for a token; 0: nothing is added."""
    number = simd.peek_i64(simd.peek_i64(args + WHICH) + 8 * token)
    if number < 0:
        return 0
    entry = simd.peek_i64(args + TABLE) + _ENTRY * number
    return entry if simd.peek_i64(entry + DOWN) != 0 else 0


@inlined
def _load(address, dtype):
    """16 numbers of one of `DTYPES`, widened."""
    if dtype == 0:
        return simd.load_f32(address)
    if dtype == 1:
        return simd.load_f16(address)
    return simd.load_bf16(address)


@inlined
def _down_rows(x, down, k, sums, first, last, dtype):
    """Products of a row x with rows of `down`, four at a time."""
    size = 4 if dtype == 0 else 2
    for four in range(first, last):
        a = b = c = d = simd.splat_f32(np.float32(0.0))
        row = down + 4 * size * four * k
        for i in range(0, k, 16):
            v = simd.load_f32(x + 4 * i)
            a = simd.mul_add(v, _load(row + size * i, dtype), a)
            b = simd.mul_add(v, _load(row + size * (k + i), dtype), b)
            c = simd.mul_add(v, _load(row + size * (2 * k + i), dtype), c)
            d = simd.mul_add(v, _load(row + size * (3 * k + i), dtype), d)
        simd.poke_f32(sums + 16 * four, simd.sum_f32(a))
        simd.poke_f32(sums + 16 * four + 4, simd.sum_f32(b))
        simd.poke_f32(sums + 16 * four + 8, simd.sum_f32(c))
        simd.poke_f32(sums + 16 * four + 12, simd.sum_f32(d))


@inlined
def _up_token(value, at, up, rank, times, dtype):
    """16 numbers of a row: what is at `at` times the factor of a block."""
    size = 4 if dtype == 0 else 2
    for j in range(rank):
        weights = simd.mul(_load(up + 16 * size * j, dtype), times)
        value = simd.mul_add(simd.splat_f32(simd.peek_f32(at + 4 * j)), weights, value)
    return value


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
    first, last = part * fours // parts, (part + 1) * fours // parts
    dtype = simd.peek_i64(entry + DTYPE)
    if dtype == 0:
        _down_rows(x, down, k, sums, first, last, 0)
    elif dtype == 1:
        _down_rows(x, down, k, sums, first, last, 1)
    else:
        _down_rows(x, down, k, sums, first, last, 2)


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
            rank, dtype = simd.peek_i64(entry + RANK), simd.peek_i64(entry + DTYPE)
            column = simd.peek_i64(simd.peek_i64(entry + FIRST) + 8 * of)
            times = simd.splat_f32(simd.peek_f32(simd.peek_i64(entry + TIMES) + 4 * of))
            at, up = sums + 4 * (token * width + column), simd.peek_i64(entry + UP)
            if dtype == 0:
                value = _up_token(value, at, up + 64 * rank * of, rank, times, 0)
            elif dtype == 1:
                value = _up_token(value, at, up + 32 * rank * of, rank, times, 1)
            else:
                value = _up_token(value, at, up + 32 * rank * of, rank, times, 2)
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


def _check_factors(of: LowRank, k: int) -> None:
    down, up = of.down, of.up
    whole = all(one.is_cpu and one.is_contiguous() for one in (down, up))
    if down.shape[1] != k or down.dtype not in DTYPES or up.dtype != down.dtype or not whole:
        fail(
            _OP,
            f"down must be [R, {k}] and contiguous on the CPU, float32, float16 or bfloat16 as up "
            f"is, not {down.dtype} {list(down.shape)} and {up.dtype}",
        )


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
            _check_factors(one, k)
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
