"""Rows of a matrix packed `rows16`, dequantized and scaled: one small job on the pool."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.linear.scales import HALF, ROW_BLOCK_BYTES, SINGLE, width_of
from qoff.kernels.cpu.operands import address, check_rows, fail, int64s, offsets
from qoff.kernels.layout.packing import EACH_BYTE, QUADS, reads
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.scales import EXPONENT, SHIFT, STEPS


class EmbeddingArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes; `wrong` becomes 1 for an id without a row."""

    _fields_ = (
        *int64s(
            "ids", "offset", "tokens", "n", "k", "codes", "scale_min", "width", "group", "bits",
            "residual", "residual_stride", "out", "out_stride", "wrong", "each",
        ),
        ("scale", ctypes.c_float),
    )  # fmt: skip


(IDS, OFFSET, M, N, K, CODES, SCALE_MIN, WIDTH, GROUP, BITS, RESIDUAL, RESIDUAL_STRIDE, OUT,
 OUT_STRIDE, WRONG, EACH, FACTOR) = offsets(EmbeddingArguments)  # fmt: skip
_PART = 512  # numbers of a row, in one item: a multiple of every group size


def _parts():
    """Parts of quads, uint32 [bits, quad, part, 3]: bytes to their word, bits to the right, mask.

    A mask of 0 has nothing.
    """
    found = np.zeros((max(QUADS) + 1, 8, 3, 3), np.uint32)
    for bits in QUADS:
        for i, quad in enumerate(reads(bits)):
            for place, (word, right, mask) in enumerate(quad):
                found[bits, i, place] = 64 * word, right, mask * EACH_BYTE
    return found


_PARTS = _parts()


@inner
def _quad(words, bits, i):
    """Quad i of 8 of a row in as many words as codes have bits, 64 bytes apart."""
    found = np.uint32(0)
    for word, right, mask in _PARTS[bits, i]:
        found |= (np.uint32(simd.peek_i32(words + word)) >> right) & mask
    return found


@inner
def _write_group(args, codes, scale_min, lane, first, residual, out):
    """One group of a row from number `first` on; the row's codes are 4 bytes of each 64."""
    bits, factor = simd.peek_i64(args + BITS), simd.peek_f32(args + FACTOR)
    width = simd.peek_i64(args + WIDTH)
    if width == SINGLE:
        scale = simd.peek_f32(scale_min + 4 * lane)
        minimum = simd.peek_f32(scale_min + 64 + 4 * lane)
    elif width == HALF:
        scale = simd.peek_f16(scale_min + 2 * lane)
        minimum = simd.peek_f16(scale_min + 32 + 2 * lane)
    else:
        scale = simd.exponent_f32(simd.peek_u8(scale_min + lane), SHIFT, EXPONENT - bits)
        zero = np.float32(simd.peek_u8(scale_min + 16 + lane))
        minimum = zero * (scale * (np.float32(-1 << bits) / np.float32(STEPS)))
    for start in range(first, first + simd.peek_i64(args + GROUP), 4):
        quad = _quad(codes + 64 * bits * (start // 32), bits, start % 32 // 4)
        for i in range(start, start + 4):
            value = (np.float32(quad & np.uint32(255)) * scale + minimum) * factor
            quad >>= np.uint32(8)
            if residual != 0:
                value = simd.peek_f32(residual + 4 * i) + value
            simd.poke_f32(out + 4 * i, value)


@inner
def _write_part(args, token, part):
    """Some groups of one row, of a token that has perhaps several."""
    each = simd.peek_i64(args + EACH)
    row = simd.peek_i64(simd.peek_i64(args + IDS) + 8 * (token // each)) * each
    if each > 1 and row >= simd.peek_i64(args + N):
        row = 0
    row += token % each + simd.peek_i64(args + OFFSET)
    if row < 0 or row >= simd.peek_i64(args + N):
        simd.poke_i64(args + WRONG, 1)
        return
    k, group = simd.peek_i64(args + K), simd.peek_i64(args + GROUP)
    block, lane = row // 16, row % 16
    codes = simd.peek_i64(args + CODES) + block * 2 * k * simd.peek_i64(args + BITS) + 4 * lane
    group_bytes = ROW_BLOCK_BYTES << simd.peek_i64(args + WIDTH)
    scale_min = simd.peek_i64(args + SCALE_MIN) + block * (k // group) * group_bytes
    residual = simd.peek_i64(args + RESIDUAL)
    if residual != 0:
        residual += token * simd.peek_i64(args + RESIDUAL_STRIDE)
    out = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE)
    for first in range(part * _PART, min((part + 1) * _PART, k), group):
        at = scale_min + first // group * group_bytes
        _write_group(args, codes, at, lane, first, residual, out)


@job
def embedding_job(pool, thread, threads, args):
    """The whole op; its arguments are the fields above."""
    parts = (simd.peek_i64(args + K) + _PART - 1) // _PART
    items = simd.peek_i64(args + M) * parts
    item = take(pool, 0)
    while item < items:
        _write_part(args, item // parts, item % parts)
        item = take(pool, 0)


def embedding(
    ids: Tensor,
    weight: QTensor,
    *,
    offset: int = 0,
    scale: float = 1.0,
    rows_each: int = 1,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return residual + scale * the rows ids + offset of a weight [N, K] of packing rows16.

    ids: int64 [T]. rows_each: so many rows of each, from ids * rows_each + offset on; where it is
    more than one, ids beyond the last one have the rows of 0. residual and out: float32
    [T * rows_each, K], rows contiguous; they may be the same. Raises OpError, for rows that are not
    there too.
    """
    n, k = weight.shape
    if ids.dtype != torch.int64 or ids.dim() != 1:
        fail("embedding", f"ids are int64 [T], not {ids.dtype} {list(ids.shape)}")
    ids = ids.contiguous()
    count = len(ids) * rows_each
    if out is None:
        out = torch.empty(count, k)
    for name, rows in (("out", out), ("residual", residual)):
        if rows is not None:
            check_rows("embedding", name, rows, count, k)
    if not len(ids):
        return out
    stride = 0 if residual is None else 4 * residual.stride(0)
    a = EmbeddingArguments(
        ids.data_ptr(), offset, count, n, k, weight.codes.data_ptr(),
        weight.scale_min.data_ptr(), width_of(weight.scale_min.dtype), weight.group_size,
        weight.bits, address(residual), stride, out.data_ptr(), 4 * out.stride(0), 0,
        rows_each, scale,
    )  # fmt: skip
    default_pool().run(embedding_job.address, a, keep=ids)
    if a.wrong:
        low, high = (int(x) * rows_each + offset for x in ids.aminmax())
        high += rows_each - 1
        fail("embedding", f"ids from {low} to {high}, rows 0 to {n - 1}")
    return out
