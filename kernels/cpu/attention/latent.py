"""The products of multi-head latent attention with each head's matrices, one head after another.

A thread dequantizes the matrix of a head, which fits its second-level cache, and multiplies the
rows of all tokens by it. Sums are of float32 products in the order of their index, whatever is
computed together.
"""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
import torch
from numba import types
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.emit import V_F32, const_i32, load, store, switch
from qoff.kernels.cpu.jit.pool import Pool, default_pool, take
from qoff.kernels.cpu.jit.simd import vector_intrinsic
from qoff.kernels.cpu.linear.dequantize import dequantize_block
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


def _emit_columns(b, bits, codes, scales, out):
    """32 columns of a row block, each a vector of 16 rows."""
    scale, minimum = (load(b, scales, offset, V_F32) for offset in (0, 64))
    for first, quad in codes_32(b, codes, bits):
        for i in range(4):
            byte = b.and_(b.lshr(quad, const_i32(8 * i)), const_i32(255))
            value = b.fadd(b.fmul(b.uitofp(byte, V_F32), scale), minimum)
            store(b, value, out, 64 * (first + i))


@vector_intrinsic(types.void, *[types.int64] * 4)
def _columns_32(b, bits, *operands):
    """Write 32 columns of 16 rows, [32, 16] float32; scales: of rows, as `store_scales` writes."""
    cases = {each: partial(_emit_columns, b, each, *operands) for each in BITS}
    switch(b, bits, cases)


@inner
def _columns(codes, scale_min, width, group, bits, k, out, scratch):
    """A block of 16 rows as [k, 16] float32; scratch: SCALES_BYTES."""
    for first in range(0, k, group):
        store_scales(bits, width, scale_min + first // group * (ROW_BLOCK_BYTES << width), scratch)
        for column in range(first, first + group, UNROLL):
            _columns_32(bits, codes + 2 * bits * column, scratch, out + 64 * column)


@inner
def _block_of(args, row):
    """Addresses of the codes and of the scales of the row block that begins at a row."""
    k, block = simd.peek_i64(args + LATENT), row // ROW_BLOCK
    codes = simd.peek_i64(args + CODES) + block * 2 * k * simd.peek_i64(args + BITS_OF)
    groups = k // simd.peek_i64(args + GROUP)
    group_bytes = ROW_BLOCK_BYTES << simd.peek_i64(args + WIDTH)
    return codes, simd.peek_i64(args + SCALE_MIN) + block * groups * group_bytes


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
def _expand_head(args, head, scratch):
    """What a head found times its matrix of values."""
    latent, nope_dim = simd.peek_i64(args + LATENT), simd.peek_i64(args + NOPE_DIM)
    value_dim, tokens = simd.peek_i64(args + VALUE_DIM), simd.peek_i64(args + M)
    matrix, first = scratch + SCALES_BYTES, head * (nope_dim + value_dim) + nope_dim
    for row in range(0, value_dim, ROW_BLOCK):
        codes, scale_min = _block_of(args, first + row)
        _columns(
            codes, scale_min, simd.peek_i64(args + WIDTH), simd.peek_i64(args + GROUP),
            simd.peek_i64(args + BITS_OF), latent, matrix + 4 * latent * row, scratch,
        )  # fmt: skip
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
        else:
            _absorb_head(args, item - 1, scratch)
        item = take(pool, 0)


@job
def expand_job(pool, thread, threads, args):
    """All heads."""
    heads, scratch = simd.peek_i64(args + HEADS), _scratch_of(args, thread)
    item = take(pool, 0)
    while item < heads:
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
