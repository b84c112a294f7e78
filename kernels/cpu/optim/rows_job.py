"""The compiled passes of Adafactor over rows: squares, sizes of updates, updates."""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner, job
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.operands import int64s, offsets

from . import lanes
from .weights import write_weight

SQUARES, SIZE, STEP = range(3)
_ROWS = 4  # that squares are taken of at a time: their columns' sums are in memory


class RowsArguments(ctypes.Structure):
    """Addresses, sizes, and numbers of a pass; see `rows`.

    found: a number of each row. sums: of columns, of each block. weight: of a copy in bfloat16, or
    in float16 where `half` is 1; 0: there is none.
    """

    _fields_ = (
        *int64s(
            "kind", "rows", "columns", "block", "grad", "narrow", "of_rows", "of_columns", "found",
            "sums", "master", "weight", "half",
        ),
        *((name, ctypes.c_float) for name in ("scale", "most", "keep", "rate")),
    )  # fmt: skip


(KIND, ROWS, COLUMNS, BLOCK, GRAD, NARROW, OF_ROWS, OF_COLUMNS, FOUND, SUMS, MASTER, WEIGHT, HALF,
 SCALE, MOST, KEEP, RATE) = offsets(RowsArguments)  # fmt: skip


@inlined
def _gradient(grad, narrow, at):
    return simd.load_bf16(grad + 2 * at) if narrow else simd.load_f32(grad + 4 * at)


@inlined
def _none():
    return simd.splat_f32(np.float32(0.0))


@inlined
def _squares(args, narrow, row, count, sums):
    """Sums of the squares of `count` rows, _ROWS or 1, each and added to those of columns."""
    columns, scale = simd.peek_i64(args + COLUMNS), simd.splat_f32(simd.peek_f32(args + SCALE))
    grad, found = simd.peek_i64(args + GRAD), simd.peek_i64(args + FOUND)
    first = row * columns
    a, b, c, d = _none(), _none(), _none(), _none()
    for at in range(0, columns, 16):
        x = simd.mul(_gradient(grad, narrow, first + at), scale)
        total = simd.mul_add(x, x, simd.load_f32(sums + 4 * at))
        a = simd.mul_add(x, x, a)
        if count == _ROWS:
            x = simd.mul(_gradient(grad, narrow, first + columns + at), scale)
            y = simd.mul(_gradient(grad, narrow, first + 2 * columns + at), scale)
            z = simd.mul(_gradient(grad, narrow, first + 3 * columns + at), scale)
            b, c, d = simd.mul_add(x, x, b), simd.mul_add(y, y, c), simd.mul_add(z, z, d)
            total = simd.add(total, simd.mul_add(z, z, simd.mul_add(y, y, simd.mul(x, x))))
        simd.store_f32(sums + 4 * at, total)
    simd.poke_f32(found + 4 * row, simd.sum_f32(a))
    if count == _ROWS:
        simd.poke_f32(found + 4 * (row + 1), simd.sum_f32(b))
        simd.poke_f32(found + 4 * (row + 2), simd.sum_f32(c))
        simd.poke_f32(found + 4 * (row + 3), simd.sum_f32(d))


@inner
def _squares_of(args, narrow, start, stop, sums):
    columns = simd.peek_i64(args + COLUMNS)
    for at in range(0, columns, 16):
        simd.store_f32(sums + 4 * at, _none())
    whole = start + (stop - start) // _ROWS * _ROWS
    for row in range(start, whole, _ROWS):
        _squares(args, narrow, row, _ROWS, sums)
    for row in range(whole, stop):
        _squares(args, narrow, row, 1, sums)


@inlined
def _updates(args, narrow, steps, row):
    """Of a row: the sum of the squares of its update, or of its weights after the step."""
    columns, grad = simd.peek_i64(args + COLUMNS), simd.peek_i64(args + GRAD)
    of_columns, most = (
        simd.peek_i64(args + OF_COLUMNS),
        simd.splat_f32(simd.peek_f32(args + MOST)),
    )
    of_row = simd.splat_f32(simd.peek_f32(simd.peek_i64(args + OF_ROWS) + 4 * row))
    keep = simd.splat_f32(simd.peek_f32(args + KEEP))
    rate = simd.splat_f32(simd.peek_f32(args + RATE))
    master, copy = simd.peek_i64(args + MASTER), simd.peek_i64(args + WEIGHT)
    half = simd.peek_i64(args + HALF) != 0
    first = row * columns
    total = _none()
    for at in range(0, columns, 16):
        factor = lanes.smaller(simd.mul(of_row, simd.load_f32(of_columns + 4 * at)), most)
        x = simd.mul(_gradient(grad, narrow, first + at), factor)
        if steps:
            p = simd.load_f32(master + 4 * (first + at))
            x = simd.mul_add(rate, x, simd.mul(p, keep))
            write_weight(master, copy, half, first + at, x)
        total = simd.mul_add(x, x, total)
    simd.poke_f32(simd.peek_i64(args + FOUND) + 4 * row, simd.sum_f32(total))


@inner
def _updates_of(args, narrow, steps, start, stop):
    for row in range(start, stop):
        _updates(args, narrow, steps, row)


@job
def rows_job(pool, thread, threads, args):
    """A pass, by blocks of rows; what is found of each does not depend on threads."""
    rows, block = simd.peek_i64(args + ROWS), simd.peek_i64(args + BLOCK)
    kind, narrow = simd.peek_i64(args + KIND), simd.peek_i64(args + NARROW) != 0
    sums, columns = simd.peek_i64(args + SUMS), simd.peek_i64(args + COLUMNS)
    at = take(pool, 0)
    while at * block < rows:
        start, stop = at * block, min((at + 1) * block, rows)
        if kind == SQUARES:
            _squares_of(args, narrow, start, stop, sums + 4 * columns * at)
        elif kind == SIZE:
            _updates_of(args, narrow, False, start, stop)
        else:
            _updates_of(args, narrow, True, start, stop)
        at = take(pool, 0)
