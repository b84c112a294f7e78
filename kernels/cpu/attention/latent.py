"""The products of multi-head latent attention with each head's matrices, one head after another.

A thread dequantizes the matrix of a head, which fits its second-level cache, and multiplies the
rows of all tokens by it; for one token a few columns at a time, in registers, which takes half as
long. Sums are of float32 products in the order of their index, whatever is
computed together.
"""

from __future__ import annotations

import ctypes
from functools import partial
from operator import itemgetter

import numpy as np
import torch
from numba import types
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.emit import F32, V_F32, const_i32, fma, load, splat, store, switch
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.jit.simd import vector_intrinsic
from qoff.kernels.cpu.linear.dequantize import dequantize_block, rows_32
from qoff.kernels.cpu.linear.scales import ROW_BLOCK_BYTES, store_scales, width_of
from qoff.kernels.cpu.linear.scratch import SCALES_BYTES
from qoff.kernels.cpu.linear.tile import UNROLL, codes_32
from qoff.kernels.cpu.operands import check_dense, check_rows, fail, int64s, offsets
from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.packing import BITS, ROW_BLOCK
from qoff.kernels.layout.qtensor import QTensor

from . import scratch as sizes
from .product import product, tile_rows

_head_matrix_bytes = inner(sizes.head_matrix_bytes)


class LatentArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes; of the matrix as `dequantize` has them."""

    _fields_ = (
        *int64s(
            "x", "x_stride", "kv", "kv_stride", "norm", "tokens", "heads", "latent", "nope_dim",
            "rope_dim", "value_dim", "codes", "scale_min", "width", "group", "bits", "out",
            "out_stride", "scratch",
        ),
        ("eps", ctypes.c_float),
    )  # fmt: skip


(X, X_STRIDE, KV, KV_STRIDE, NORM, M, HEADS, LATENT, NOPE_DIM, ROPE_DIM, VALUE_DIM, CODES,
 SCALE_MIN, WIDTH, GROUP, BITS_OF, OUT, OUT_STRIDE, SCRATCH, EPS) = (
    offsets(LatentArguments)
)  # fmt: skip


def _columns(b, bits, codes, scales):
    """32 columns of a row block in their order, each a vector of 16 numbers float32."""
    scale, minimum = (load(b, scales, offset, V_F32) for offset in (0, 64))
    for _, quad in sorted(codes_32(b, codes, bits), key=itemgetter(0)):
        for i in range(4):
            byte = b.and_(b.lshr(quad, const_i32(8 * i)), const_i32(255))
            yield b.fadd(b.fmul(b.uitofp(byte, V_F32), scale), minimum)


def _emit_columns(b, bits, codes, scales, out):
    for column, value in enumerate(_columns(b, bits, codes, scales)):
        store(b, value, out, 64 * column)


def _emit_value(b, bits, codes, scales, x, out):
    total = load(b, out, 0, V_F32)
    for column, value in enumerate(_columns(b, bits, codes, scales)):
        total = fma(b, splat(b, load(b, x, 4 * column, F32), V_F32), value, total)
    store(b, total, out, 0)


def _emit_key(b, bits, codes, scales, x, out):
    totals = [load(b, out, offset, V_F32) for offset in (0, 64)]
    for row, values in enumerate(rows_32(b, bits, codes, scales)):
        number = splat(b, load(b, x, 4 * row, F32), V_F32)
        totals = [fma(b, number, *pair) for pair in zip(values, totals, strict=True)]
    for total, offset in zip(totals, (0, 64), strict=True):
        store(b, total, out, offset)


def _each_width(b, emit, bits, *operands):
    switch(b, bits, {each: partial(emit, b, each, *operands) for each in BITS})


@vector_intrinsic(types.void, *[types.int64] * 4)
def _columns_32(b, *operands):
    """Write 32 columns of 16 rows, [32, 16] float32; scales: of rows, as `store_scales` writes."""
    _each_width(b, _emit_columns, *operands)


@vector_intrinsic(types.void, *[types.int64] * 5)
def _value_32(b, *operands):
    """Add 32 columns of 16 rows, times 32 numbers at x, to 16 numbers at out."""
    _each_width(b, _emit_value, *operands)


@vector_intrinsic(types.void, *[types.int64] * 5)
def _key_32(b, *operands):
    """Add 16 rows of 32 columns, times 16 numbers at x, to 32 numbers at out."""
    _each_width(b, _emit_key, *operands)


@inner
def _block_of(args, row):
    """Addresses of the codes and of the scales of the row block that begins at a row."""
    k, block = simd.peek_i64(args + LATENT), row // ROW_BLOCK
    codes = simd.peek_i64(args + CODES) + block * 2 * k * simd.peek_i64(args + BITS_OF)
    groups = k // simd.peek_i64(args + GROUP)
    group_bytes = ROW_BLOCK_BYTES << simd.peek_i64(args + WIDTH)
    return codes, simd.peek_i64(args + SCALE_MIN) + block * groups * group_bytes


WRITE, KEYS, VALUES = range(3)  # what is done with a block of 16 rows


@inner
def _block(args, what, row, x, out, scratch):
    """The 16 rows from `row`, times the numbers at x if not WRITE. scratch: SCALES_BYTES.

    WRITE: [latent, 16] float32, as columns. KEYS: added to [latent]. VALUES: added to [16].
    """
    bits, width = simd.peek_i64(args + BITS_OF), simd.peek_i64(args + WIDTH)
    group = simd.peek_i64(args + GROUP)
    codes, scale_min = _block_of(args, row)
    for first in range(0, simd.peek_i64(args + LATENT), group):
        store_scales(bits, width, scale_min, scratch)
        scale_min += ROW_BLOCK_BYTES << width
        for column in range(first, first + group, UNROLL):
            if what == KEYS:
                _key_32(bits, codes, scratch, x, out + 4 * column)
            elif what == VALUES:
                _value_32(bits, codes, scratch, x + 4 * column, out)
            else:
                _columns_32(bits, codes, scratch, out + 64 * column)
            codes += 2 * bits * UNROLL


@inner
def _zero(address, count):
    """Write zeros, a multiple of 64 bytes."""
    for i in range(0, count, 64):
        simd.store_f32(address + i, simd.splat_f32(np.float32(0.0)))


@inner
def _copy_rope(args, source, key):
    """Put the channels that RoPE rotates, in halves, behind the latent ones of either half."""
    latent, half = simd.peek_i64(args + LATENT), simd.peek_i64(args + ROPE_DIM) // 2
    upper = 2 * (latent + 2 * half)
    for i in range(0, 4 * half, 4):
        simd.poke_f32(key + 2 * latent + i, simd.peek_f32(source + i))
        simd.poke_f32(key + upper + 2 * latent + i, simd.peek_f32(source + 4 * half + i))


@inner
def _keys(args):
    """The key of every token: its latent, normalized, and what RoPE rotates."""
    latent, heads = simd.peek_i64(args + LATENT), simd.peek_i64(args + HEADS)
    dim = latent + simd.peek_i64(args + ROPE_DIM)
    weight, eps = simd.peek_i64(args + NORM), simd.peek_f32(args + EPS)
    for token in range(simd.peek_i64(args + M)):
        x = simd.peek_i64(args + KV) + token * simd.peek_i64(args + KV_STRIDE)
        key = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE) + 4 * dim * heads
        total = simd.splat_f32(np.float32(0.0))
        for i in range(0, 4 * latent, 64):
            v = simd.load_f32(x + i)
            total = simd.mul_add(v, v, total)
        mean = simd.sum_f32(total) / np.float32(latent)
        factor = simd.splat_f32(np.float32(1.0) / np.sqrt(mean + eps))
        for i in range(0, 4 * latent, 64):
            v = simd.mul(simd.mul(simd.load_f32(x + i), factor), simd.load_f32(weight + i))
            to = key + i if i < 2 * latent else key + 2 * dim + i - 2 * latent
            simd.store_f32(to, v)
        _copy_rope(args, x + 4 * latent, key)


@inner
def _absorb_head(args, head, scratch):
    """Queries of a head times its matrix of keys."""
    latent, nope_dim = simd.peek_i64(args + LATENT), simd.peek_i64(args + NOPE_DIM)
    rope_dim, tokens = simd.peek_i64(args + ROPE_DIM), simd.peek_i64(args + M)
    dim, matrix = latent + rope_dim, scratch + SCALES_BYTES
    first = head * (nope_dim + simd.peek_i64(args + VALUE_DIM))
    for row in range(0, nope_dim, ROW_BLOCK):
        codes, scale_min = _block_of(args, first + row)
        dequantize_block(
            codes, scale_min, simd.peek_i64(args + WIDTH), simd.peek_i64(args + GROUP),
            simd.peek_i64(args + BITS_OF), latent, 0, matrix + 4 * latent * row, 4 * latent,
            scratch,
        )  # fmt: skip
    x_stride, out_stride = simd.peek_i64(args + X_STRIDE), simd.peek_i64(args + OUT_STRIDE)
    x = simd.peek_i64(args + X) + 4 * head * (nope_dim + rope_dim)
    out = simd.peek_i64(args + OUT) + 4 * head * dim
    done = 0
    while done < tokens:
        rows = tile_rows(tokens - done)
        for half in range(2):
            product(
                4, rows, x, x_stride, matrix + 2 * latent * half, 64, 4 * latent, latent // 32,
                nope_dim, out + 2 * dim * half, out_stride, 0, np.float32(1.0),
            )  # fmt: skip
        for row in range(rows):
            _copy_rope(args, x + row * x_stride + 4 * nope_dim, out + row * out_stride)
        x, out, done = x + rows * x_stride, out + rows * out_stride, done + rows


@inner
def _absorb_one(args, head, scratch):
    """The query of a head, of one token, times its matrix of keys, which is not written."""
    latent, nope_dim = simd.peek_i64(args + LATENT), simd.peek_i64(args + NOPE_DIM)
    rope_dim, found = simd.peek_i64(args + ROPE_DIM), scratch + SCALES_BYTES
    first = head * (nope_dim + simd.peek_i64(args + VALUE_DIM))
    x = simd.peek_i64(args + X) + 4 * head * (nope_dim + rope_dim)
    out = simd.peek_i64(args + OUT) + 4 * head * (latent + rope_dim)
    _zero(found, 4 * latent)
    for row in range(0, nope_dim, ROW_BLOCK):
        _block(args, KEYS, first + row, x + 4 * row, found, scratch)
    for i in range(0, 2 * latent, 64):
        simd.store_f32(out + i, simd.load_f32(found + i))
        upper = simd.load_f32(found + 2 * latent + i)
        simd.store_f32(out + 2 * (latent + rope_dim) + i, upper)
    _copy_rope(args, x + 4 * nope_dim, out)


@inner
def _expand_one(args, head, scratch):
    """What a head found for one token times its matrix of values, which is not written."""
    nope_dim, value_dim = simd.peek_i64(args + NOPE_DIM), simd.peek_i64(args + VALUE_DIM)
    first = head * (nope_dim + value_dim) + nope_dim
    x = simd.peek_i64(args + X) + 4 * head * simd.peek_i64(args + LATENT)
    out = simd.peek_i64(args + OUT) + 4 * head * value_dim
    _zero(out, 4 * value_dim)
    for row in range(0, value_dim, ROW_BLOCK):
        _block(args, VALUES, first + row, x, out + 4 * row, scratch)


@inner
def _expand_head(args, head, scratch):
    """What a head found times its matrix of values."""
    latent, nope_dim = simd.peek_i64(args + LATENT), simd.peek_i64(args + NOPE_DIM)
    value_dim, tokens = simd.peek_i64(args + VALUE_DIM), simd.peek_i64(args + M)
    matrix, first = scratch + SCALES_BYTES, head * (nope_dim + value_dim) + nope_dim
    for row in range(0, value_dim, ROW_BLOCK):
        _block(args, WRITE, first + row, 0, matrix + 4 * latent * row, scratch)
    x_stride, out_stride = simd.peek_i64(args + X_STRIDE), simd.peek_i64(args + OUT_STRIDE)
    x = simd.peek_i64(args + X) + 4 * head * latent
    out = simd.peek_i64(args + OUT) + 4 * head * value_dim
    done = 0
    while done < tokens:
        rows = tile_rows(tokens - done)
        product(
            4, rows, x, x_stride, matrix, 64 * latent, 64, value_dim // 16, latent, out, out_stride,
            0, np.float32(1.0),
        )  # fmt: skip
        x, out, done = x + rows * x_stride, out + rows * out_stride, done + rows


@inner
def _scratch_of(args, thread):
    """What a thread has for a head's matrix."""
    rows = max(simd.peek_i64(args + NOPE_DIM), simd.peek_i64(args + VALUE_DIM))
    each = _head_matrix_bytes(simd.peek_i64(args + LATENT), rows)
    return simd.peek_i64(args + SCRATCH) + thread * each


@job
def absorb_job(pool, thread, threads, args):
    """Keys, then all heads."""
    heads, scratch = simd.peek_i64(args + HEADS), _scratch_of(args, thread)
    item = take(pool, 0)
    while item <= heads:
        if item == 0:
            _keys(args)
        elif simd.peek_i64(args + M) == 1:
            _absorb_one(args, item - 1, scratch)
        else:
            _absorb_head(args, item - 1, scratch)
        item = take(pool, 0)


@job
def expand_job(pool, thread, threads, args):
    """All heads."""
    heads, scratch = simd.peek_i64(args + HEADS), _scratch_of(args, thread)
    item = take(pool, 0)
    while item < heads:
        if simd.peek_i64(args + M) == 1:
            _expand_one(args, item, scratch)
        else:
            _expand_head(args, item, scratch)
        item = take(pool, 0)


def absorb(
    q: Tensor,
    kv: Tensor,
    weight: QTensor,
    norm: Norm,
    shape: LatentShape,
    *,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """What attention to latents is given: see `reference.latent.absorb`.

    q, kv, out: float32, rows contiguous. weight: packing rows16. Raises OpError.
    """
    op = "absorb"
    tokens, pool = len(q), pool or default_pool()
    if out is None:
        out = torch.empty(tokens, (shape.heads + 1) * shape.head_dim)
    check_rows(op, "q", q, tokens, shape.heads * shape.query_dim)
    check_rows(op, "kv", kv, tokens, shape.head_dim)
    check_rows(op, "out", out, tokens, (shape.heads + 1) * shape.head_dim)
    check_dense(op, "norm", norm.weight, (shape.latent,))
    if norm.centered or norm.bias is not None:
        fail(op, "latents have an RMSNorm without a bias")
    arguments = _arguments(op, q, weight, shape, out)
    arguments.kv, arguments.kv_stride = kv.data_ptr(), 4 * kv.stride(0)
    arguments.norm, arguments.eps = norm.weight.data_ptr(), norm.eps
    _run(pool, absorb_job.address, arguments, shape)
    return out


def expand(
    x: Tensor,
    weight: QTensor,
    shape: LatentShape,
    *,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Values of each head from the latents it found: see `reference.latent.expand`.

    x, out: float32, rows contiguous. weight: packing rows16. Raises OpError.
    """
    op, tokens, pool = "expand", len(x), pool or default_pool()
    if out is None:
        out = torch.empty(tokens, shape.heads * shape.value_dim)
    check_rows(op, "x", x, tokens, shape.heads * shape.latent)
    check_rows(op, "out", out, tokens, shape.heads * shape.value_dim)
    _run(pool, expand_job.address, _arguments(op, x, weight, shape, out), shape)
    return out


def _arguments(
    op: str, x: Tensor, weight: QTensor, shape: LatentShape, out: Tensor
) -> LatentArguments:
    if weight.packing != "rows16" or not weight.codes.is_cpu:
        fail(op, f"packing rows16 on the CPU, not {weight.packing} on {weight.device}")
    if weight.shape != (shape.rows, shape.latent):
        fail(op, f"a matrix [{shape.rows}, {shape.latent}], not {list(weight.shape)}")
    return LatentArguments(
        x=x.data_ptr(), x_stride=4 * x.stride(0), tokens=len(x), heads=shape.heads,
        latent=shape.latent, nope_dim=shape.nope_dim, rope_dim=shape.rope_dim,
        value_dim=shape.value_dim, codes=weight.codes.data_ptr(),
        scale_min=weight.scale_min.data_ptr(), width=width_of(weight.scale_min.dtype),
        group=weight.group_size, bits=weight.bits,
        out=out.data_ptr(), out_stride=4 * out.stride(0),
    )  # fmt: skip


def _run(pool: Pool, address: int, arguments: LatentArguments, shape: LatentShape) -> None:
    if not arguments.tokens:
        return
    with pool.lock:
        arguments.scratch = pool.workspace(sizes.latent_bytes(pool.threads, shape))
        pool.run(address, arguments)
