"""The recurrence of Mamba 2 on a GPU: token by token, or in chunks on tensor cores.

A program has some columns of the state of a head of a sequence in registers, while all new tokens
of the sequence go by. With G the sum of the logarithms of what the state is multiplied by, from
the chunk's first token on, and t each token's step (arXiv 2405.21060):

    Y = exp(G) * C S + P X,    P_ij = exp(G_i - G_j) t_j (c_i . b_j) for j <= i
    S = exp(G_last) * S + B^T (exp(G_last - G) t * X)

Products in chunks are of 16 bits, the state stays in float32.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.layout.states import DeviceLayerStates
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import use_asm
from qoff.kernels.triton.launch.sizes import next_power_of_2
from qoff.kernels.triton.linear.nibbles import dot16

from .delta_recur import state_at
from .step import softplus

# Of a token, as a logarithm: beyond, what is left is less than any rounding, and sums stay exact.
LEAST = tl.constexpr(-30.0)
_COLUMNS = 32  # of a state that a program has


@triton.jit
def mamba_recur_kernel(
    mixed,  # [M, CHANNELS], as `convolve` leaves it
    dt,  # [M, HEADS], rows dt_stride apart, in the order of the batch
    order,  # [M], or not read
    row_start, start, decay, dt_bias, skip,
    memory,  # [S, HEADS, HEAD_DIM / PANEL, STATE, PANEL]
    out,  # [M, HEADS * HEAD_DIM]
    dt_stride, dt_factor,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    PAD: tl.constexpr, PANEL: tl.constexpr, COLUMNS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's state, and what all new tokens of a sequence find in them."""
    VALUES: tl.constexpr = HEADS * HEAD_DIM
    tile = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    end = tl.load(row_start + s + 1)
    if first_row >= end:
        return
    at = state_at(memory, s, head, tile, STATE, PAD, HEADS, HEAD_DIM, PANEL, COLUMNS)
    channel = tl.arange(0, PAD)
    inside = channel < STATE
    known = channel < tl.where(tl.load(start + s) > 0, STATE, 0)
    state = tl.load(at, mask=known[:, None], other=0.0)
    rate = tl.exp(tl.load(decay + head))
    bias = tl.load(dt_bias + head)
    direct = tl.load(skip + head)
    key = VALUES + head // (HEADS // GROUPS) * STATE + channel
    column = head * HEAD_DIM + tile * COLUMNS + tl.arange(0, COLUMNS)
    for i in tl.range(0, end - first_row, num_stages=1):
        row = first_row + i
        line = mixed + row.to(tl.int64) * (VALUES + 2 * GROUPS * STATE)
        b = tl.load(line + key, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(line + GROUPS * STATE + key, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(line + column).to(tl.float32)
        place = row
        if ORDERED:
            place = tl.load(order + row)
        raw = tl.load(dt + place.to(tl.int64) * dt_stride + head).to(tl.float32)
        step = softplus(raw * dt_factor + bias)
        state = state * tl.exp(-rate * step) + b[:, None] * (step * x)[None, :]
        found = tl.sum(state * c[:, None], axis=0) + direct * x
        target = out + row.to(tl.int64) * VALUES + column
        tl.store(target, found.to(out.dtype.element_ty))
    tl.store(at, state, mask=inside[:, None])


@triton.jit
def mamba_chunk_kernel(
    mixed, dt, order, row_start, start, decay, dt_bias, skip, memory, out, dt_stride,
    dt_factor,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    PAD: tl.constexpr, PANEL: tl.constexpr, COLUMNS: tl.constexpr, ORDERED: tl.constexpr,
    ASM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The same in chunks: operands as of `mamba_recur_kernel`."""
    VALUES: tl.constexpr = HEADS * HEAD_DIM
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    tile = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    count = tl.load(row_start + s + 1) - first_row
    if count <= 0:
        return
    states = state_at(memory, s, head, tile, STATE, PAD, HEADS, HEAD_DIM, PANEL, COLUMNS)
    channel = tl.arange(0, PAD)
    inside = channel < STATE
    known = channel < tl.where(tl.load(start + s) > 0, STATE, 0)
    state = tl.load(states, mask=known[:, None], other=0.0)
    rate = tl.exp(tl.load(decay + head))
    bias = tl.load(dt_bias + head)
    direct = tl.load(skip + head)
    i = tl.arange(0, CHUNK)
    key = VALUES + head // (HEADS // GROUPS) * STATE + channel
    column = head * HEAD_DIM + tile * COLUMNS + tl.arange(0, COLUMNS)
    for first in tl.range(0, count, CHUNK, num_stages=1):
        row = first_row + first + i
        there = first + i < count
        place = row
        if ORDERED:
            place = tl.load(order + row, mask=there, other=0)
        raw = tl.load(dt + place.to(tl.int64) * dt_stride + head, mask=there, other=0.0)
        step = tl.where(there, softplus(raw.to(tl.float32) * dt_factor + bias), 0.0)
        total = tl.cumsum(tl.maximum(-rate * step, LEAST), axis=0)
        last = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), axis=0)
        line = mixed + row.to(tl.int64) * (VALUES + 2 * GROUPS * STATE)
        mask = there[:, None] & inside[None, :]
        b = tl.load(line[:, None] + key[None, :], mask=mask, other=0.0)
        c = tl.load(line[:, None] + (GROUPS * STATE + key)[None, :], mask=mask, other=0.0)
        x = tl.load(line[:, None] + column[None, :], mask=there[:, None], other=0.0)
        fade = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * step[None, :]
        score = dot16(c, tl.trans(b), tl.zeros([CHUNK, CHUNK], tl.float32), ASM)
        score = tl.where(i[:, None] >= i[None, :], score * fade, 0.0).to(DTYPE)
        found = dot16(c, state.to(DTYPE), tl.zeros([CHUNK, COLUMNS], tl.float32), ASM)
        found = found * tl.exp(total)[:, None] + direct * x.to(tl.float32)
        found = dot16(score, x, found, ASM)
        kept = (x.to(tl.float32) * (step * tl.exp(last - total))[:, None]).to(DTYPE)
        target = out + row.to(tl.int64)[:, None] * VALUES + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=there[:, None])
        state = dot16(tl.trans(b), kept, state * tl.exp(last), ASM)
    tl.store(states, state, mask=inside[:, None])


def scan(
    mixed: Tensor,
    dt: Tensor,
    weights: MambaWeights,
    shape: MambaShape,
    states: DeviceLayerStates,
    chunked: bool,
) -> Tensor:
    """y of heads, before z and their norm, float32 [M, shape.values] in the order of the slots.

    mixed: convolved x, B and C, [M, shape.channels] in that order. dt: [M, heads] in the order of
    the batch, whose rows may lie apart. `states.memory` is what it is after these tokens.
    """
    step = states.step
    out = mixed.new_empty(len(mixed), shape.values, dtype=torch.float32)  # nothing bounds it
    capability = Gpu.of(mixed.device).capability
    kernel, tiles = _bound(shape, step.order is not None, chunked, capability)
    kernel(
        (tiles, shape.heads, len(step.start)), mixed, dt, step.order, step.row_start, step.start,
        weights.decay, weights.dt_bias, weights.skip, states.memory, out, dt.stride(0),
        shape.factors[-1],
    )  # fmt: skip
    return out


@cache
def _bound(
    shape: MambaShape, ordered: bool, chunked: bool, capability: int
) -> tuple[BoundKernel, int]:
    """The kernel, and its programs of a sequence and head."""
    sizes = {
        "HEADS": shape.heads,
        "HEAD_DIM": shape.head_dim,
        "GROUPS": shape.groups,
        "STATE": shape.state,
        "PAD": next_power_of_2(shape.state),
        "PANEL": shape.panel,
        "COLUMNS": min(_COLUMNS, shape.panel),
        "ORDERED": ordered,
        "num_stages": 1,
    }
    tiles = shape.head_dim // min(_COLUMNS, shape.panel)
    if not chunked:
        return BoundKernel(mamba_recur_kernel, **sizes, num_warps=4), tiles
    # `wgmma` takes 64 rows. Others have operands in registers, too, and spill with so many; states
    # of many rows leave fewer registers to them.
    chunk, warps = (64, 4) if capability == 90 else (32, 8)
    if sizes["PAD"] > 128:
        chunk, warps = 16, 8
    kernel = BoundKernel(mamba_chunk_kernel, **sizes, ASM=use_asm(), CHUNK=chunk, num_warps=warps)
    return kernel, tiles
