"""The products of prefill attention: a few rows of numbers times a matrix, sums in registers.

Of a tile of rows and vectors each number of the left side is loaded once for all vectors, and each
vector of the right side once for all rows: 24 multiply-adds take 10 loads. Keys times queries and
values times weights are the same product, over head_dim and over keys.
"""

from __future__ import annotations

from functools import partial

from numba import types

from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.emit import (
    F32,
    FEATURES,
    HAS_BF16,
    I32,
    V_F32,
    V_I32,
    const_f32,
    const_i64,
    dot_bf16,
    fma,
    load,
    loop,
    splat,
    store,
    switch,
)
from qoff.kernels.cpu.jit.simd import vector_intrinsic

from .scratch import TILE_ROWS

ROWS = TILE_ROWS
TILES = (1, 3, 4, ROWS)  # rows
# Of 32 registers of 16 numbers, 24 sums and the vectors of one step leave 4. Where 16 numbers take
# two of 16 registers, as on AVX2, six sums leave one.
VECTORS = 4 if "avx512f" in FEATURES else 1


def _tile(b, width, rows, vectors, left, left_stride, right, vector_stride, step, count, out,
          out_stride, corrections, factor):  # fmt: skip
    """out[row] = out[row] * correction[row] + factor * (left[row] @ right), `vectors` of each."""
    lefts = [b.add(left, b.mul(left_stride, const_i64(row))) for row in range(rows)]
    rights = [b.add(right, b.mul(vector_stride, const_i64(v))) for v in range(vectors)]
    index, sums, close = loop(b, count, [const_f32(0.0)] * (rows * vectors))
    at_left, at_right = b.mul(index, const_i64(4)), b.mul(index, step)
    one, vector = (F32, V_F32) if width == 4 else (I32, V_I32)
    columns = [load(b, b.add(at, at_right), 0, vector) for at in rights]
    found = []
    for row, at in enumerate(lefts):
        number = splat(b, load(b, b.add(at, at_left), 0, one), vector)
        for x, y in zip(columns, sums[row * vectors : (row + 1) * vectors], strict=True):
            found.append(fma(b, number, x, y) if width == 4 else dot_bf16(b, y, number, x))
    found = close(found)
    scale = splat(b, factor, V_F32)
    outs = [b.add(out, b.mul(out_stride, const_i64(row))) for row in range(rows)]
    corrected = b.icmp_signed("!=", corrections, const_i64(0))
    with b.if_else(corrected) as (adding, storing):
        with adding:
            for row, at in enumerate(outs):
                correction = splat(b, load(b, corrections, 16 * row, F32), V_F32)
                for v in range(vectors):
                    before = b.fmul(load(b, at, 64 * v, V_F32), correction)
                    store(b, fma(b, found[row * vectors + v], scale, before), at, 64 * v)
        with storing:
            for row, at in enumerate(outs):
                for v in range(vectors):
                    store(b, b.fmul(found[row * vectors + v], scale), at, 64 * v)


WIDTHS = (4, 2) if HAS_BF16 else (4,)  # bytes of a number: float32, bfloat16


@vector_intrinsic(types.void, *([types.int64] * 12), types.float32)
def _tile_of(b, width, rows, vectors, *operands):
    """The tile of as many rows (1, 3, 4, 6) and vectors (1, 2, 4), of numbers of 4 or 2 bytes."""
    cases = {
        64 * w + 8 * r + v: partial(_tile, b, w, r, v, *operands)
        for w in WIDTHS
        for r in TILES
        for v in (1, 2, 4)
        if v <= VECTORS
    }
    size = b.add(b.mul(width, const_i64(64)), b.add(b.mul(rows, const_i64(8)), vectors))
    switch(b, size, cases)


@inner
def tile_rows(rows):
    """Of how many of these rows the next tile is, so that no row is left alone if that can be."""
    if rows == ROWS or rows > ROWS + 2:
        return ROWS
    return 4 if rows >= 4 else 3 if rows == 3 else 1


@inner
def product(width, rows, left, left_stride, right, vector_stride, step, vectors, count, out,
            out_stride, corrections, factor):  # fmt: skip
    """out[row] = out[row] * corrections[row] + factor * sum over i of left[row, i] * right[i].

    width: 4, float32 numbers on both sides; or 2, pairs of bfloat16 for each i. rows: 1, 3, 4 or 6.
    left: [rows, count], `left_stride` bytes between rows. right: `vectors` vectors of 16 numbers
    (pairs) for each i, `vector_stride` bytes between them and `step` between those of one i and the
    next. out: float32 [rows, 16 * vectors], `out_stride` bytes between rows. corrections: the
    address of the rows' factors, quads; 0: `out` is not added to. The order of operations of one
    number depends on nothing else than `count`.
    """
    done = 0
    while done < vectors:
        together = VECTORS if vectors - done >= VECTORS else 2 if vectors - done >= 2 else 1
        _tile_of(
            width, rows, together, left, left_stride, right + done * vector_stride, vector_stride,
            step, count, out + 64 * done, out_stride, corrections, factor,
        )  # fmt: skip
        done += together
