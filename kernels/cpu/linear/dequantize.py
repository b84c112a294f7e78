"""Matrices packed `rows16` as dense ones: what backward passes multiply by, a piece at a time."""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from llvmlite import ir
from numba.core import types
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.emit import (
    F32,
    HAS_BF16,
    I8,
    LANES,
    V_F32,
    V_I32,
    const_i64,
    load,
    rounded_bf16,
    splat,
    store,
    switch,
)
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.jit.quads import shuffled
from qoff.kernels.cpu.jit.simd import vector_intrinsic
from qoff.kernels.cpu.operands import fail, int64s, offsets
from qoff.kernels.layout.packing import BITS, ROW_BLOCK
from qoff.kernels.layout.qtensor import QTensor

from .scales import ROW_BLOCK_BYTES, store_scales, width_of
from .scratch import SCALES_BYTES, dequantize_bytes
from .tile import UNROLL, codes_32

_OP = "dequantize"
DTYPES = (torch.float32, torch.bfloat16) if HAS_BF16 else (torch.float32,)


class DequantizeArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes and flags; blocks: of 16 rows."""

    _fields_ = int64s(
        "codes", "scale_min", "width", "group", "bits", "k", "blocks", "narrow", "out",
        "out_stride", "scratch",
    )  # fmt: skip


(CODES, SCALE_MIN, WIDTH, GROUP, BITS_OF, K, BLOCKS, NARROW, OUT, OUT_STRIDE, SCRATCH) = offsets(
    DequantizeArguments
)


def _interleaved(b, x, y, parts):
    """Of each 128 bits of two vectors, these of the eight 32-bit parts that both have."""
    mask = [4 * lane + i % 4 + LANES * (i // 4) for lane in range(4) for i in parts]
    return shuffled(b, x, y, mask)


def _by_rows(b, quads):
    """Four vectors [16 rows, 4 bytes], neighbours in K, as 16 vectors of 16 numbers float32."""
    first, second, third, fourth = quads
    pairs = [
        (_interleaved(b, first, second, half), _interleaved(b, third, fourth, half))
        for half in ((0, 4, 1, 5), (2, 6, 3, 7))
    ]
    # Vector i has rows i, 4 + i, 8 + i and 12 + i.
    mixed = [
        _interleaved(b, *pair, half) for pair in pairs for half in ((0, 1, 4, 5), (2, 3, 6, 7))
    ]
    for row in range(ROW_BLOCK):
        data = b.bitcast(mixed[row % 4], ir.VectorType(I8, 4 * LANES))
        lanes = [LANES * (row // 4) + i for i in range(LANES)]
        own = shuffled(b, data, data, lanes)
        yield b.uitofp(b.zext(own, V_I32), V_F32)


def rows_32(b, bits, codes, scales):
    """The rows of a row block, each 32 columns as two vectors of 16 numbers float32.

    scales: the address of scales [16] and minima [16], float32, as `store_scales` writes them.
    """
    parts = dict(codes_32(b, codes, bits))
    quads = [parts[k] for k in sorted(parts)]
    halves = [_by_rows(b, quads[:4]), _by_rows(b, quads[4:])]
    for row, pair in enumerate(zip(*halves, strict=True)):
        scale, minimum = (
            splat(b, load(b, scales, 4 * row + offset, F32), V_F32) for offset in (0, 64)
        )
        yield [b.fadd(b.fmul(x, scale), minimum) for x in pair]


def _emit(b, bits, narrow, codes, scratch, out, stride):
    """32 columns of a row block, written."""
    for row, values in enumerate(rows_32(b, bits, codes, scratch)):
        to = b.add(out, b.mul(stride, const_i64(row)))
        if narrow:
            store(b, rounded_bf16(b, *values), to, 0)
        else:
            for i, value in enumerate(values):
                store(b, value, to, 64 * i)


@vector_intrinsic(types.void, *[types.int64] * 6)
def _dequantize_32(b, bits, narrow, *operands):
    """32 columns of 16 rows; as bfloat16 if narrow."""
    cases = {
        2 * each + kind: partial(_emit, b, each, bool(kind), *operands)
        for each in BITS
        for kind in range(len(DTYPES))
    }
    switch(b, b.add(b.mul(bits, const_i64(2)), narrow), cases)


@inner
def dequantize_block(codes, scale_min, width, group, bits, k, narrow, out, stride, scratch):
    """One block of 16 rows of k columns; scratch: SCALES_BYTES."""
    each = 2 if narrow != 0 else 4
    for first in range(0, k, group):
        at = scale_min + first // group * (ROW_BLOCK_BYTES << width)
        store_scales(bits, width, at, scratch)
        for column in range(first, first + group, UNROLL):
            _dequantize_32(bits, narrow, codes + 2 * bits * column, scratch, out + each * column,
                           stride)  # fmt: skip


@inner
def _block(args, scratch, block):
    """One block of 16 rows."""
    k, group = simd.peek_i64(args + K), simd.peek_i64(args + GROUP)
    bits, width = simd.peek_i64(args + BITS_OF), simd.peek_i64(args + WIDTH)
    stride = simd.peek_i64(args + OUT_STRIDE)
    codes = simd.peek_i64(args + CODES) + block * 2 * k * bits
    scale_min = simd.peek_i64(args + SCALE_MIN) + block * (k // group) * (ROW_BLOCK_BYTES << width)
    dequantize_block(
        codes, scale_min, width, group, bits, k, simd.peek_i64(args + NARROW),
        simd.peek_i64(args + OUT) + 16 * block * stride, stride, scratch,
    )  # fmt: skip


@job
def dequantize_job(pool, thread, threads, args):
    """The whole op; its arguments are the fields above."""
    scratch = simd.peek_i64(args + SCRATCH) + thread * SCALES_BYTES
    blocks = simd.peek_i64(args + BLOCKS)
    block = take(pool, 0)
    while block < blocks:
        _block(args, scratch, block)
        block = take(pool, 0)


def dequantize(weight: QTensor, out: Tensor, pool: Pool | None = None) -> Tensor:
    """Write a matrix [N, K] of packing rows16 to `out`, and return its first N rows.

    out: contiguous [rows, K], rows at least N rounded up to 16, of one of DTYPES; as
    `QTensor.dequantize` has it, bit for bit. Raises OpError.
    """
    pool = pool or default_pool()
    n, k = weight.shape
    blocks = -(-n // ROW_BLOCK)
    if weight.packing != "rows16" or not weight.codes.is_cpu:
        fail(_OP, f"packing rows16 on the CPU, not {weight.packing} on {weight.device}")
    fits = out.dim() == 2 and out.shape[0] >= ROW_BLOCK * blocks and out.shape[1] == k
    if out.dtype not in DTYPES or not fits or not out.is_contiguous() or not out.is_cpu:
        fail(
            _OP,
            f"out must be contiguous float32 or bfloat16 [{ROW_BLOCK * blocks}, {k}] on the CPU, "
            f"not {out.dtype} {list(out.shape)}",
        )
    with pool.lock:
        arguments = DequantizeArguments(
            weight.codes.data_ptr(), weight.scale_min.data_ptr(),
            width_of(weight.scale_min.dtype), weight.group_size, weight.bits, k, blocks,
            out.dtype == torch.bfloat16, out.data_ptr(), out.stride(0) * out.itemsize,
            pool.workspace(dequantize_bytes(pool.threads)),
        )  # fmt: skip
        pool.run(dequantize_job.address, arguments)
    return out[:n]
