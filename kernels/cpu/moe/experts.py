"""The MLP of a mixture of experts on the CPU: two jobs on the pool, whatever is chosen.

Weights are packed `rows16`, activations quantized as in `w4_linear`. The first job sorts the pairs
of a token and an expert and computes their activations, the second projects them down and sums.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import address, check_dense, check_rows, fail
from qoff.kernels.layout.qexperts import ACTIVATIONS, QExperts, check_mlp

from .job import (
    SCRATCH_BYTES,
    SEGMENT_BYTES,
    ExpertsArguments,
    MatrixArguments,
    down_job,
    gate_up_job,
)

_OP = "experts"
_WORKSPACE_BYTES = 64 << 20  # more tokens than this has room for go one part after the other


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: QExperts,
    down: QExperts,
    *,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation_bits: int = 16,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """residual + sum over t of weight * (down @ f(gate_up @ x + bias) + bias), packed matrices.

    x: float32 [M, H], rows contiguous. topk_ids: contiguous int64 [M, T], numbers of experts;
    topk_weights: contiguous float32 [M, T]. gate_up: E x [2I, H], rows in blocks of 16 of gate and
    of up in turn; down: E x [H, I]; packing rows16. activation: f, see
    `reference.experts.activate`. Biases: float32 [E, 2I] in the order of the rows, and [E, H].
    residual, out: float32 [M, H], rows contiguous; out may be residual or x itself.
    activation_bits: 16 or 8, as for `w4_linear`. What a token gets depends on no other token.
    Returns out. Raises OpError.
    """
    pool = pool or default_pool()
    check_mlp(gate_up, down, activation)
    _check(x, topk_ids, topk_weights, gate_up, down, gate_up_bias, down_bias)
    tokens, hidden = x.shape
    if out is None:
        out = torch.empty(tokens, hidden)
    check_rows(_OP, "out", out, tokens, hidden)
    if residual is not None:
        check_rows(_OP, "residual", residual, tokens, hidden)
    if activation_bits not in (8, 16):
        fail(_OP, f"activation_bits is 8 or 16, not {activation_bits}")
    a = ExpertsArguments(
        gate_up=_matrix(gate_up, gate_up_bias),
        down=_matrix(down, down_bias),
        x_stride=4 * x.stride(0),
        per_token=topk_ids.shape[1],
        experts=gate_up.count,
        activation=ACTIVATIONS.index(activation),
        residual_stride=4 * residual.stride(0) if residual is not None else 0,
        out_stride=4 * out.stride(0),
        planes=activation_bits // 8,
    )
    together = max(1, _WORKSPACE_BYTES // _pair_bytes(a) // topk_ids.shape[1])
    with pool.lock:
        for first in range(0, tokens, together):
            rows = slice(first, first + together)
            a.tokens = min(together, tokens - first)
            a.x, a.out = x[rows].data_ptr(), out[rows].data_ptr()
            a.topk_ids, a.topk_weights = topk_ids[rows].data_ptr(), topk_weights[rows].data_ptr()
            a.residual = address(None if residual is None else residual[rows])
            _place(a, pool)
            pool.run(gate_up_job.address, ctypes.addressof(a))
            if a.pairs == 0:
                low, high = (int(i) for i in topk_ids[rows].aminmax())
                fail(_OP, f"experts {low} to {high} are chosen, but there are 0 to {a.experts - 1}")
            pool.run(down_job.address, ctypes.addressof(a))
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
        wide=weight.scale_min.dtype == torch.float32,
        group=weight.group_size,
        bits=weight.bits,
        bias=address(bias),
    )


def _quantized_bytes(m: MatrixArguments) -> int:
    """Of one input: two planes, and a scale and a sum of each group."""
    return 2 * m.k + 8 * (m.k // m.group)


def _pair_bytes(a: ExpertsArguments) -> int:
    """Workspace of one pair; inputs of the first job are done with when outputs are written."""
    first = max(_quantized_bytes(a.gate_up), 4 * a.down.n)
    return first + 4 * a.down.k + _quantized_bytes(a.down) + 8


def _place(a: ExpertsArguments, pool: Pool) -> None:
    """Give each array of the jobs its place in the pool's workspace."""
    pairs = a.tokens * a.per_token
    segments = min(pairs, a.experts)
    shared = max(_quantized_bytes(a.gate_up), 4 * a.down.n)
    sizes = {
        "scratch": pool.threads * SCRATCH_BYTES,
        "counts": 8 * a.experts,
        "segments": SEGMENT_BYTES * segments,
        "order": 8 * pairs,
        "inner": 4 * a.down.k * pairs,
        "weighted": shared * pairs,
    }
    start = pool.workspace(sum(sizes.values()) + _quantized_bytes(a.down) * pairs)
    for name, size in sizes.items():
        setattr(a, name, start)
        start += size
    for matrix, at in ((a.gate_up, a.weighted), (a.down, start)):
        matrix.scales = at
        matrix.high = at + 8 * (matrix.k // matrix.group) * pairs
        matrix.low = matrix.high + matrix.k * pairs


def _check(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: QExperts,
    down: QExperts,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    """Raise OpError for operands whose addresses the jobs cannot take."""
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.packing != "rows16":
            fail(_OP, f"{name} needs packing rows16, not {weight.packing}; repack it first")
        if not weight.codes.is_cpu:
            fail(_OP, f"{name} is on {weight.device}, not on the CPU")
    if x.dim() != 2:
        fail(_OP, f"x must be [M, H], not {list(x.shape)}")
    check_rows(_OP, "x", x, x.shape[0], gate_up.shape[1])
    if topk_ids.dim() != 2 or len(topk_ids) != len(x) or topk_ids.shape[1] < 1:
        fail(
            _OP, f"topk_ids must be [M, T] with M = {len(x)} and T > 0, not {list(topk_ids.shape)}"
        )
    if topk_ids.dtype != torch.int64 or not topk_ids.is_cpu or not topk_ids.is_contiguous():
        fail(_OP, f"topk_ids must be contiguous int64 on the CPU, not {topk_ids.dtype}")
    check_dense(_OP, "topk_weights", topk_weights, tuple(topk_ids.shape))
    if gate_up_bias is not None:
        check_dense(_OP, "gate_up_bias", gate_up_bias, (gate_up.count, gate_up.shape[0]))
    if down_bias is not None:
        check_dense(_OP, "down_bias", down_bias, (down.count, down.shape[0]))
