"""The quantized linear op on the CPU: RMSNorm, matmul, bias, SiLU gate and residual in one job.

Weights are packed `cpu16`; activations become 16-bit integers per group (error 2**-16 of the
group's largest value, finer than bfloat16), so the matmul itself is exact integer arithmetic on
`vpdpbusd` where the processor has it. See `tile` for the formula.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qoff.errors import OpError

from ..qtensor import QTensor
from . import linear_job as field
from .pool import Pool, default_pool


def _fail(message: str) -> None:
    raise OpError(f"w4_linear: {message}")


def _check_vector(name: str, value: Tensor, length: int) -> None:
    if value.dtype != torch.float32 or value.shape != (length,) or not value.is_contiguous():
        _fail(
            f"{name} must be contiguous float32 [{length}], not {value.dtype} {list(value.shape)}"
        )


def _check_matrix(name: str, value: Tensor, rows: int, columns: int) -> None:
    if value.dtype != torch.float32 or value.shape != (rows, columns) or value.stride(1) != 1:
        _fail(
            f"{name} must be float32 [{rows}, {columns}] with contiguous rows, "
            f"not {value.dtype} {list(value.shape)} of strides {list(value.stride())}"
        )


class _Arguments:
    """The job's arguments for one weight: what the weight fixes is filled in once."""

    def __init__(self, weight: QTensor) -> None:
        if weight.packing != "cpu16":
            _fail(f"the CPU kernel needs packing cpu16, not {weight.packing}; repack it first")
        if weight.codes.device.type != "cpu":
            _fail(f"the weight is on {weight.codes.device}, not on the CPU")
        self.fields = (ctypes.c_int64 * field.FIELDS)()
        self.address = ctypes.addressof(self.fields)
        self.floats = (ctypes.c_float * 2).from_buffer(self.fields, field.EPS)
        self.set(field.N, weight.shape[0])
        self.set(field.K, weight.shape[1])
        self.set(field.CODES, weight.codes.data_ptr())
        self.set(field.SCALE_MIN, weight.scale_min.data_ptr())
        self.set(field.WIDE, int(weight.scale_min.dtype == torch.float32))
        self.set(field.GROUP, weight.group_size)
        self.set(field.BITS, weight.bits)

    def set(self, field: int, value: int) -> None:
        self.fields[field >> 3] = value


def _arguments(weight: QTensor) -> _Arguments:
    """The weight's cached arguments (the tensors' addresses do not change while it lives)."""
    cached = weight.__dict__.get("_cpu_arguments")
    if cached is None:
        cached = _Arguments(weight)
        weight.__dict__["_cpu_arguments"] = cached
    return cached


def _workspace_bytes(tokens: int, k: int, group: int, threads: int) -> int:
    return threads * field.SCRATCH_BYTES + 2 * tokens * k + 8 * tokens * (k // group)


def w4_linear(
    x: Tensor,
    weight: QTensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """y = f(norm(x) @ W.T + bias) + residual, computed on the packed weight.

    x: float32 [M, K], rows contiguous. weight: QTensor [N, K], packing cpu16, 4 or 8 bits.
    norm: float32 [K], RMSNorm weight applied to x first, with eps. bias: float32 [N].
    silu_mul: rows of W alternate 16 of gate and 16 of up, and f(z) = silu(gate) * up of width N/2.
    residual, out: float32 [M, N] (or N/2); out may be residual or x itself. Returns out.
    Raises OpError for any other dtype, shape, stride or packing.
    """
    arguments = _arguments(weight)
    n, k = weight.shape
    if x.dim() != 2:
        _fail(f"x must be [M, K], not {list(x.shape)}")
    tokens = x.shape[0]
    _check_matrix("x", x, tokens, k)
    if silu_mul and n % 32:
        _fail(f"silu_mul needs a multiple of 32 rows, not {n}")
    columns = n // 2 if silu_mul else n
    if out is None:
        out = torch.empty(tokens, columns)
    _check_matrix("out", out, tokens, columns)
    if norm is not None:
        _check_vector("norm", norm, k)
    if bias is not None:
        _check_vector("bias", bias, n)
    if residual is not None:
        _check_matrix("residual", residual, tokens, columns)
    if tokens == 0:
        return out
    pool = pool or default_pool()
    with pool.lock:
        a = arguments.fields
        a[field.X >> 3], a[field.X_STRIDE >> 3], a[field.M >> 3] = (
            x.data_ptr(),
            4 * x.stride(0),
            tokens,
        )
        a[field.NORM >> 3] = norm.data_ptr() if norm is not None else 0
        arguments.floats[0] = eps
        a[field.BIAS >> 3] = bias.data_ptr() if bias is not None else 0
        a[field.RESIDUAL >> 3] = residual.data_ptr() if residual is not None else 0
        a[field.RESIDUAL_STRIDE >> 3] = 4 * residual.stride(0) if residual is not None else 0
        a[field.SILU_MUL >> 3] = silu_mul
        a[field.OUT >> 3], a[field.OUT_STRIDE >> 3] = out.data_ptr(), 4 * out.stride(0)
        planes = tokens * k
        scratch = pool.workspace(_workspace_bytes(tokens, k, weight.group_size, pool.threads))
        a[field.SCRATCH >> 3] = scratch
        a[field.SCALES >> 3] = scratch = scratch + pool.threads * field.SCRATCH_BYTES
        a[field.HIGH >> 3] = scratch = scratch + 8 * tokens * (k // weight.group_size)
        a[field.LOW >> 3] = scratch + planes
        pool.run(field.linear_job.address, arguments.address)
    return out
