"""Tiles of latent keys inside Triton kernels, in 16 bits, and what queries make of them.

Either half of a key's channels has half of the latent, then half of the channels that RoPE rotates
(`layout.kv_format`): a key is four tiles, those two of both halves.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from qoff.kernels.triton.attention.kv_tiles import LN2, TOKENS, load_code_rows, load_float16
from qoff.kernels.triton.attention.prefill_tiles import exact_planes, weights
from qoff.kernels.triton.linear.nibbles import dot16


@triton.jit
def load_part(
    rows, inside, first, COUNT: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """SIZE channels from `first` on of both halves of the vectors at pointers rows [N].

    Two tiles [N, SIZE]; 0 where not inside, and from channel COUNT on.
    """
    channel = first + tl.arange(0, SIZE)
    at = rows[:, None] + channel[None, :]
    mask = inside[:, None] & (channel < COUNT)[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)


@triton.jit
def load_packed_part(
    record, first, COUNT: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    BITS: tl.constexpr, K_SCALE: tl.constexpr, ALL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The same of the 64 keys of a packed block, in float16. ALL: no channel is from COUNT on."""
    WIDTH: tl.constexpr = 2 * HALF if BITS == 8 else HALF
    channel = first + tl.arange(0, SIZE)
    inside = channel < COUNT
    token = tl.arange(0, TOKENS)[:, None]
    column = channel[None, :]
    a = load_code_rows(record, token, column, inside[None, :], WIDTH, BITS, ALL)
    b = a
    if BITS == 8:
        b = load_code_rows(record + HALF, token, column, inside[None, :], WIDTH, BITS, ALL)
    low, high = exact_planes(a, b, BITS, ASM)
    params = (record + K_SCALE).to(tl.pointer_type(tl.float16))
    low = low * load_float16(params, first, COUNT, SIZE, ALL)[None, :]
    low += load_float16(params + 2 * HALF, first, COUNT, SIZE, ALL)[None, :]
    high = high * load_float16(params + HALF, first, COUNT, SIZE, ALL)[None, :]
    high += load_float16(params + 3 * HALF, first, COUNT, SIZE, ALL)[None, :]
    return low, high


@triton.jit
def packed_scores(
    queries, inside, record, HALF: tl.constexpr, CHUNK: tl.constexpr, BITS: tl.constexpr,
    K_SCALE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products [rows, 64] of the queries at pointers `queries` with the keys of a packed block.

    Some channels at a time: operands of all of them are more than registers hold.
    """
    s = tl.zeros([queries.shape[0], TOKENS], tl.float32)
    for first in tl.range(0, HALF, CHUNK, num_stages=STAGES):
        q_low, q_high = load_part(queries, inside, first, HALF, CHUNK, HALF)
        k_low, k_high = load_packed_part(
            record, first, HALF, CHUNK, HALF, BITS, K_SCALE, HALF % CHUNK == 0, ASM
        )
        s = dot16(q_low.to(tl.float16), tl.trans(k_low), s, ASM)
        s = dot16(q_high.to(tl.float16), tl.trans(k_high), s, ASM)
    return s


@triton.jit
def _dense_scores(
    queries, inside, keys, there, HALF: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The same with the keys at pointers `keys`."""
    s = tl.zeros([queries.shape[0], keys.shape[0]], tl.float32)
    for first in tl.range(0, HALF, CHUNK, num_stages=STAGES):
        q_low, q_high = load_part(queries, inside, first, HALF, CHUNK, HALF)
        k_low, k_high = load_part(keys, there, first, HALF, CHUNK, HALF)
        s = dot16(q_low, tl.trans(k_low), s, ASM)
        s = dot16(q_high, tl.trans(k_high), s, ASM)
    return s


@triton.jit
def attend_dense(
    queries, inside, keys, stride, values, value_stride, first, end, modulus, shift, position,
    scale, low, high, top, total,
    EACH: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, RING: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    listed=None,
):  # fmt: skip
    """Attend to keys that are not packed, at positions first..end-1, or at those in a list.

    The row of a position is its remainder by `modulus` in a ring, or its distance from `shift`.
    listed: pointer to positions, int32, of which those in places first..end-1 are attended to.
    """
    for base in tl.range(first, end, KEYS, num_stages=1):
        key = base + tl.arange(0, KEYS)
        there = key < end
        if listed is not None:
            key = tl.load(listed + key, mask=there, other=0)
        row = (key % modulus if RING else key - shift).to(tl.int64)
        score = _dense_scores(queries, inside, keys + row * stride, there, HALF, CHUNK, STAGES, ASM)
        seen = there[None, :] & (key[None, :] <= position[:, None])
        v_low, v_high = load_part(values + row * value_stride, there, 0, EACH, PAD, HALF)
        p, fade, top, total = weights(score, seen, scale, top, total, True)
        p = p.to(v_low.dtype)
        low = dot16(p, v_low, low * fade[:, None], ASM)
        high = dot16(p, v_high, high * fade[:, None], ASM)
    return low, high, top, total


@triton.jit
def store_found(
    outs, lses, target, inside, low, high, top, total, EACH: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """Write what rows of queries found, at the vectors with the numbers `target`, and its
    log-sum-exp."""
    safe = tl.where(total == 0, 1.0, total)
    lse = tl.where(total == 0, -float("inf"), (top + tl.log2(safe)) * LN2)
    tl.store(lses + target, lse, mask=inside)
    inverse = (1.0 / safe)[:, None]
    channel = tl.arange(0, PAD)[None, :]
    mask = inside[:, None] & (channel < EACH)
    at = outs + target[:, None] * (2 * EACH) + channel
    DTYPE: tl.constexpr = outs.dtype.element_ty
    tl.store(at, (low * inverse).to(DTYPE), mask=mask)
    tl.store(at + EACH, (high * inverse).to(DTYPE), mask=mask)
