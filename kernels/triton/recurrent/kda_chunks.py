"""The recurrence of KDA in chunks of 64 tokens, on tensor cores: prompts on a GPU.

As `delta_chunks`, but each channel c of keys forgets by itself: G is a vector, and

    A_ij = beta_i sum_c exp(G_ic - G_jc) k_ic k_jc,   P_ij = sum_c exp(G_ic - G_jc) q_ic k_jc

Products of matrices need a factor of i and one of j, and exp(-G_j) alone would overflow. So i and j
of different blocks of 16 tokens are taken relative to the first token r of the block of i: both
exp(G_i - G_r) and exp(G_r - G_j) are at most 1. Inside a block, sums are taken as they are written
above. One kernel sums up G, a second one finds the inverses of I + A, and P, and a third one takes
some columns of a head's state through the chunks of a sequence.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.states import DeviceLayerStates
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.options import use_asm
from qoff.kernels.triton.launch.sizes import cdiv
from qoff.kernels.triton.linear.nibbles import dot16

from .delta_chunks import CHUNK, LEAST, matrices_of_chunks, square_at
from .delta_recur import forgetting, state_at, tile_sizes

_BLOCK = tl.constexpr(16)  # tokens


@triton.jit
def _learns(b, order, row, there, b_stride, head, ORDERED: tl.constexpr):
    """Beta of the rows of a chunk; those not there learn nothing."""
    place = row
    if ORDERED:
        place = tl.load(order + row, mask=there, other=0)
    beta = tl.load(b + place.to(tl.int64) * b_stride + head, mask=there, other=0.0)
    return tl.where(there, 1.0 / (1.0 + tl.exp(-beta.to(tl.float32))), 0.0)


@triton.jit
def kda_sums_kernel(
    a, order, row_start, decay, dt_bias,
    sums,  # [M, VALUE_HEADS * KEY_DIM], in the order of the slots
    a_stride,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_HEADS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """G of a chunk and value head."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    count = tl.load(row_start + s + 1) - first_row
    if chunk * CHUNK >= count:
        return
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    row, there = first_row + i, i < count
    place = row
    if ORDERED:
        place = tl.load(order + row, mask=there, other=0)
    inside = tl.arange(0, KEY_PAD) < KEY_DIM
    own = head * KEY_DIM + tl.arange(0, KEY_PAD)
    mask = there[:, None] & inside[None, :]
    far = tl.load(a + place.to(tl.int64)[:, None] * a_stride + own[None, :], mask=mask, other=0.0)
    bias = tl.load(dt_bias + own, mask=inside, other=0.0)
    forgets = forgetting(far, decay, bias[None, :], head)
    total = tl.cumsum(tl.where(mask, tl.maximum(forgets, LEAST), 0.0), axis=0)
    target = sums + row.to(tl.int64)[:, None] * (VALUE_HEADS * KEY_DIM) + own[None, :]
    tl.store(target, total, mask=mask)


@triton.jit
def kda_solve_kernel(
    mixed,  # [M, CHANNELS], as `convolve` leaves it
    b, sums, order, row_start,
    inverses,  # [places, VALUE_HEADS, CHUNK, CHUNK]
    scores,  # the same
    b_stride,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, ORDERED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The inverse of I + A, and P, of a chunk and value head."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = VALUE_HEADS * KEY_DIM
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    count = tl.load(row_start + s + 1) - first_row
    if chunk * CHUNK >= count:
        return
    i = tl.arange(0, CHUNK)
    left = count - chunk * CHUNK
    first = (first_row + chunk * CHUNK).to(tl.int64)
    learns = _learns(b, order, first + i, i < left, b_stride, head, ORDERED)
    channel = tl.arange(0, KEY_PAD)
    inside = channel < KEY_DIM
    query = mixed + first * CHANNELS + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + channel
    own = sums + first * DECAYS + head * KEY_DIM + channel
    mask = (i < left)[:, None] & inside[None, :]
    at = query[None, :] + (i * CHANNELS)[:, None]
    q = tl.load(at, mask=mask, other=0.0)
    k = tl.load(at + KEYS, mask=mask, other=0.0)
    total = tl.load(own[None, :] + (i * DECAYS)[:, None], mask=mask, other=0.0)
    below = tl.zeros([CHUNK, CHUNK], tl.float32)
    score = tl.zeros([CHUNK, CHUNK], tl.float32)
    for n in tl.range(1, CHUNK // _BLOCK, num_stages=1):
        begin = n * _BLOCK
        known = channel < tl.where(begin < left, KEY_DIM, 0)
        since = tl.load(own + begin * DECAYS, mask=known, other=0.0)[None, :]
        faded = tl.exp(tl.minimum(total - since, 0.0))
        other = tl.trans((k * tl.exp(tl.minimum(since - total, 0.0))).to(DTYPE))
        mine = (i // _BLOCK == n)[:, None] & (i < begin)[None, :]
        zero = tl.zeros([CHUNK, CHUNK], tl.float32)
        below = tl.where(mine, dot16((k * faded).to(DTYPE), other, zero, ASM), below)
        score = tl.where(mine, dot16((q * faded).to(DTYPE), other, zero, ASM), score)
    for n in tl.range(0, _BLOCK, num_stages=1):
        j = i // _BLOCK * _BLOCK + n  # of the block of i
        there = (j < left)[:, None] & inside[None, :]
        since = tl.load(own[None, :] + (j * DECAYS)[:, None], mask=there, other=0.0)
        other = query[None, :] + KEYS + (j * CHANNELS)[:, None]
        faded = tl.load(other, mask=there, other=0.0) * tl.exp(tl.minimum(total - since, 0.0))
        mine = i[None, :] == j[:, None]
        below = tl.where(mine, tl.sum(k * faded, axis=1)[:, None], below)
        score = tl.where(mine, tl.sum(q * faded, axis=1)[:, None], score)
    score = tl.where(i[:, None] >= i[None, :], score, 0.0)
    square = square_at(first_row // CHUNK + s + chunk, head, VALUE_HEADS)
    tl.store(scores + square, score.to(DTYPE))
    below = tl.where(i[:, None] > i[None, :], below * learns[:, None], 0.0)
    solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for n in tl.range(1, tl.minimum(CHUNK, left), num_stages=1):
        here = i[:, None] == n
        factors = tl.sum(tl.where(here, below, 0.0), axis=0)
        taken = tl.sum(factors[:, None] * solved, axis=0)
        solved = tl.where(here, solved - taken[None, :], solved)
    tl.store(inverses + square, solved.to(DTYPE))


@triton.jit
def kda_chunk_kernel(
    mixed, b, sums, order, row_start, start, inverses, scores,
    memory,  # [S, VALUE_HEADS, VALUE_DIM / PANEL, KEY_DIM, PANEL]
    out,  # [M, VALUE_HEADS * VALUE_DIM]
    b_stride,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, PANEL: tl.constexpr,
    COLUMNS: tl.constexpr, ORDERED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's state through all chunks of a sequence."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = VALUE_HEADS * KEY_DIM
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    tile = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    count = tl.load(row_start + s + 1) - first_row
    if count <= 0:
        return
    states = state_at(
        memory, s, head, tile, KEY_DIM, KEY_PAD, VALUE_HEADS, VALUE_DIM, PANEL, COLUMNS
    )
    channel = tl.arange(0, KEY_PAD)
    inside = channel < KEY_DIM
    known = channel < tl.where(tl.load(start + s) > 0, KEY_DIM, 0)
    state = tl.load(states, mask=known[:, None], other=0.0)
    i = tl.arange(0, CHUNK)
    query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + channel
    own = sums + head * KEY_DIM + channel
    column = head * VALUE_DIM + tile * COLUMNS + tl.arange(0, COLUMNS)
    place = first_row // CHUNK + s
    for first in tl.range(0, count, CHUNK, num_stages=1):
        row = (first_row + first + i).to(tl.int64)
        there = first + i < count
        learns = _learns(b, order, row, there, b_stride, head, ORDERED)
        line = mixed + row * (2 * KEYS + VALUES)
        mask = there[:, None] & inside[None, :]
        total = tl.load(own[None, :] + (row * DECAYS)[:, None], mask=mask, other=0.0)
        grown = tl.exp(total)
        k = tl.load(line[:, None] + (KEYS + query)[None, :], mask=mask, other=0.0)
        v = tl.load(line[:, None] + (2 * KEYS + column)[None, :], mask=there[:, None], other=0.0)
        rounded = state.to(DTYPE)
        lacks = dot16((k * grown).to(DTYPE), rounded, tl.zeros([CHUNK, COLUMNS], tl.float32), ASM)
        lacks = learns[:, None] * (v.to(tl.float32) - lacks)
        square = square_at(place + first // CHUNK, head, VALUE_HEADS)
        inverse = tl.load(inverses + square)
        new = dot16(inverse, lacks.to(DTYPE), tl.zeros([CHUNK, COLUMNS], tl.float32), ASM)
        new = new.to(DTYPE)
        q = tl.load(line[:, None] + query[None, :], mask=mask, other=0.0)
        found = dot16((q * grown).to(DTYPE), rounded, tl.zeros([CHUNK, COLUMNS], tl.float32), ASM)
        found = dot16(tl.load(scores + square), new, found, ASM)
        target = out + row[:, None] * VALUES + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=there[:, None])
        end = (first_row + tl.minimum(first + CHUNK, count) - 1).to(tl.int64)
        last = tl.load(own + end * DECAYS, mask=inside, other=0.0)
        kept = (k * tl.exp(tl.minimum(last[None, :] - total, 0.0))).to(DTYPE)
        state = dot16(tl.trans(kept), new, state * tl.exp(last)[:, None], ASM)
    tl.store(states, state, mask=inside[:, None])


def channels_in_chunks(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeviceLayerStates,
) -> Tensor:
    """As `recur` of KDA, rounded where products read 16 bits."""
    step = states.step
    inverses, scores = matrices_of_chunks(mixed, len(step.start), shape)
    sums = torch.empty(len(mixed), shape.decays, device=mixed.device)
    out = mixed.new_empty(len(mixed), shape.values)
    total, solve, chunk, tiles = _bound(shape, step.order is not None)
    heads, slots = shape.value_heads, len(step.start)
    grid = cdiv(step.max_rows, CHUNK.value), heads, slots
    total(
        grid, a, step.order, step.row_start, weights.decay, weights.dt_bias, sums, a.stride(0)
    )  # fmt: skip
    solve(
        grid, mixed, b, sums, step.order, step.row_start, inverses, scores, b.stride(0)
    )  # fmt: skip
    chunk(
        (tiles, heads, slots), mixed, b, sums, step.order, step.row_start, step.start, inverses,
        scores, states.memory, out, b.stride(0),
    )  # fmt: skip
    return out


def sums_bytes(tokens: int, shape: DeltaShape) -> int:
    """The most bytes `channels_in_chunks` allocates beside `chunks_bytes` and its result."""
    return 4 * tokens * shape.decays if shape.by_channel else 0


@cache
def _bound(shape: DeltaShape, ordered: bool) -> tuple[BoundKernel, BoundKernel, BoundKernel, int]:
    """What sums up, what solves chunks, what goes through them, and its programs of a head."""
    sizes = tile_sizes(shape)
    own = {name: sizes.pop(name) for name in ("PANEL", "COLUMNS")}
    keys = {name: sizes[name] for name in ("KEY_DIM", "KEY_PAD", "VALUE_HEADS")}
    last = {"ORDERED": ordered, "ASM": use_asm(), "num_stages": 1, "num_warps": 8}
    total = BoundKernel(kda_sums_kernel, **keys, ORDERED=ordered, num_stages=1, num_warps=8)
    solve = BoundKernel(kda_solve_kernel, **sizes, **last)
    chunk = BoundKernel(kda_chunk_kernel, **sizes, **own, **last)
    return total, solve, chunk, shape.value_dim // own["COLUMNS"]
