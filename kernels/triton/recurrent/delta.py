"""Linear attention on a GPU: convolutions, the recurrence, and the gated norm of what it gives."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.states import DeviceLayerStates
from qoff.kernels.operands import FLOATS, require
from qoff.kernels.triton.launch.gpu import Gpu

from .convolve import convolve
from .delta_chunks import chunks_bytes, in_chunks
from .delta_recur import recur
from .gated_norm import gated_norm
from .kda_chunks import channels_bytes, channels_in_chunks

_FEW = 16  # tokens of a sequence that go by one by one


def delta(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeviceLayerStates,
    *,
    out: Tensor | None = None,
    chunked: bool | None = None,
) -> Tensor:
    """Linear attention of a layer's new tokens: see `reference.delta.delta`.

    qkv: float16 or bfloat16, and z, b, a in its dtype; their rows, which may lie apart, are those
    of the batch of `states.step`. out: [M, shape.values], contiguous; rows of no token are 0 there.
    chunked: whether 64 tokens are computed together, in 16 bits; None: where a sequence has many,
    and the GPU has tensor cores. Raises OpError.
    """
    step, device, small = states.step, qkv.device, (torch.float32,)
    tokens, slots = len(step.positions), len(step.start)
    require("qkv", qkv, FLOATS, (tokens, shape.channels), device, rows_apart=True)
    for name, rows, width in (
        ("z", z, shape.values), ("b", b, shape.value_heads), ("a", a, shape.decays)
    ):  # fmt: skip
        require(name, rows, (qkv.dtype,), (tokens, width), device, rows_apart=True)
    for name, tensor, size in (
        ("conv", weights.conv, (shape.taps * shape.channels,)),
        ("decay", weights.decay, (shape.value_heads,)),
        ("dt_bias", weights.dt_bias, (shape.decays,)),
        ("norm", weights.norm, (shape.value_dim,)),
        ("conv states", states.conv, (slots, *shape.conv_shape)),
        ("states", states.memory, (slots, *shape.memory_shape)),
    ):
        require(name, tensor, small, size, device)
    if out is None:
        out = qkv.new_empty(tokens, shape.values)
    require("out", out, (qkv.dtype,), (tokens, shape.values), device)
    if not tokens or not step.max_rows:
        return out.zero_()
    mixed = convolve(qkv, weights, shape, states)
    if chunked is None:
        chunked = step.max_rows > _FEW and Gpu.of(device).capability >= 80
    if chunked and Gpu.of(device).capability < 80:
        raise OpError("chunks of linear attention need tensor cores of compute capability 8.0")
    by_chunks = channels_in_chunks if shape.by_channel else in_chunks
    found = (by_chunks if chunked else recur)(mixed, b, a, weights, shape, states)
    gated_norm(
        found, z, weights.norm, shape.value_heads, shape.norm_eps, step, out, gated_first=False,
        sigmoid=shape.by_channel,
    )  # fmt: skip
    return out


def delta_bytes(tokens: int, shape: DeltaShape, sequences: int, dtype: torch.dtype) -> int:
    """The most bytes `delta` allocates, its result included, as if it freed nothing."""
    values = tokens * (shape.channels + 2 * shape.values)
    by_chunks = channels_bytes if shape.by_channel else chunks_bytes
    return values * dtype.itemsize + by_chunks(tokens, sequences, shape, dtype)
