"""Pieces of prefill attention inside Triton kernels: tiles of queries against tiles of keys.

Queries are rows (position by position, the heads of a GQA group next to each other), keys columns.
Channels come in two halves, as the packed cache has them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from qoff.kernels.triton.linear.nibbles import byte_values, dot16, low_high

from .kv_tiles import (
    TOKENS,
    cap_scores,
    first_seen,
    load_code_rows,
    load_token_params,
    load_where,
)


@triton.jit
def load_codes(codes, HEAD_DIM: tl.constexpr, PAD: tl.constexpr, BITS: tl.constexpr):
    """Codes uint8 of both halves, [64, PAD] each (one tile below 8 bits); 0 where padded."""
    HALF: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = HEAD_DIM if BITS == 8 else HALF
    token = tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, PAD)[None, :]
    inside = channel < HALF
    first = load_code_rows(codes, token, channel, inside, WIDTH, BITS, PAD == HALF)
    second = first
    if BITS == 8:
        second = load_code_rows(codes + HALF, token, channel, inside, WIDTH, BITS, PAD == HALF)
    return first, second


@triton.jit
def load_channel_params(params, HEAD_DIM: tl.constexpr, PAD: tl.constexpr):
    """Scales of both planes and minima of both planes, float16 [PAD] each."""
    HALF: tl.constexpr = HEAD_DIM // 2
    at = params.to(tl.pointer_type(tl.float16)) + tl.arange(0, PAD)
    inside = tl.arange(0, PAD) < HALF
    a = load_where(at, inside, PAD == HALF)
    b = load_where(at + HALF, inside, PAD == HALF)
    c = load_where(at + HEAD_DIM, inside, PAD == HALF)
    d = load_where(at + HEAD_DIM + HALF, inside, PAD == HALF)
    return a, b, c, d


@triton.jit
def exact_planes(first, second, BITS: tl.constexpr, ASM: tl.constexpr):
    """The codes of both halves as float16."""
    if BITS <= 4:
        low, high = low_high(first, tl.float16, ASM)
    else:
        low = byte_values(first, tl.float16, ASM)
        high = byte_values(second, tl.float16, ASM)
    return low, high


@triton.jit
def load_packed_tile(
    record, HEAD_DIM: tl.constexpr, PAD: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr, PARTS: tl.constexpr, K_SCALE: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """K and V of a packed block as float16, two halves [64, PAD] each."""
    k_first, k_second = load_codes(record, HEAD_DIM, PAD, K_BITS)
    a, b, c, d = load_channel_params(record + K_SCALE, HEAD_DIM, PAD)
    v_first, v_second = load_codes(record + V_CODES, HEAD_DIM, PAD, V_BITS)
    vs_low, vs_high, vm_low, vm_high = load_token_params(record + V_SCALE, PARTS, False)
    k_low, k_high = exact_planes(k_first, k_second, K_BITS, ASM)
    k_low = k_low * a[None, :] + c[None, :]
    k_high = k_high * b[None, :] + d[None, :]
    v_low, v_high = exact_planes(v_first, v_second, V_BITS, ASM)
    v_low = v_low * vs_low[:, None] + vm_low[:, None]
    v_high = v_high * vs_high[:, None] + vm_high[:, None]
    return k_low, k_high, v_low, v_high


@triton.jit
def load_packed_values(
    record, HEAD_DIM: tl.constexpr, PAD: tl.constexpr, V_BITS: tl.constexpr, PARTS: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """V of a packed block alone."""
    first, second = load_codes(record + V_CODES, HEAD_DIM, PAD, V_BITS)
    low_scale, high_scale, low_min, high_min = load_token_params(record + V_SCALE, PARTS, False)
    low, high = exact_planes(first, second, V_BITS, ASM)
    low = low * low_scale[:, None] + low_min[:, None]
    high = high * high_scale[:, None] + high_min[:, None]
    return low, high


@triton.jit
def load_halves(base, row, inside, HALF: tl.constexpr, PAD: tl.constexpr, MASK: tl.constexpr):
    """Both halves of the rows at `base + row`, [rows, PAD] each; 0 where not inside."""
    channel = tl.arange(0, PAD)
    at = base + row[:, None] + channel[None, :]
    mask = (channel < HALF)[None, :]
    if MASK:
        mask = inside[:, None] & mask
    low = load_where(at, mask, PAD == HALF and not MASK)
    high = load_where(at + HALF, mask, PAD == HALF and not MASK)
    return low, high


@triton.jit
def attend(
    q_low, q_high, k_low, k_high, v_low, v_high, seen, scale, soft_cap, low, high, top, total,
    SOFT_CAP: tl.constexpr, MASK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Online softmax over one tile of keys; `seen` [rows, keys] says which count if MASK."""
    s = tl.zeros([q_low.shape[0], k_low.shape[0]], tl.float32)
    s = dot16(q_low, tl.trans(k_low), s, ASM)
    s = dot16(q_high, tl.trans(k_high), s, ASM)
    if SOFT_CAP:
        s = cap_scores(s * scale, soft_cap)
    # The scale is positive: it is applied together with the subtraction of the maximum.
    factor = 1.0 if SOFT_CAP else scale
    p, fade, top, total = weights(s, seen, factor, top, total, MASK)
    p = p.to(v_low.dtype)
    low = dot16(p, v_low, low * fade[:, None], ASM)
    high = dot16(p, v_high, high * fade[:, None], ASM)
    return low, high, top, total


@triton.jit
def weights(s, seen, factor, top, total, MASK: tl.constexpr):
    """Weights of keys with scores `factor` times s, the factor of what was summed up before, and
    the new maximum and sum."""
    if MASK:
        s = tl.where(seen, s, -float("inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * factor)
    base = tl.where(new_top == -float("inf"), 0.0, new_top) if MASK else new_top
    p = tl.exp2(s * factor - base[:, None])
    fade = tl.exp2(top - base)
    return p, fade, new_top, total * fade + tl.sum(p, 1)


@triton.jit
def attend_rows(
    q_low, q_high, keys, values, key_stride, value_stride, begin, stop, end, modulus, shift,
    position, window, scale, soft_cap, low, high, top, total,
    HALF: tl.constexpr, PAD: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr, RING: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend to dense keys at positions begin..stop-1, of which those from `end` on do not exist.

    The row of a position is its distance from `shift`, or its remainder by `modulus` in a ring.
    Without CAUSAL, RING and WINDOW every key of every tile counts.
    """
    MASK: tl.constexpr = CAUSAL or RING or WINDOW
    # Masks and loads that are not pipelined take registers: half a tile.
    KEYS: tl.constexpr = TOKENS // 2 if CAUSAL or RING else TOKENS
    for base in tl.range(begin, stop, KEYS, num_stages=STAGES):
        key = base + tl.arange(0, KEYS)
        row = (key % modulus if RING else key - shift).to(tl.int64)
        inside = key < end
        k_low, k_high = load_halves(keys, row * key_stride, inside, HALF, PAD, CAUSAL or RING)
        v_low, v_high = load_halves(values, row * value_stride, inside, HALF, PAD, CAUSAL or RING)
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] >= first_seen(position, window, WINDOW)[:, None])
        low, high, top, total = attend(
            q_low, q_high, k_low, k_high, v_low, v_high, seen, scale, soft_cap,
            low, high, top, total, SOFT_CAP, MASK, ASM,
        )  # fmt: skip
    return low, high, top, total
