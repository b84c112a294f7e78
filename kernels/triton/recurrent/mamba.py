"""Mamba 2 on a GPU: convolutions, the recurrence, gates, and the norm of what it gives."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.layout.states import DeviceLayerStates
from qoff.kernels.operands import FLOATS, require
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.sizes import cdiv

from .convolve import channel_tiles, convolved, remember
from .gated_norm import gated_norm
from .mamba_scan import scan

_FEW = 16  # tokens of a sequence that go by one by one


@triton.jit
def mamba_convolve_kernel(
    x,  # [M, CHANNELS], rows x_stride apart, in the order of the batch
    order,  # [M], or not read
    row_start, start, weight,
    bias,  # [CHANNELS], or not read
    past,  # [S, TAPS - 1, CHANNELS]
    out,  # [M, CHANNELS], in the order of the slots
    x_stride, x_factor, b_factor, c_factor,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    ORDERED: tl.constexpr, BIASED: tl.constexpr, VALUES: tl.constexpr, STATES: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """silu of some channels of some tokens of a sequence.

    The first tile of a sequence alone reads its past, and then writes it.
    """
    begin = tl.program_id(0) * WIDTH
    tile = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    count = tl.load(row_start + s + 1) - first_row
    if tile * ROWS >= count:
        return
    index = tl.arange(0, WIDTH)
    width = CHANNELS - begin
    inside = index < width
    channel = begin + index
    remembered = tl.load(start + s)
    own = past + s.to(tl.int64) * ((TAPS - 1) * CHANNELS) + channel
    row = tile * ROWS + tl.arange(0, ROWS)
    total = convolved(
        x, order, own, weight, first_row, row, count, remembered, channel, inside, x_stride,
        CHANNELS, WIDTH, TAPS, ROWS, ORDERED, False,
    )  # fmt: skip
    if SCALED:
        factor = tl.where(channel < VALUES + STATES, b_factor, c_factor)
        total *= tl.where(channel < VALUES, x_factor, factor)[None, :]
    if BIASED:
        total += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
    total = total / (1.0 + tl.exp(-total))
    target = out + (first_row + row).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    mask = (row < count)[:, None] & inside[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)
    if tile == 0:
        tl.debug_barrier()  # the past has been read
        remember(
            x, order, own, first_row, count, remembered, channel, index, width, x_stride,
            CHANNELS, TAPS, ORDERED, False,
        )  # fmt: skip


def mamba(
    zxbcdt: Tensor,
    weights: MambaWeights,
    shape: MambaShape,
    states: DeviceLayerStates,
    *,
    out: Tensor | None = None,
    chunked: bool | None = None,
) -> Tensor:
    """The mixer of a layer's new tokens: see `reference.mamba.mamba`.

    zxbcdt: float16 or bfloat16 [M, shape.width]; its rows, which may lie apart, are those of the
    batch of `states.step`. out: [M, shape.values], contiguous; rows of no token are 0 there.
    chunked: whether many tokens are computed together, in 16 bits; None: where a sequence has many,
    and the GPU has tensor cores. Raises OpError.
    """
    step, device, small = states.step, zxbcdt.device, (torch.float32,)
    tokens, slots = len(step.positions), len(step.start)
    require("zxbcdt", zxbcdt, FLOATS, (tokens, shape.width), device, rows_apart=True)
    bias = weights.conv_bias
    for name, tensor, size in (
        ("conv", weights.conv, (shape.taps * shape.channels,)),
        ("decay", weights.decay, (shape.heads,)),
        ("dt_bias", weights.dt_bias, (shape.heads,)),
        ("skip", weights.skip, (shape.heads,)),
        ("conv states", states.conv, (slots, *shape.conv_shape)),
        ("states", states.memory, (slots, *shape.memory_shape)),
    ):
        require(name, tensor, small, size, device)
    if bias is not None:
        require("conv_bias", bias, small, (shape.channels,), device)
    if weights.norm is not None:
        require("norm", weights.norm, small, (shape.values,), device)
    if out is None:
        out = zxbcdt.new_empty(tokens, shape.values)
    require("out", out, (zxbcdt.dtype,), (tokens, shape.values), device)
    if not tokens or not step.max_rows:
        return out.zero_()
    if chunked is None:
        chunked = step.max_rows > _FEW and Gpu.of(device).capability >= 80
    if chunked and Gpu.of(device).capability < 80:
        raise OpError("chunks of Mamba 2 need tensor cores of compute capability 8.0")
    z, x, dt = zxbcdt.split([shape.values, shape.channels, shape.heads], 1)
    mixed = zxbcdt.new_empty(tokens, shape.channels)
    kernel, parts, rows = _bound(
        shape, step.max_rows == 1, step.order is not None, bias is not None
    )
    kernel(
        (parts, cdiv(step.max_rows, rows), slots), x, step.order, step.row_start, step.start,
        weights.conv, bias, states.conv, mixed, x.stride(0), *shape.factors[1:-1],
    )  # fmt: skip
    found = scan(mixed, dt, weights, shape, states, chunked)
    gated_norm(
        found, z, weights.norm, shape.groups, shape.norm_eps, step, out, gated_first=True,
        z_factor=shape.factors[0],
    )  # fmt: skip
    return out


def mamba_bytes(tokens: int, shape: MambaShape, dtype: torch.dtype) -> int:
    """The most bytes `mamba` allocates, its result included, as if it freed nothing."""
    return tokens * ((shape.channels + shape.values) * dtype.itemsize + 4 * shape.values)


@cache
def _bound(
    shape: MambaShape, decodes: bool, ordered: bool, biased: bool
) -> tuple[BoundKernel, int, int]:
    """What convolves, its programs of the channels of a token, and the tokens of a program."""
    constants, parts, rows = channel_tiles(shape, decodes, ordered)
    constants |= {
        "BIASED": biased,
        "VALUES": shape.values,
        "STATES": shape.groups * shape.state,
        "SCALED": any(factor != 1 for factor in shape.factors[1:-1]),
    }
    return BoundKernel(mamba_convolve_kernel, **constants), parts, rows
