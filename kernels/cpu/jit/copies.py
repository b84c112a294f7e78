"""Copies within memory as jobs of a pool, whose threads share the rows."""

from __future__ import annotations

import ctypes

from numba import types
from torch import Tensor

from qoff.kernels.cpu.operands import address, int64s, offsets

from . import simd
from .compiled import job
from .futex import clock_ns
from .pool import default_pool
from .pool_threads import take

_i64 = types.int64
_memmove = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))


class CopiedWords(ctypes.Structure):
    """What jobs have copied: bytes, and the nanoseconds of each thread that did, added up."""

    _fields_ = int64s("nbytes", "ns")


class CopyArguments(ctypes.Structure):
    """Rows of `nbytes` bytes in two places, with their strides; `CopiedWords` that count them.

    table: address of pairs of a row there and one here, a negative one ends them; 0: each row.
    """

    _fields_ = int64s(
        "dest", "dest_stride", "source", "source_stride", "nbytes", "rows", "table", "copied"
    )


NBYTES_COPIED, NS = offsets(CopiedWords)
DEST, DEST_STRIDE, SOURCE, SOURCE_STRIDE, NBYTES, ROWS, TABLE, COPIED = offsets(CopyArguments)


@job
def copy_job(pool, thread, threads, args):
    """Copy rows, each by the thread that takes it."""
    dest, source = simd.peek_i64(args + DEST), simd.peek_i64(args + SOURCE)
    nbytes, rows = simd.peek_i64(args + NBYTES), simd.peek_i64(args + ROWS)
    table, copied = simd.peek_i64(args + TABLE), simd.peek_i64(args + COPIED)
    start, done = clock_ns(), 0
    while True:
        row = take(pool, 0)
        if row >= rows:
            break
        there = here = row
        if table != 0:
            there = simd.peek_i64(table + 16 * row)
            here = simd.peek_i64(table + 16 * row + 8)
        if there < 0:
            break
        to = dest + there * simd.peek_i64(args + DEST_STRIDE)
        _memmove(to, source + here * simd.peek_i64(args + SOURCE_STRIDE), nbytes)
        done += nbytes
    if done > 0:
        simd.atomic_add(copied + NBYTES_COPIED, done)
        simd.atomic_add(copied + NS, clock_ns() - start)


def copy_rows(
    dest: Tensor, source: Tensor, copied: CopiedWords, table: Tensor | None = None
) -> None:
    """Copy rows by a job, of contiguous numbers alike: all of `dest`, [rows, n], from `source`.

    table: int64 [pairs, 2], contiguous: a row of `dest` and the one of `source` that comes there; a
    negative one ends them. copied: counts them, and stays where it is.
    """
    assert dest.shape[1] == source.shape[1]
    assert dest.stride(1) == source.stride(1) == 1
    size = dest.itemsize
    args = CopyArguments(
        dest.data_ptr(),
        dest.stride(0) * size,
        source.data_ptr(),
        source.stride(0) * size,
        dest.shape[1] * size,
        len(dest) if table is None else len(table),
        address(table),
        ctypes.addressof(copied),
    )
    default_pool().run(copy_job.address, args, copied)
