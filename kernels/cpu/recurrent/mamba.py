"""Mamba 2 on the CPU: see `layout.mamba`."""

from __future__ import annotations

from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import check_dense, check_rows
from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import LayerStates

from .mamba_job import FACTORS, MambaArguments, mamba_job
from .scratch import conv_bytes
from .states import check_states


def mamba(
    zxbcdt: Tensor,
    weights: MambaWeights,
    shape: MambaShape,
    states: LayerStates,
    ragged: Ragged,
    *,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """The mixer of a layer's new tokens: see `reference.mamba.mamba`.

    zxbcdt, out: float32, rows contiguous; the former is overwritten. Raises OpError.
    """
    op, tokens, pool = "mamba", len(zxbcdt), pool or default_pool()
    out = zxbcdt.new_empty(tokens, shape.values) if out is None else out
    check_rows(op, "zxbcdt", zxbcdt, tokens, shape.width)
    check_rows(op, "out", out, tokens, shape.values)
    check_dense(op, "conv", weights.conv, (shape.taps * shape.channels,))
    if weights.conv_bias is not None:
        check_dense(op, "conv_bias", weights.conv_bias, (shape.channels,))
    for name in ("decay", "dt_bias", "skip"):
        check_dense(op, name, getattr(weights, name), (shape.heads,))
    bias, norm = weights.conv_bias, weights.norm
    if norm is not None:
        check_dense(op, "norm", norm, (shape.values,))
    check_states(op, states, shape, ragged, tokens)
    arguments = MambaArguments(
        x=zxbcdt.data_ptr(), x_stride=4 * zxbcdt.stride(0), tokens=tokens,
        taps_weight=weights.conv.data_ptr(), conv_bias=0 if bias is None else bias.data_ptr(),
        decay=weights.decay.data_ptr(), dt_bias=weights.dt_bias.data_ptr(),
        skip=weights.skip.data_ptr(), norm=0 if norm is None else norm.data_ptr(),
        conv=states.conv.data_ptr(), memory=states.memory.data_ptr(), spans=states.spans.data_ptr(),
        positions=ragged.positions.data_ptr(), sequences=len(states.spans), heads=shape.heads,
        head_dim=shape.head_dim, groups=shape.groups, state=shape.state, panel=shape.panel,
        taps=shape.taps, out=out.data_ptr(), out_stride=4 * out.stride(0),
        scratch_each=conv_bytes(1, shape), eps=shape.norm_eps,
        **dict(zip(FACTORS, shape.factors, strict=True)),
    )  # fmt: skip
    with pool.lock:
        arguments.scratch = pool.workspace(conv_bytes(pool.threads, shape))
        pool.run(mamba_job.address, arguments)
    return out
