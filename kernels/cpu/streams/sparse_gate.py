"""Gates of which few numbers are left on the CPU: `reference.streams.sparse_gate`."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.linear.activation import NUMBERS, gated
from qoff.kernels.cpu.operands import check_rows, fail, int64s, offsets


class SparseGateArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes."""

    _fields_ = (
        *int64s("z", "z_stride", "out", "out_stride", "tokens", "k", "activation"),
        ("deviations", ctypes.c_float),
    )


Z, Z_STRIDE, OUT, OUT_STRIDE, M, K, ACTIVATION, DEVIATIONS = offsets(SparseGateArguments)


@inner
def _cut(args, z):
    """The mean of a row of gate, and so many standard deviations."""
    k = simd.peek_i64(args + K)
    total = simd.splat_f32(np.float32(0.0))
    for i in range(0, 8 * k, 128):
        total = simd.add(simd.load_f32(z + i), total)
    mean = simd.sum_f32(total) / np.float32(k)
    less = simd.splat_f32(-mean)
    total = simd.splat_f32(np.float32(0.0))
    for i in range(0, 8 * k, 128):
        v = simd.add(simd.load_f32(z + i), less)
        total = simd.mul_add(v, v, total)
    deviation = np.sqrt(simd.sum_f32(total) / np.float32(k))
    return mean + deviation * simd.peek_f32(args + DEVIATIONS)


@job
def sparse_gate_job(pool, thread, threads, args):
    """Token by token."""
    end, kind = 4 * simd.peek_i64(args + K), simd.peek_i64(args + ACTIVATION)
    none = np.float32(0.0)
    zero = simd.splat_f32(none)
    token = take(pool, 0)
    while token < simd.peek_i64(args + M):
        z = simd.peek_i64(args + Z) + token * simd.peek_i64(args + Z_STRIDE)
        out = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE)
        less = simd.splat_f32(-_cut(args, z))
        for i in range(0, end, 64):
            gate = simd.maximum(zero, simd.add(simd.load_f32(z + 2 * i), less))
            simd.store_f32(out + i, gated(kind, none, gate, simd.load_f32(z + 2 * i + 64)))
        token = take(pool, 0)


def sparse_gate(
    z: Tensor, deviations: float, activation: str, *, out: Tensor | None = None
) -> Tensor:
    """See `reference.streams.sparse_gate`; float32, rows contiguous. Raises OpError."""
    tokens, inner_size = len(z), z.shape[1] // 2
    if z.shape[1] % 32:
        fail("sparse_gate", f"rows of a multiple of 32 numbers, not {z.shape[1]}")
    if out is None:
        out = torch.empty(tokens, inner_size)
    check_rows("sparse_gate", "z", z, tokens, 2 * inner_size)
    check_rows("sparse_gate", "out", out, tokens, inner_size)
    if tokens:
        default_pool().run(
            sparse_gate_job.address,
            SparseGateArguments(
                z.data_ptr(), 4 * z.stride(0), out.data_ptr(), 4 * out.stride(0), tokens,
                inner_size, NUMBERS[activation], deviations,
            ),
        )  # fmt: skip
    return out
