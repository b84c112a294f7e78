"""A sequence's new token inside decode attention: its heads normed and rotated, its K and V kept.

Channels come in four planes, the even and the odd ones of both halves of a head, as in
`decode_tiles`. Values are rounded where `rms_norm`, `rope` and `kv_append` round them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.triton.elementwise.rope import turned

from .decode_tiles import load_queries
from .rotate import rotated


class NewTokens(NamedTuple):
    """Keys and values of the new tokens of a decode step, and what is done to keys and queries.

    tables: cos and sin of RoPE, float32 [positions, R / 2]. q_norm, k_norm: weights [D] of an RMS
    norm before or after it, any float dtype. rotated: V of the cache is
    (`rotation.rotate_values`), and neither these values nor the results of attention are. kept: the
    cache has them already; where it has them in the ring, key and value are not read.
    """

    key: Tensor  # [M, kv_heads, D], in the dtype of the ring; its rows may lie apart
    value: Tensor
    tables: tuple[Tensor, Tensor] | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    rotated: bool = False
    kept: bool = False


@triton.jit
def _normed(x, channel, live, weight, inverse):
    gain = tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * inverse[None, :] * gain[:, None]).to(x.dtype)


@triton.jit
def _inverse(x0, x1, x2, x3, eps, HEAD_DIM: tl.constexpr):
    f0, f1, f2, f3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    squares = tl.sum(f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3, axis=0)
    return tl.rsqrt(squares / HEAD_DIM + eps)


@triton.jit
def _normed_planes(x0, x1, x2, x3, channel, live, weight, inverse, HALF: tl.constexpr):
    x0 = _normed(x0, channel, live, weight, inverse)
    x1 = _normed(x1, channel + 1, live, weight, inverse)
    x2 = _normed(x2, channel + HALF, live, weight, inverse)
    x3 = _normed(x3, channel + HALF + 1, live, weight, inverse)
    return x0, x1, x2, x3


@triton.jit
def _turned_plane(
    x, channel, source, live, present, position, cos, sin, weight, inverse,
    TURNED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A plane whose channels' partners may be in any plane."""
    turning = live & (channel < 2 * TURNED)
    second = channel >= TURNED
    pair = tl.where(second, channel - TURNED, channel)
    partner = tl.where(second, channel - TURNED, channel + TURNED)
    angle = position.to(tl.int64) * TURNED + pair
    c = tl.load(cos + angle, mask=turning, other=1.0)[:, None]
    s = tl.load(sin + angle, mask=turning, other=0.0)[:, None]
    mask = turning[:, None] & present[None, :]
    there = tl.load(source + partner[:, None], mask=mask, other=0.0)
    if NORM:
        there = _normed(there, partner, turning, weight, inverse)
    there = there.to(tl.float32)
    both = x.to(tl.float32) * c + tl.where(second[:, None], there, -there) * s
    return both.to(x.dtype)


@triton.jit
def load_new(
    source,  # [1, COLUMNS]
    present,  # [COLUMNS], whether there is such a head
    position, cos, sin, weight, eps,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Four planes [PAIRS, COLUMNS] of heads of a token at `position`, normed and turned.

    TURNED: pairs of channels that are turned, i with i + TURNED. NORM: 0 for none, 1 for one before
    they are, 2 for one after that.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    channel = 2 * tl.arange(0, PAIRS)
    live = channel < HALF
    mask = live[:, None] & present[None, :]
    x0, x1, x2, x3 = load_queries(source + channel[:, None], mask, HALF)
    inverse = tl.zeros([source.shape[1]], tl.float32)
    FIRST: tl.constexpr = NORM == 1
    if FIRST:
        inverse = _inverse(x0, x1, x2, x3, eps, HEAD_DIM)
        x0, x1, x2, x3 = _normed_planes(x0, x1, x2, x3, channel, live, weight, inverse, HALF)
    if TURNED == HALF:
        angle = position.to(tl.int64) * TURNED + channel
        c0 = tl.load(cos + angle, mask=live, other=0.0)[:, None]
        s0 = tl.load(sin + angle, mask=live, other=0.0)[:, None]
        c1 = tl.load(cos + angle + 1, mask=live, other=0.0)[:, None]
        s1 = tl.load(sin + angle + 1, mask=live, other=0.0)[:, None]
        x0, x2 = turned(x0, x2, c0, s0, x0.dtype)
        x1, x3 = turned(x1, x3, c1, s1, x1.dtype)
    elif TURNED > 0:
        x0 = _turned_plane(
            x0, channel, source, live, present, position, cos, sin, weight, inverse,
            TURNED, FIRST,
        )  # fmt: skip
        x1 = _turned_plane(
            x1, channel + 1, source, live, present, position, cos, sin, weight, inverse,
            TURNED, FIRST,
        )  # fmt: skip
        x2 = _turned_plane(
            x2, channel + HALF, source, live, present, position, cos, sin, weight, inverse,
            TURNED, FIRST,
        )  # fmt: skip
        x3 = _turned_plane(
            x3, channel + HALF + 1, source, live, present, position, cos, sin, weight, inverse,
            TURNED, FIRST,
        )  # fmt: skip
    if NORM == 2:
        inverse = _inverse(x0, x1, x2, x3, eps, HEAD_DIM)
        x0, x1, x2, x3 = _normed_planes(x0, x1, x2, x3, channel, live, weight, inverse, HALF)
    return x0, x1, x2, x3


@triton.jit
def load_step(
    q, q_stride, row_start, cos, sin, q_norm, eps, query_beta, query_every, query_ahead,
    s, end, head, in_group,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEW: tl.constexpr, TURNED: tl.constexpr, Q_NORM: tl.constexpr, QUERY_SCALE: tl.constexpr,
):  # fmt: skip
    """Queries of sequence s at position end - 1, four planes [PAIRS, COLUMNS].

    head: [COLUMNS], in_group: which of its KV head each is. Returned beside: the row of q, which
    heads there are, and which of the channels. NEW: queries as they come out of the projection, in
    the row at `row_start`; else as they attend, in row s.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    channel = 2 * tl.arange(0, PAIRS)
    if NEW:
        at_row = tl.load(row_start + s)
        there = in_group < tl.minimum(end, 1) * GROUP
        mask = there[None, :] & (channel < HALF)[:, None]
        position = tl.maximum(end - 1, 0)
        source = q + at_row.to(tl.int64) * q_stride + (head * HEAD_DIM)[None, :]
        q0, q1, q2, q3 = load_new(
            source, there, position, cos, sin, q_norm, eps, HEAD_DIM, PAIRS, TURNED, Q_NORM
        )
        if QUERY_SCALE:
            steps = (position + query_ahead) // query_every
            factor = 1.0 + query_beta * tl.log(1.0 + steps.to(tl.float32))
            q0 = (q0.to(tl.float32) * factor).to(q0.dtype)
            q1 = (q1.to(tl.float32) * factor).to(q1.dtype)
            q2 = (q2.to(tl.float32) * factor).to(q2.dtype)
            q3 = (q3.to(tl.float32) * factor).to(q3.dtype)
    else:
        at_row = s
        there = in_group < GROUP
        mask = there[None, :] & (channel < HALF)[:, None]
        at = head[None, :] * HEAD_DIM + channel[:, None]
        q0, q1, q2, q3 = load_queries(q + s.to(tl.int64) * q_stride + at, mask, HALF)
    return q0, q1, q2, q3, at_row, there, mask


@triton.jit
def keep_new(
    key, value, recent_k, recent_v, count, position, cos, sin, weight, eps,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Norm and turn the key at pointer `key`, and write it and the value to their slots.

    RUN: channels of V that are rotated together, 1 for none. count: 1, or 0 for no token. What was
    written can be read in this program from here on.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    one = tl.arange(0, 1)
    present = one < count
    k0, k1, k2, k3 = load_new(
        key + one[None, :], present, position, cos, sin, weight, eps, HEAD_DIM, PAIRS, TURNED, NORM
    )
    channel = 2 * tl.arange(0, PAIRS)[:, None]
    mask = (channel < HALF) & present[None, :]
    tl.store(recent_k + channel, k0, mask=mask)
    tl.store(recent_k + channel + 1, k1, mask=mask)
    tl.store(recent_k + channel + HALF, k2, mask=mask)
    tl.store(recent_k + channel + HALF + 1, k3, mask=mask)
    every = tl.arange(0, 4 * PAIRS)
    live = every < tl.minimum(count, 1) * HEAD_DIM
    v = tl.load(value + every, mask=live, other=0.0)
    if RUN > 1:
        v = rotated(v.to(tl.float32)[None, :], RUN, False)
        v = tl.reshape(v, (4 * PAIRS,))
    tl.store(recent_v + every, v.to(recent_v.dtype.element_ty), mask=live)
    tl.debug_barrier()
