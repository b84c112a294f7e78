"""Linear attention on a GPU: convolutions, the recurrence, and the gated norm of what it gives."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.states import DeviceLayerStates
from qoff.kernels.operands import FLOATS, require
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .chunks import chunks_bytes, in_chunks
from .convolve import convolve
from .recur import recur

_FEW = 16  # tokens of a sequence that go by one by one


@triton.jit(do_not_specialize=["rows", "slots"])
def delta_norm_kernel(
    found,  # [M, VALUE_HEADS * DIM], in the order of the slots
    z,  # rows z_stride apart, in the order of the batch, as the result
    order,  # [M], or not read
    row_start, weight, out, rows, slots, z_stride, eps,
    VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """norm(found) * silu(z) of a head of some tokens; rows of no token are 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    channel = tl.arange(0, PAD)
    inside = channel < DIM
    there = row < tl.load(row_start + slots)
    place = row
    if ORDERED:
        place = tl.load(order + row, mask=there, other=0)
    column = (head * DIM + channel)[None, :]
    mask = there[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * (VALUE_HEADS * DIM) + column
    x = tl.load(found + at, mask=mask, other=0.0).to(tl.float32)
    by = tl.load(z + place.to(tl.int64)[:, None] * z_stride + column, mask=mask, other=0.0)
    by = by.to(tl.float32)
    gain = tl.load(weight + channel, mask=inside, other=0.0)
    x = x * tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None] * gain[None, :]
    x = x * (by / (1.0 + tl.exp(-by)))
    at = place.to(tl.int64)[:, None] * (VALUE_HEADS * DIM) + column
    mask = (row < rows)[:, None] & inside[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)


def delta(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeviceLayerStates,
    *,
    out: Tensor | None = None,
    chunked: bool | None = None,
) -> Tensor:
    """Linear attention of a layer's new tokens: see `reference.delta.delta`.

    qkvz: float16 or bfloat16 [M, shape.width], ba [M, 2 * value_heads] in its dtype; their rows,
    which may lie apart, are those of the batch of `states.step`. out: [M, shape.values],
    contiguous; rows of no token are 0 there. chunked: whether 64 tokens are computed together, in
    16 bits; None: where a sequence has many, and the GPU has tensor cores. Raises OpError.
    """
    step, device, small = states.step, qkvz.device, (torch.float32,)
    tokens, slots = len(step.positions), len(step.start)
    require("qkvz", qkvz, FLOATS, (tokens, shape.width), device, rows_apart=True)
    require("ba", ba, (qkvz.dtype,), (tokens, 2 * shape.value_heads), device, rows_apart=True)
    for name, tensor, size in (
        ("conv", weights.conv, (shape.taps * shape.channels,)),
        ("decay", weights.decay, (shape.value_heads,)),
        ("dt_bias", weights.dt_bias, (shape.value_heads,)),
        ("norm", weights.norm, (shape.value_dim,)),
        ("conv states", states.conv, (slots, *shape.conv_shape)),
        ("states", states.memory, (slots, *shape.memory_shape)),
    ):
        require(name, tensor, small, size, device)
    if out is None:
        out = qkvz.new_empty(tokens, shape.values)
    require("out", out, (qkvz.dtype,), (tokens, shape.values), device)
    if not tokens or not step.max_rows:
        return out.zero_()
    mixed = convolve(qkvz, weights, shape, states)
    if chunked is None:
        chunked = step.max_rows > _FEW and Gpu.of(device).capability >= 80
    if chunked and Gpu.of(device).capability < 80:
        raise OpError("chunks of linear attention need tensor cores of compute capability 8.0")
    found = (in_chunks if chunked else recur)(mixed, ba, weights, shape, states)
    kernel, rows = _bound(shape, step.order is not None)
    z = qkvz[:, shape.channels :]
    kernel(
        (cdiv(tokens, rows), shape.value_heads, 1), found, z, step.order, step.row_start,
        weights.norm, out, tokens, slots, z.stride(0), shape.norm_eps,
    )  # fmt: skip
    return out


def delta_bytes(tokens: int, shape: DeltaShape, sequences: int, dtype: torch.dtype) -> int:
    """The most bytes `delta` allocates, its result included, as if it freed nothing."""
    values = tokens * (shape.channels + 2 * shape.values)
    return values * dtype.itemsize + chunks_bytes(tokens, sequences, shape, dtype)


@cache
def _bound(shape: DeltaShape, ordered: bool) -> tuple[BoundKernel, int]:
    """The kernel of the norm, and the tokens of a program."""
    pad = next_power_of_2(shape.value_dim)
    rows = max(1, 1024 // pad)
    kernel = BoundKernel(
        delta_norm_kernel,
        VALUE_HEADS=shape.value_heads,
        DIM=shape.value_dim,
        PAD=pad,
        ROWS=rows,
        ORDERED=ordered,
        num_warps=max(1, rows * pad // 512),
        num_stages=1,
    )
    return kernel, rows
