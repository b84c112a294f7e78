"""The quantized linear op on the CPU: norm, matmul and all that follows it in one job.

Weights are packed `rows16`; activations become 16-bit integers per group (error 2**-16 of the
group's largest value, finer than bfloat16), or 8-bit ones on request, so the matmul itself is exact
integer arithmetic on `vpdpbusd` where the processor has it. See `tile` for the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, check_rows, fail
from qoff.kernels.layout.ending import ACTIVATIONS, PLAIN, XIELU, Ending, Norm
from qoff.kernels.layout.qtensor import QTensor

from .activation import NUMBERS
from .job import LinearArguments, linear_job
from .norm import set_norm, set_rows
from .scales import width_of
from .scratch import TILE_BYTES, linear_bytes

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
        width=width_of(weight.scale_min.dtype),
        group=weight.group_size,
        bits=weight.bits,
    )
    weight.__dict__[pool.key] = arguments
    return arguments


def w4_linear(
    x: Tensor,
    weight: QTensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    end: Ending = PLAIN,
    activation_bits: int = 16,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """y = norm(x) @ W.T + bias, with what `end` says of it, computed on the packed weight.

    x: float32 [M, K], rows contiguous. weight: QTensor [N, K], packing rows16.
    norm: float32, applied to x first. bias: float32 [N], or [M, N]. activation_bits: 16, or 8,
    which is up to twice as fast for many tokens and rounds each group of x to 255 levels (llama.cpp
    computes so).
    residual, out: float32 [M, N] (or N/2, where gated); out may be residual or x itself. Returns
    out. Raises OpError for any other dtype, shape, stride or packing, and for a score or a soft cap
    behind a norm or a gate.
    """
    pool = pool or default_pool()
    a = _arguments(weight, pool)
    n, k = weight.shape
    if x.dim() != 2:
        fail(_OP, f"x must be [M, K], not {list(x.shape)}")
    tokens = x.shape[0]
    check_rows(_OP, "x", x, tokens, k)
    if end.gated and n % 32:
        fail(_OP, f"a gate needs a multiple of 32 rows, not {n}")
    columns = n // 2 if end.gated else n
    if out is None:
        out = torch.empty(tokens, columns)
    check_rows(_OP, "out", out, tokens, columns)
    if bias is not None:
        check_dense(_OP, "bias", bias, (tokens, n) if bias.dim() == 2 else (n,))
    if residual is not None:
        check_rows(_OP, "residual", residual, tokens, columns)
    if activation_bits not in (8, 16):
        fail(_OP, f"activation_bits is 8 or 16, not {activation_bits}")
    if tokens == 0:
        return out
    groups = k // weight.group_size
    with pool.lock:
        a.x, a.x_stride, a.tokens = x.data_ptr(), 4 * x.stride(0), tokens
        set_norm(_OP, a.norm, norm, k)
        a.bias, a.planes = address(bias), activation_bits // 8
        a.bias_stride = 4 * n if bias is not None and bias.dim() == 2 else 0
        into, residual = _set_end(a, end, residual, out)
        a.residual = address(residual)
        a.residual_stride = 4 * residual.stride(0) if residual is not None else 0
        a.out, a.out_stride = into.data_ptr(), 4 * into.stride(0)
        nbytes = linear_bytes(pool.threads, tokens, k, weight.group_size, normed=norm is not None)
        a.scratch = pool.workspace(nbytes)
        a.normed = a.scratch + pool.threads * TILE_BYTES
        a.scales = a.normed + (0 if norm is None else pool.threads * 4 * k)
        a.high = a.scales + tokens * 8 * groups
        a.low = a.high + tokens * k
        pool.run(linear_job.address, a)
    return out


def _set_end(
    a: LinearArguments, end: Ending, residual: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Fill in what follows the product; where its tiles go, and the residual they are added to."""
    a.gated = a.activation = a.more = a.row_norms = 0
    if end is PLAIN:
        return out, residual
    if end.activation:
        known = (*ACTIVATIONS, XIELU)
        if end.activation not in known:
            fail(_OP, f"unknown activation {end.activation!r}; known are {', '.join(known)}")
        a.activation = NUMBERS[end.activation]
    if (end.activation == XIELU) != (end.xielu is not None) or (end.xielu and end.gated):
        fail(_OP, "xielu has numbers of its own and no gate, and others have no numbers")
    if end.xielu is not None:
        a.xielu = tuple(end.xielu)
    of_tiles = end.by_element
    special = of_tiles._replace(activation="", gated=False, limit=0.0, xielu=None) != PLAIN
    late = end.score is not None or end.soft_cap
    if (special and end.gated) or (end.post_norm and late):
        fail(_OP, "scale, score and soft cap do not follow a gate, nor the last two a norm")
    if end.limit and not end.gated:
        fail(_OP, "a limit is of gate and up, and there is no gate")
    if end.sum_scale != 1 and end.post_norm is None:
        fail(_OP, "a sum is scaled behind a norm only")
    if of_tiles.score is not None:
        check_rows(_OP, "score", of_tiles.score, len(out), 1)
        if not of_tiles.score.is_contiguous():
            fail(_OP, "score must be contiguous")
    a.gated, a.more = end.gated, special or (end.activation != "" and not end.gated)
    a.score, a.scale, a.soft_cap = address(of_tiles.score), of_tiles.scale, of_tiles.soft_cap
    a.limit = end.limit
    by = end.post_norm or end.sum_norm
    if by is None:
        return out, residual
    if end.post_norm and end.sum_norm:
        fail(_OP, "there is one norm of whole rows, not two")
    a.row_norms = True
    into = torch.empty(out.shape)
    scales = (end.scale, end.sum_scale) if end.post_norm else (1.0, 1.0)
    set_rows(_OP, a.rows, into, by, scales, residual if end.post_norm else None, out)
    return into, None if end.post_norm else residual
