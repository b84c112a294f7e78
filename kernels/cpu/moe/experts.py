"""The MLP of a mixture of experts on the CPU: two jobs on the pool, whatever is chosen.

Weights are packed `rows16`, activations quantized as in `w4_linear`. The first job sorts the pairs
of a token and an expert and computes their activations, the second projects them down and sums.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.linear.activation import NUMBERS
from qoff.kernels.cpu.linear.scales import width_of
from qoff.kernels.cpu.operands import address, check_dense, check_rows, fail
from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts

from .job import ExpertsArguments, MatrixArguments, down_job, gate_up_job
from .scratch import ExpertSizes

_OP = "experts"


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    mlp: ExpertsMlp,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    of: tuple[int, int] | None = None,
    activation_bits: int = 16,
    pool: Pool | None = None,
) -> Tensor:
    """Return residual + sum over t of topk_weights * (down @ f(gate_up @ x + bias) + bias), [M, H].

    Where `mlp.weighs_input`, topk_weights multiply x in place of the outputs.
    x, residual, out: float32 [M, H], rows contiguous; out may be the residual, but not x. topk_ids:
    contiguous int64 [M, T], numbers of experts; topk_weights: contiguous float32 [M, T]. mlp:
    packing rows16; biases float32. activation_bits: 16 or 8, as for `w4_linear`. What a pair of a
    token and an expert gets depends on no other one, so `of` changes nothing. Raises OpError.
    """
    pool = pool or default_pool()
    _check(x, topk_ids, topk_weights, mlp)
    if activation_bits not in (8, 16):
        fail(_OP, f"activation_bits is 8 or 16, not {activation_bits}")
    if out is None:
        out = torch.empty(x.shape)
    for name, tensor in (("out", out), ("residual", residual)):
        if tensor is not None:
            check_rows(_OP, name, tensor, *x.shape)
    a = ExpertsArguments(
        gate_up=_matrix(mlp.gate_up, mlp.gate_up_bias),
        down=_matrix(mlp.down, mlp.down_bias),
        x_stride=4 * x.stride(0),
        per_token=topk_ids.shape[1],
        experts=mlp.gate_up.count,
        activation=NUMBERS[mlp.activation],
        weighs_input=mlp.weighs_input,
        gated=mlp.gated,
        limit=mlp.limit,
        residual_stride=0 if residual is None else 4 * residual.stride(0),
        out_stride=4 * out.stride(0),
        planes=activation_bits // 8,
    )
    groups = mlp.gate_up.group_size, mlp.down.group_size
    sizes = ExpertSizes(a.gate_up.k, a.down.k, a.down.n, groups)
    together = sizes.together(a.per_token)
    with pool.lock:
        for first in range(0, len(x), together):
            rows = slice(first, first + together)
            a.tokens = min(together, len(x) - first)
            a.x, a.out = x[rows].data_ptr(), out[rows].data_ptr()
            a.residual = 0 if residual is None else residual[rows].data_ptr()
            a.topk_ids, a.topk_weights = topk_ids[rows].data_ptr(), topk_weights[rows].data_ptr()
            _place(a, sizes, pool)
            pool.run(gate_up_job.address, a)
            pool.catch_up()
            if ctypes.c_int64.from_address(a.sorted).value == 0:
                low, high = (int(i) for i in topk_ids[rows].aminmax())
                fail(_OP, f"experts {low} to {high} are chosen, but there are 0 to {a.experts - 1}")
            pool.run(down_job.address, a)
    return out


def _matrix(weight: QExperts, bias: Tensor | None) -> MatrixArguments:
    codes_stride, scale_min_stride = weight.strides
    return MatrixArguments(
        n=weight.shape[0],
        k=weight.shape[1],
        codes=weight.codes.data_ptr(),
        codes_stride=codes_stride,
        scale_min=weight.scale_min.data_ptr(),
        scale_min_stride=scale_min_stride,
        width=width_of(weight.scale_min.dtype),
        group=weight.group_size,
        bits=weight.bits,
        bias=address(bias),
    )


def _place(a: ExpertsArguments, sizes: ExpertSizes, pool: Pool) -> None:
    """Give each array of the jobs its place in the pool's workspace."""
    pairs = a.tokens * a.per_token
    arrays = sizes.arrays(pool.threads, a.tokens, a.per_token, a.experts)
    start = pool.workspace(sum(arrays.values()))
    places = dict(zip(arrays, accumulate(arrays.values(), initial=start), strict=False))
    inputs = (a.gate_up, places["weighted"]), (a.down, places.pop("quantized"))
    for name, at in places.items():
        setattr(a, name, at)
    for matrix, at in inputs:
        matrix.scales = at
        matrix.high = at + 8 * (matrix.k // matrix.group) * pairs
        matrix.low = matrix.high + matrix.k * pairs


def _check(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, mlp: ExpertsMlp) -> None:
    """Raise OpError for operands whose addresses the jobs cannot take."""
    for name, weight, bias in (
        ("gate_up", mlp.gate_up, mlp.gate_up_bias),
        ("down", mlp.down, mlp.down_bias),
    ):
        if weight.packing != "rows16":
            fail(_OP, f"{name} needs packing rows16, not {weight.packing}; repack it first")
        if not weight.codes.is_cpu:
            fail(_OP, f"{name} is on {weight.device}, not on the CPU")
        if bias is not None:
            check_dense(_OP, f"{name}_bias", bias, (weight.count, weight.shape[0]))
    if x.dim() != 2:
        fail(_OP, f"x must be [M, H], not {list(x.shape)}")
    check_rows(_OP, "x", x, x.shape[0], mlp.gate_up.shape[1])
    if topk_ids.dim() != 2 or len(topk_ids) != len(x) or topk_ids.shape[1] < 1:
        fail(
            _OP, f"topk_ids must be [M, T] with M = {len(x)} and T > 0, not {list(topk_ids.shape)}"
        )
    if topk_ids.dtype != torch.int64 or not topk_ids.is_cpu or not topk_ids.is_contiguous():
        fail(_OP, f"topk_ids must be contiguous int64 on the CPU, not {topk_ids.dtype}")
    check_dense(_OP, "topk_weights", topk_weights, tuple(topk_ids.shape))
