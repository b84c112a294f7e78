"""The quantized linear op on the CPU: RMSNorm, matmul, bias, SiLU gate and residual in one job.

Weights are packed `rows16`; activations become 16-bit integers per group (error 2**-16 of the
group's largest value, finer than bfloat16), or 8-bit ones on request, so the matmul itself is exact
integer arithmetic on `vpdpbusd` where the processor has it. See `tile` for the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, check_rows, fail
from qoff.kernels.layout.qtensor import QTensor

from .job import SCRATCH_BYTES, LinearArguments, linear_job

_OP = "w4_linear"


def _arguments(weight: QTensor, pool: Pool) -> LinearArguments:
    """The job's arguments with what the weight fixes filled in; kept with the weight."""
    codes, scale_min = weight.codes.data_ptr(), weight.scale_min.data_ptr()
    kept = weight.__dict__.get(pool.key)
    if kept is not None and kept.codes == codes and kept.scale_min == scale_min:
        return kept
    if weight.packing != "rows16":
        fail(
            _OP,
            f"the CPU kernel needs packing rows16, not {weight.packing}; repack it first",
        )
    if not weight.codes.is_cpu:
        fail(_OP, f"the weight is on {weight.device}, not on the CPU")
    arguments = LinearArguments(
        n=weight.shape[0],
        k=weight.shape[1],
        codes=codes,
        scale_min=scale_min,
        wide=weight.scale_min.dtype == torch.float32,
        group=weight.group_size,
        bits=weight.bits,
    )
    weight.__dict__[pool.key] = arguments
    return arguments


def w4_linear(
    x: Tensor,
    weight: QTensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    activation_bits: int = 16,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """y = f(norm(x) @ W.T + bias) + residual, computed on the packed weight.

    x: float32 [M, K], rows contiguous. weight: QTensor [N, K], packing rows16, 4 or 8 bits.
    norm: float32 [K], RMSNorm weight applied to x first, with eps. bias: float32 [N].
    silu_mul: rows of W alternate 16 of gate and 16 of up, and f(z) = silu(gate) * up of width N/2.
    activation_bits: 16, or 8, which is up to twice as fast for many tokens and rounds each group
    of x to 255 levels (llama.cpp computes so).
    residual, out: float32 [M, N] (or N/2); out may be residual or x itself. Returns out.
    Raises OpError for any other dtype, shape, stride or packing.
    """
    pool = pool or default_pool()
    a = _arguments(weight, pool)
    n, k = weight.shape
    if x.dim() != 2:
        fail(_OP, f"x must be [M, K], not {list(x.shape)}")
    tokens = x.shape[0]
    check_rows(_OP, "x", x, tokens, k)
    if silu_mul and n % 32:
        fail(_OP, f"silu_mul needs a multiple of 32 rows, not {n}")
    columns = n // 2 if silu_mul else n
    if out is None:
        out = torch.empty(tokens, columns)
    check_rows(_OP, "out", out, tokens, columns)
    if norm is not None:
        check_dense(_OP, "norm", norm, (k,))
    if bias is not None:
        check_dense(_OP, "bias", bias, (n,))
    if residual is not None:
        check_rows(_OP, "residual", residual, tokens, columns)
    if activation_bits not in (8, 16):
        fail(_OP, f"activation_bits is 8 or 16, not {activation_bits}")
    if tokens == 0:
        return out
    groups = k // weight.group_size
    with pool.lock:
        a.x, a.x_stride, a.tokens = x.data_ptr(), 4 * x.stride(0), tokens
        a.norm, a.eps, a.bias = address(norm), eps, address(bias)
        a.residual = address(residual)
        a.residual_stride = 4 * residual.stride(0) if residual is not None else 0
        a.planes = activation_bits // 8
        a.silu_mul, a.out, a.out_stride = silu_mul, out.data_ptr(), 4 * out.stride(0)
        a.scratch = pool.workspace(pool.threads * SCRATCH_BYTES + tokens * (8 * groups + 2 * k))
        a.scales = a.scratch + pool.threads * SCRATCH_BYTES
        a.high = a.scales + tokens * 8 * groups
        a.low = a.high + tokens * k
        pool.run(linear_job.address, a)
    return out
