"""The recurrence of linear attention in chunks of 64 tokens, on tensor cores: prompts on a GPU.

With G the sum of the logarithms of what the state is multiplied by, from the chunk's first token
on, the corrections U of a chunk solve a triangular system (arXiv 2412.06464, arXiv 2406.06484):

    (I + A) U = beta * (V - exp(G) * K S),   A_ij = beta_i exp(G_i - G_j) (k_i . k_j) for j < i
    O = exp(G) * Q S + P U,                  P_ij = exp(G_i - G_j) (q_i . k_j) for j <= i
    S = exp(G_last) * S + K^T (exp(G_last - G) * U)

One kernel finds the inverses of I + A, and P, of all chunks at once; a second one takes some
columns of a head's state through the chunks of a sequence. As keys have length 1 and beta is below
1, no element of an inverse is above 1, so 16 bits do. The state stays in float32.
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
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import use_asm
from qoff.kernels.triton.launch.sizes import cdiv
from qoff.kernels.triton.linear.nibbles import dot16

from .delta_recur import gates, state_at, tile_sizes

CHUNK = tl.constexpr(64)
# Of a token, as a logarithm: beyond, what is left is less than any rounding, and sums stay exact.
LEAST = tl.constexpr(-30.0)


@triton.jit
def _sums(
    b, a, order, row, there, b_stride, a_stride, decay, dt_bias, head, ORDERED: tl.constexpr,
    LEARNS: tl.constexpr,
):  # fmt: skip
    """G and beta of the rows of a chunk; those not there forget nothing and learn nothing."""
    place = row
    if ORDERED:
        place = tl.load(order + row, mask=there, other=0)
    beta = tl.load(b + place.to(tl.int64) * b_stride + head, mask=there, other=0.0)
    far = tl.load(a + place.to(tl.int64) * a_stride + head, mask=there, other=0.0)
    forgets, learns = gates(beta, far, decay, dt_bias, head, LEARNS)
    forgets = tl.where(there, tl.maximum(forgets, LEAST), 0.0)
    return tl.cumsum(forgets, axis=0), tl.where(there, learns, 0.0)


@triton.jit
def square_at(place, head, VALUE_HEADS: tl.constexpr):
    """Where the matrix of a chunk and head is, [CHUNK, CHUNK]."""
    i = tl.arange(0, CHUNK)
    first = (place.to(tl.int64) * VALUE_HEADS + head) * (CHUNK * CHUNK)
    return first + i[:, None] * CHUNK + i[None, :]


@triton.jit
def inverse_of(below, rows):
    """That of I + A, of which so many rows are not those of I; below: A, without what is above."""
    i = tl.arange(0, CHUNK)
    solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for n in tl.range(1, rows, num_stages=1):
        here = i[:, None] == n
        factors = tl.sum(tl.where(here, below, 0.0), axis=0)
        known = tl.sum(factors[:, None] * solved, axis=0)
        solved = tl.where(here, solved - known[None, :], solved)
    return solved


@triton.jit
def delta_solve_kernel(
    mixed,  # [M, CHANNELS], as `convolve` leaves it
    b, a, order, row_start, decay, dt_bias,
    inverses,  # [places, VALUE_HEADS, CHUNK, CHUNK]
    scores,  # the same
    b_stride, a_stride,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, ORDERED: tl.constexpr, LEARNS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The inverse of I + A, and P, of a chunk and value head."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    count = tl.load(row_start + s + 1) - first_row
    if chunk * CHUNK >= count:
        return
    i = tl.arange(0, CHUNK)
    row = first_row + chunk * CHUNK + i
    there = chunk * CHUNK + i < count
    total, learns = _sums(
        b, a, order, row, there, b_stride, a_stride, decay, dt_bias, head, ORDERED, LEARNS
    )
    channel = tl.arange(0, KEY_PAD)
    line = mixed + row.to(tl.int64) * (2 * KEYS + VALUE_HEADS * VALUE_DIM)
    at = line[:, None] + (head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + channel)[None, :]
    mask = there[:, None] & (channel < KEY_DIM)[None, :]
    q = tl.load(at, mask=mask, other=0.0)
    k = tl.load(at + KEYS, mask=mask, other=0.0)
    fade = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    square = square_at(first_row // CHUNK + s + chunk, head, VALUE_HEADS)
    score = dot16(q, tl.trans(k), tl.zeros([CHUNK, CHUNK], tl.float32), ASM)
    score = tl.where(i[:, None] >= i[None, :], score * fade, 0.0)
    tl.store(scores + square, score.to(scores.dtype.element_ty))
    below = dot16(k, tl.trans(k), tl.zeros([CHUNK, CHUNK], tl.float32), ASM)
    below = tl.where(i[:, None] > i[None, :], below * fade * learns[:, None], 0.0)
    solved = inverse_of(below, tl.minimum(CHUNK, count - chunk * CHUNK))
    tl.store(inverses + square, solved.to(inverses.dtype.element_ty))


@triton.jit
def delta_chunk_kernel(
    mixed, b, a, order, row_start, start, decay, dt_bias, inverses, scores,
    memory,  # [S, VALUE_HEADS, VALUE_DIM / PANEL, KEY_DIM, PANEL]
    out,  # [M, VALUE_HEADS * VALUE_DIM]
    b_stride, a_stride,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, PANEL: tl.constexpr,
    COLUMNS: tl.constexpr, ORDERED: tl.constexpr, LEARNS: tl.constexpr, ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's state through all chunks of a sequence.

    EARLY: what the state is to gain of U is rounded before the outputs are computed.
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
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
    column = head * VALUE_DIM + tile * COLUMNS + tl.arange(0, COLUMNS)
    place = first_row // CHUNK + s
    for first in tl.range(0, count, CHUNK, num_stages=1):
        row = first_row + first + i
        there = first + i < count
        total, learns = _sums(
            b, a, order, row, there, b_stride, a_stride, decay, dt_bias, head, ORDERED, LEARNS
        )
        last = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), axis=0)
        line = mixed + row.to(tl.int64) * (2 * KEYS + VALUES)
        mask = there[:, None] & inside[None, :]
        k = tl.load(line[:, None] + (KEYS + query)[None, :], mask=mask, other=0.0)
        v = tl.load(line[:, None] + (2 * KEYS + column)[None, :], mask=there[:, None], other=0.0)
        rounded = state.to(DTYPE)
        grown = tl.exp(total)[:, None]
        lacks = dot16(k, rounded, tl.zeros([CHUNK, COLUMNS], tl.float32), ASM)
        lacks = learns[:, None] * (v.to(tl.float32) - grown * lacks)
        square = square_at(place + first // CHUNK, head, VALUE_HEADS)
        inverse = tl.load(inverses + square)
        new = dot16(inverse, lacks.to(DTYPE), tl.zeros([CHUNK, COLUMNS], tl.float32), ASM)
        q = tl.load(line[:, None] + query[None, :], mask=mask, other=0.0)
        found = dot16(q, rounded, tl.zeros([CHUNK, COLUMNS], tl.float32), ASM) * grown
        if EARLY:
            kept = (new * tl.exp(last - total)[:, None]).to(DTYPE)
        found = dot16(tl.load(scores + square), new.to(DTYPE), found, ASM)
        target = out + row.to(tl.int64)[:, None] * VALUES + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=there[:, None])
        if not EARLY:
            kept = (new * tl.exp(last - total)[:, None]).to(DTYPE)
        state = dot16(tl.trans(k), kept, state * tl.exp(last), ASM)
    tl.store(states, state, mask=inside[:, None])


def in_chunks(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeviceLayerStates,
) -> Tensor:
    """As `recur`, rounded where products read 16 bits."""
    step = states.step
    inverses, scores = matrices_of_chunks(mixed, len(step.start), shape)
    out = mixed.new_empty(len(mixed), shape.values)
    capability = Gpu.of(mixed.device).capability
    solve, chunk, tiles = _bound(shape, step.order is not None, capability)
    rates, strides = (weights.decay, weights.dt_bias), (b.stride(0), a.stride(0))
    heads, slots = shape.value_heads, len(step.start)
    solve(
        (cdiv(step.max_rows, CHUNK.value), heads, slots),
        mixed, b, a, step.order, step.row_start, *rates, inverses, scores, *strides,
    )  # fmt: skip
    chunk(
        (tiles, heads, slots), mixed, b, a, step.order, step.row_start, step.start, *rates,
        inverses, scores, states.memory, out, *strides,
    )  # fmt: skip
    return out


def matrices_of_chunks(mixed: Tensor, sequences: int, shape: DeltaShape) -> tuple[Tensor, Tensor]:
    """Room for inverses and for P of all chunks."""
    room = (2, _places(len(mixed), sequences), shape.value_heads, CHUNK.value, CHUNK.value)
    inverses, scores = mixed.new_empty(room)
    return inverses, scores


def chunks_bytes(tokens: int, sequences: int, shape: DeltaShape, dtype: torch.dtype) -> int:
    """The most bytes `in_chunks` allocates beside its result."""
    each = 2 * shape.value_heads * CHUNK.value**2 * dtype.itemsize
    return _places(tokens, sequences) * each


def _places(tokens: int, sequences: int) -> int:
    """For matrices of chunks: those of a sequence follow its first row / CHUNK + its number."""
    return tokens // CHUNK.value + sequences


@cache
def _bound(
    shape: DeltaShape, ordered: bool, capability: int
) -> tuple[BoundKernel, BoundKernel, int]:
    """What solves chunks, what goes through them, and its programs of a sequence and head."""
    sizes = tile_sizes(shape)
    own = {name: sizes.pop(name) for name in ("PANEL", "COLUMNS")}
    last = {"ORDERED": ordered, "LEARNS": shape.learns, "ASM": use_asm(), "num_stages": 1}
    solve = BoundKernel(delta_solve_kernel, **sizes, **last, num_warps=4)
    hopper = capability == 90
    warps = 4 if hopper else 8  # others have operands in registers, too
    # Later, it would begin in shared memory where `q` begins, and ptxas 12.8 (of Triton 3.6) would
    # have `wgmma` read it by an address that nothing has set. Elsewhere registers are short of it.
    chunk = BoundKernel(delta_chunk_kernel, **sizes, **own, **last, EARLY=hopper, num_warps=warps)
    return solve, chunk, shape.value_dim // own["COLUMNS"]
