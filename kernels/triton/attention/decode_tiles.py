"""The inner loops of decode attention: columns of queries against packed blocks and a ring.

Queries, scores and outputs are columns; their channels come in four planes, the even and the odd
ones of both halves of a head, as `kv_pairs` makes them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from qoff.kernels.triton.linear.nibbles import dot16
from qoff.kernels.triton.linear.planes import halves

from .kv_pairs import load_channel_pairs, load_code_pairs, raised_pairs
from .kv_tiles import OFFSET, TOKENS, cap_scores, load_token_params

# Probabilities are 2**6 times what they are, or float16 would round those of small values of V
# away. V that spans more than 15 000 within a token would overflow.
BOOST = tl.constexpr(6.0)
RING_TOKENS = tl.constexpr(32)  # of a tile of the recent window: it has four times the bytes


@triton.jit
def load_queries(source, mask, HALF: tl.constexpr):
    """Queries [PAIRS, COLUMNS] of the even and odd channels of both halves."""
    a = tl.load(source, mask=mask, other=0)
    b = tl.load(source + 1, mask=mask, other=0)
    c = tl.load(source + HALF, mask=mask, other=0)
    d = tl.load(source + HALF + 1, mask=mask, other=0)
    return a, b, c, d


@triton.jit
def _load_ring(base, place, mask, HEAD_DIM: tl.constexpr):
    """Keys or values [64, PAIRS] of the even and odd channels of both halves."""
    DTYPE: tl.constexpr = base.dtype.element_ty
    pairs = base.to(tl.pointer_type(tl.uint32)) + place
    a, b = halves(tl.load(pairs, mask=mask, other=0), DTYPE)
    c, d = halves(tl.load(pairs + HEAD_DIM // 4, mask=mask, other=0), DTYPE)
    return a, b, c, d


@triton.jit
def attend_ring(
    q0, q1, q2, q3, keys, values, row, ring, first, end, scale, soft_cap,
    COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, SOFT_CAP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Attend to the uncompressed tokens first..end-1; each tile has one that counts."""
    o0 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    o1 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    o2 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    o3 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    top = tl.full([COLUMNS], -float("inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    pair = tl.arange(0, PAIRS)
    for base in tl.range(first, end, RING_TOKENS, num_stages=1):
        position = base + tl.arange(0, RING_TOKENS)
        inside = (position < end)[:, None]
        mask = inside & (pair < HEAD_DIM // 4)[None, :]
        place = (position % ring)[:, None] * (row // 2) + pair[None, :]
        k0, k1, k2, k3 = _load_ring(keys, place, mask, HEAD_DIM)
        s = tl.zeros([RING_TOKENS, COLUMNS], tl.float32)
        s = dot16(k1, q1, dot16(k0, q0, s, ASM), ASM)
        s = dot16(k3, q3, dot16(k2, q2, s, ASM), ASM) * scale
        if SOFT_CAP:
            s = cap_scores(s, soft_cap)
        s = tl.where(inside, s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 0))
        fade = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[None, :])
        top = new_top
        total = total * fade + tl.sum(p, 0)
        v0, v1, v2, v3 = _load_ring(values, place, mask, HEAD_DIM)
        p = p.to(v0.dtype)
        o0 = dot16(tl.trans(v0), p, o0 * fade[None, :], ASM)
        o1 = dot16(tl.trans(v1), p, o1 * fade[None, :], ASM)
        o2 = dot16(tl.trans(v2), p, o2 * fade[None, :], ASM)
        o3 = dot16(tl.trans(v3), p, o3 * fade[None, :], ASM)
    return o0, o1, o2, o3, top, total


@triton.jit
def attend_blocks(
    q0, q1, q2, q3, pool, block_stride, table, begin, stop, first_key, scale, soft_cap,
    COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr, PARTS: tl.constexpr, K_SCALE: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend to the packed blocks begin..stop-1 of one sequence and KV head.

    With STAGES of 2 Triton copies the next block to shared memory meanwhile. For that, what a round
    hands to the next must be made in that round, and V be loaded in the order in which the product
    wants it.
    """
    token = tl.arange(0, TOKENS)
    pair = tl.arange(0, PAIRS)
    K_RAISE: tl.constexpr = 1.0 if K_BITS == 8 else 0.0625
    V_RAISE: tl.constexpr = 1.0 if V_BITS == 8 else 0.0625
    r2 = (q2 * K_RAISE).to(tl.float16)
    r3 = (q3 * K_RAISE).to(tl.float16)
    o0 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    o1 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    o2 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    o3 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    top = tl.full([COLUMNS], -float("inf"), tl.float32)
    ones = tl.full([16, TOKENS], 1.0, tl.float16)
    offset = tl.full([16, PAIRS], -OFFSET, tl.float16)
    offset_low = tl.full([16, TOKENS], -OFFSET, tl.float16)
    offset_high = tl.full([16, TOKENS], -OFFSET * V_RAISE, tl.float16)
    # Rows of these are equal: sums over tokens by dots, reduced once at the end.
    sums = tl.zeros([16, COLUMNS], tl.float32)
    minima_low = tl.zeros([16, COLUMNS], tl.float32)
    minima_high = tl.zeros([16, COLUMNS], tl.float32)
    block = tl.load(table + begin, mask=begin < stop, other=0)
    for b in tl.range(begin, stop, num_stages=STAGES):
        record = pool + block.to(tl.int64) * block_stride
        block = tl.load(table + b + 1, mask=b + 1 < stop, other=0)
        k_first, k_second = load_code_pairs(
            record, token[:, None], pair[None, :], HEAD_DIM, PAIRS, K_BITS
        )
        ks0, ks1, ks2, ks3 = load_channel_pairs(record + K_SCALE, HEAD_DIM, PAIRS)
        km0, km1, km2, km3 = load_channel_pairs(record + K_SCALE + 2 * HEAD_DIM, HEAD_DIM, PAIRS)
        v_first, v_second = load_code_pairs(
            record + V_CODES, token[None, :], pair[:, None], HEAD_DIM, PAIRS, V_BITS
        )
        vs_low, vs_high, vm_low, vm_high = load_token_params(record + V_SCALE, PARTS, STAGES > 1)

        k0, k1, k2, k3 = raised_pairs(k_first, k_second, K_BITS, ASM)
        bias = tl.dot(tl.broadcast_to(km0[None, :], (16, PAIRS)), q0)
        bias = tl.dot(tl.broadcast_to(km1[None, :], (16, PAIRS)), q1, acc=bias)
        bias = tl.dot(tl.broadcast_to(km2[None, :], (16, PAIRS)), q2, acc=bias)
        bias = tl.dot(tl.broadcast_to(km3[None, :], (16, PAIRS)), q3, acc=bias)
        f0 = q0 * ks0[:, None]
        f1 = q1 * ks1[:, None]
        f2 = r2 * ks2[:, None]
        f3 = r3 * ks3[:, None]
        bias = tl.dot(offset, f1, acc=tl.dot(offset, f0, acc=bias))
        bias = tl.dot(offset, f3, acc=tl.dot(offset, f2, acc=bias))
        s = tl.dot(k1, f1, acc=tl.dot(k0, f0))
        s = tl.dot(k3, f3, acc=tl.dot(k2, f2, acc=s))
        shift = tl.max(bias, 0) * scale
        # Scores are s * factor + shift.
        factor = scale
        if SOFT_CAP:
            s = cap_scores(s * scale + shift[None, :], soft_cap)
            factor = 1.0
            shift = tl.zeros([COLUMNS], tl.float32)
        if WINDOW:
            seen = b * TOKENS + token >= first_key
            s = tl.where(seen[:, None], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 0) * factor + shift)
        fade = tl.exp2(top - new_top)[None, :]
        p = tl.exp2(s * factor + (shift + BOOST - new_top)[None, :]).to(tl.float16)
        top = new_top

        p_low = p * vs_low[:, None]
        p_high = p * vs_high[:, None]
        sums = tl.dot(ones, p, acc=sums * fade)
        row_low = tl.broadcast_to(vm_low[None, :], (16, TOKENS))
        row_high = tl.broadcast_to(vm_high[None, :], (16, TOKENS))
        minima_low = tl.dot(row_low, p, acc=minima_low * fade)
        minima_high = tl.dot(row_high, p, acc=minima_high * fade)
        minima_low = tl.dot(offset_low, p_low, acc=minima_low)
        minima_high = tl.dot(offset_high, p_high, acc=minima_high)
        v0, v1, v2, v3 = raised_pairs(v_first, v_second, V_BITS, ASM)
        o0 = tl.dot(v0, p_low, acc=o0 * fade)
        o1 = tl.dot(v1, p_low, acc=o1 * fade)
        o2 = tl.dot(v2, p_high, acc=o2 * fade)
        o3 = tl.dot(v3, p_high, acc=o3 * fade)
    low = tl.max(minima_low, 0)[None, :]
    high = tl.max(minima_high, 0)[None, :]
    o0 += low
    o1 += low
    o2 = o2 * V_RAISE + high
    o3 = o3 * V_RAISE + high
    return o0, o1, o2, o3, top - BOOST, tl.max(sums, 0)
