"""Gated DeltaNet and KDA on the CPU: see `layout.delta`."""

from __future__ import annotations

from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import check_dense, check_rows
from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import LayerStates

from .delta_job import DeltaArguments, delta_job
from .scratch import delta_bytes
from .states import check_states


def delta(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: LayerStates,
    ragged: Ragged,
    *,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Linear attention of a layer's new tokens: see `reference.delta.delta`.

    qkv, z, b, a, out: float32, rows contiguous; qkv, b and a are overwritten. Raises OpError.
    """
    op, tokens, pool = "delta", len(qkv), pool or default_pool()
    out = qkv.new_empty(tokens, shape.values) if out is None else out
    check_rows(op, "qkv", qkv, tokens, shape.channels)
    check_rows(op, "z", z, tokens, shape.values)
    check_rows(op, "b", b, tokens, shape.value_heads)
    check_rows(op, "a", a, tokens, shape.decays)
    check_rows(op, "out", out, tokens, shape.values)
    check_dense(op, "conv", weights.conv, (shape.taps * shape.channels,))
    check_dense(op, "decay", weights.decay, (shape.value_heads,))
    check_dense(op, "dt_bias", weights.dt_bias, (shape.decays,))
    check_dense(op, "norm", weights.norm, (shape.value_dim,))
    check_states(op, states, shape, ragged, tokens)
    arguments = DeltaArguments(
        x=qkv.data_ptr(), x_stride=4 * qkv.stride(0), z=z.data_ptr(), z_stride=4 * z.stride(0),
        b=b.data_ptr(), b_stride=4 * b.stride(0), a=a.data_ptr(), a_stride=4 * a.stride(0),
        by_channel=shape.by_channel, taps_weight=weights.conv.data_ptr(),
        decay=weights.decay.data_ptr(), dt_bias=weights.dt_bias.data_ptr(),
        norm=weights.norm.data_ptr(), conv=states.conv.data_ptr(), memory=states.memory.data_ptr(),
        spans=states.spans.data_ptr(), positions=ragged.positions.data_ptr(),
        sequences=len(states.spans), key_heads=shape.key_heads, value_heads=shape.value_heads,
        key_dim=shape.key_dim, value_dim=shape.value_dim, panel=shape.panel, taps=shape.taps,
        out=out.data_ptr(), out_stride=4 * out.stride(0), scratch_each=delta_bytes(1, shape),
        eps=shape.norm_eps, floor=shape.floor, learns=shape.learns,
    )  # fmt: skip
    with pool.lock:
        arguments.scratch = pool.workspace(delta_bytes(pool.threads, shape))
        pool.run(delta_job.address, arguments)
    return out
