"""The recurrence of KDA in chunks of 64 tokens, on tensor cores: prompts on a GPU.

As `delta_chunks`, but each channel c of keys forgets by itself: G is a vector, and

    A_ij = beta_i sum_c exp(G_ic - G_jc) k_ic k_jc,   P_ij = sum_c exp(G_ic - G_jc) q_ic k_jc

Products of matrices need a factor of i and one of j, and exp(-G_j) alone would overflow. So i and j
of different blocks of 16 tokens are taken relative to the first token r of the block of i: both
exp(G_i - G_r) and exp(G_r - G_j) are at most 1. Inside a block, sums are taken as they are written
above. One kernel sums up G and multiplies keys and queries by what the others need, a second one
finds A and P of blocks, a third one inverts I + A, and a fourth one takes some columns of a head's
state through the chunks of a sequence.
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

from .delta_chunks import (
    CHUNK,
    LEAST,
    chunks_bytes,
    inverse_of,
    matrices_of_chunks,
    square_at,
)
from .delta_recur import forgetting, state_at, tile_sizes

BLOCK = tl.constexpr(16)  # tokens


@triton.jit
def _learns(b, order, row, there, b_stride, head, ORDERED: tl.constexpr):
    """Beta of the rows of a chunk; those not there learn nothing."""
    place = row
    if ORDERED:
        place = tl.load(order + row, mask=there, other=0)
    beta = tl.load(b + place.to(tl.int64) * b_stride + head, mask=there, other=0.0)
    return tl.where(there, 1.0 / (1.0 + tl.exp(-beta.to(tl.float32))), 0.0)


@triton.jit
def kda_fade_kernel(
    mixed,  # [M, CHANNELS], as `convolve` leaves it
    a, order, row_start, decay, dt_bias,
    sums,  # [M, VALUE_HEADS * KEY_DIM], in the order of the slots, as what follows
    queries, keys, kept,
    a_stride,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, ORDERED: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """G, exp(G) * q, exp(G) * k and exp(G_last - G) * k of a chunk and value head."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = VALUE_HEADS * KEY_DIM
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    count = tl.load(row_start + s + 1) - first_row
    if chunk * CHUNK >= count:
        return
    i = tl.arange(0, CHUNK)
    first, there = (first_row + chunk * CHUNK).to(tl.int64), chunk * CHUNK + i < count
    place = first + i
    if ORDERED:
        place = tl.load(order + place, mask=there, other=0)
    channel = tl.arange(0, KEY_PAD)
    inside = channel < KEY_DIM
    own = head * KEY_DIM + channel
    mask = there[:, None] & inside[None, :]
    far = tl.load(a + place.to(tl.int64)[:, None] * a_stride + own[None, :], mask=mask, other=0.0)
    bias = tl.load(dt_bias + own, mask=inside, other=0.0)
    forgets = forgetting(far, decay, bias[None, :], head, FLOOR)
    forgets = tl.where(mask, tl.maximum(forgets, LEAST), 0.0)
    total = tl.cumsum(forgets, axis=0)
    last = tl.sum(forgets, axis=0)
    begin = first * DECAYS
    target = i[:, None] * DECAYS + own[None, :]
    tl.store(sums + begin + target, total, mask=mask)
    query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + channel
    at = i[:, None] * CHANNELS + query[None, :]
    grown = tl.exp(total)
    q = tl.load(mixed + first * CHANNELS + at, mask=mask, other=0.0)
    tl.store(queries + begin + target, (q * grown).to(queries.dtype.element_ty), mask=mask)
    k = tl.load(mixed + first * CHANNELS + KEYS + at, mask=mask, other=0.0)
    tl.store(keys + begin + target, (k * grown).to(keys.dtype.element_ty), mask=mask)
    left = tl.exp(tl.minimum(last[None, :] - total, 0.0))
    tl.store(kept + begin + target, (k * left).to(kept.dtype.element_ty), mask=mask)


@triton.jit
def kda_products_kernel(
    mixed, b, sums, order, row_start,
    systems,  # [places, VALUE_HEADS, CHUNK, CHUNK], float32
    scores,  # the same, 16 bits
    b_stride,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, ORDERED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A and P of a block of tokens and value head."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    DECAYS: tl.constexpr = VALUE_HEADS * KEY_DIM
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    block = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    chunk = block // (CHUNK // BLOCK)
    begin = block % (CHUNK // BLOCK) * BLOCK  # in the chunk
    first_row = tl.load(row_start + s)
    count = tl.load(row_start + s + 1) - first_row - chunk * CHUNK  # from the chunk on
    if count <= 0:
        return
    first = (first_row + chunk * CHUNK).to(tl.int64)
    i = begin + tl.arange(0, BLOCK)
    j = tl.arange(0, CHUNK)
    channel = tl.arange(0, KEY_PAD)
    inside = channel < KEY_DIM
    q = mixed + first * CHANNELS + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    total = sums + first * DECAYS + head * KEY_DIM
    mask = (i < count)[:, None] & inside[None, :]
    at = i[:, None] * CHANNELS + channel[None, :]
    query = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
    key = tl.load(q + KEYS + at, mask=mask, other=0.0).to(tl.float32)
    own = tl.load(total + i[:, None] * DECAYS + channel[None, :], mask=mask, other=0.0)
    below = tl.zeros([BLOCK, CHUNK], tl.float32)
    score = tl.zeros([BLOCK, CHUNK], tl.float32)
    if (begin > 0) & (begin < count):
        since = tl.load(total + begin * DECAYS + channel, mask=inside, other=0.0)[None, :]
        earlier = (j < begin)[:, None] & inside[None, :]
        before = tl.load(total + j[:, None] * DECAYS + channel[None, :], mask=earlier, other=0.0)
        column = j[:, None] * CHANNELS + channel[None, :]
        other = tl.load(q + KEYS + column, mask=earlier, other=0.0)
        other = tl.trans((other * tl.exp(tl.minimum(since - before, 0.0))).to(DTYPE))
        faded = tl.exp(tl.minimum(own - since, 0.0))
        below = dot16((key * faded).to(DTYPE), other, below, ASM)
        score = dot16((query * faded).to(DTYPE), other, score, ASM)
    for n in tl.range(begin, tl.minimum(begin + BLOCK, count), num_stages=1):
        since = tl.load(total + n * DECAYS + channel, mask=inside, other=0.0)
        other = tl.load(q + KEYS + n * CHANNELS + channel, mask=inside, other=0.0)
        faded = other[None, :] * tl.exp(tl.minimum(own - since[None, :], 0.0))
        here = (j == n)[None, :]
        below = tl.where(here, tl.sum(key * faded, axis=1)[:, None], below)
        score = tl.where(here, tl.sum(query * faded, axis=1)[:, None], score)
    learns = _learns(b, order, first + i, i < count, b_stride, head, ORDERED)
    below = tl.where(i[:, None] > j[None, :], below * learns[:, None], 0.0)
    score = tl.where(i[:, None] >= j[None, :], score, 0.0)
    place = (first_row // CHUNK + s + chunk).to(tl.int64) * VALUE_HEADS + head
    square = place * (CHUNK * CHUNK) + i[:, None] * CHUNK + j[None, :]
    tl.store(systems + square, below)
    tl.store(scores + square, score.to(scores.dtype.element_ty))


@triton.jit
def kda_solve_kernel(row_start, systems, inverses, VALUE_HEADS: tl.constexpr):
    """The inverse of I + A, of a chunk and value head."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    count = tl.load(row_start + s + 1) - first_row - chunk * CHUNK
    if count <= 0:
        return
    square = square_at(first_row // CHUNK + s + chunk, head, VALUE_HEADS)
    solved = inverse_of(tl.load(systems + square), tl.minimum(CHUNK, count))
    tl.store(inverses + square, solved.to(inverses.dtype.element_ty))


@triton.jit
def kda_chunk_kernel(
    mixed, b, sums, queries, keys, kept, order, row_start, start, inverses, scores,
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
    own = head * KEY_DIM + channel
    column = head * VALUE_DIM + tile * COLUMNS + tl.arange(0, COLUMNS)
    place = first_row // CHUNK + s
    for first in tl.range(0, count, CHUNK, num_stages=1):
        row = (first_row + first + i).to(tl.int64)
        there = first + i < count
        learns = _learns(b, order, row, there, b_stride, head, ORDERED)
        mask = there[:, None] & inside[None, :]
        at = row[:, None] * DECAYS + own[None, :]
        k = tl.load(keys + at, mask=mask, other=0.0)
        value = mixed + row[:, None] * (2 * KEYS + VALUES) + (2 * KEYS + column)[None, :]
        v = tl.load(value, mask=there[:, None], other=0.0)
        rounded = state.to(DTYPE)
        lacks = dot16(k, rounded, tl.zeros([CHUNK, COLUMNS], tl.float32), ASM)
        lacks = learns[:, None] * (v.to(tl.float32) - lacks)
        square = square_at(place + first // CHUNK, head, VALUE_HEADS)
        inverse = tl.load(inverses + square)
        new = dot16(inverse, lacks.to(DTYPE), tl.zeros([CHUNK, COLUMNS], tl.float32), ASM)
        new = new.to(DTYPE)
        q = tl.load(queries + at, mask=mask, other=0.0)
        found = dot16(q, rounded, tl.zeros([CHUNK, COLUMNS], tl.float32), ASM)
        found = dot16(tl.load(scores + square), new, found, ASM)
        target = out + row[:, None] * VALUES + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=there[:, None])
        end = (first_row + tl.minimum(first + CHUNK, count) - 1).to(tl.int64)
        last = tl.load(sums + end * DECAYS + own, mask=inside, other=0.0)
        left = tl.load(kept + at, mask=mask, other=0.0)
        state = dot16(tl.trans(left), new, state * tl.exp(last)[:, None], ASM)
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
    step, tokens = states.step, len(mixed)
    inverses, scores = matrices_of_chunks(mixed, len(step.start), shape)
    systems = torch.empty(inverses.shape, device=mixed.device)
    sums = torch.empty(tokens, shape.decays, device=mixed.device)
    faded = mixed.new_empty(3, tokens, shape.decays).unbind()
    out = mixed.new_empty(tokens, shape.values)
    fade, products, solve, chunk, tiles = _bound(shape, step.order is not None)
    heads, slots, chunks = shape.value_heads, len(step.start), cdiv(step.max_rows, CHUNK.value)
    fade(
        (chunks, heads, slots), mixed, a, step.order, step.row_start, weights.decay,
        weights.dt_bias, sums, *faded, a.stride(0),
    )  # fmt: skip
    products(
        (CHUNK.value // BLOCK.value * chunks, heads, slots), mixed, b, sums, step.order,
        step.row_start, systems, scores, b.stride(0),
    )  # fmt: skip
    solve((chunks, heads, slots), step.row_start, systems, inverses)
    chunk(
        (tiles, heads, slots), mixed, b, sums, *faded, step.order, step.row_start, step.start,
        inverses, scores, states.memory, out, b.stride(0),
    )  # fmt: skip
    return out


def channels_bytes(tokens: int, sequences: int, shape: DeltaShape, dtype: torch.dtype) -> int:
    """The most bytes `channels_in_chunks` allocates beside its result."""
    matrices = chunks_bytes(tokens, sequences, shape, dtype)
    systems = matrices * 2 // dtype.itemsize  # as many of 4 bytes, not twice as many
    return matrices + systems + tokens * shape.decays * (4 + 3 * dtype.itemsize)


@cache
def _bound(
    shape: DeltaShape, ordered: bool
) -> tuple[BoundKernel, BoundKernel, BoundKernel, BoundKernel, int]:
    """The four kernels, and programs of the last one of a sequence and head."""
    sizes = tile_sizes(shape)
    own = {name: sizes.pop(name) for name in ("PANEL", "COLUMNS")}
    last = {"ORDERED": ordered, "ASM": use_asm(), "num_stages": 1, "num_warps": 4}
    fade = BoundKernel(
        kda_fade_kernel, **sizes, ORDERED=ordered, FLOOR=shape.floor, num_stages=1, num_warps=16
    )
    products = BoundKernel(kda_products_kernel, **sizes, **{**last, "num_warps": 8})
    solve = BoundKernel(kda_solve_kernel, VALUE_HEADS=shape.value_heads, num_stages=1, num_warps=4)
    chunk = BoundKernel(kda_chunk_kernel, **sizes, **own, **last)
    return fade, products, solve, chunk, shape.value_dim // own["COLUMNS"]
