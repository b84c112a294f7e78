"""Queries and keys normalized and rotated in place, keys and values appended to the cache."""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait

from . import fields as f


@inner
def _normalize(x, count, norm, eps):
    """RMSNorm of `count` numbers in place: those of a head, or of all heads; norm 0: no weights."""
    total = simd.splat_f32(np.float32(0.0))
    for i in range(0, 4 * count, 64):
        v = simd.load_f32(x + i)
        total = simd.mul_add(v, v, total)
    factor = np.float32(1.0) / np.sqrt(simd.sum_f32(total) / np.float32(count) + eps)
    for i in range(0, 4 * count, 64):
        v = simd.mul(simd.load_f32(x + i), simd.splat_f32(factor))
        if norm != 0:
            v = simd.mul(v, simd.load_f32(norm + i))
        simd.store_f32(x + i, v)


@inner
def _rotate_head(x, pairs, apart, cos, sin):
    """Rotate pairs (i, i + apart) by the angles of one position; what lies behind them stays."""
    end, y = 4 * pairs, x + 4 * apart
    whole = end // 64 * 64
    minus = simd.splat_f32(np.float32(-1.0))
    for i in range(0, whole, 64):
        a, b = simd.load_f32(x + i), simd.load_f32(y + i)
        c, s = simd.load_f32(cos + i), simd.load_f32(sin + i)
        simd.store_f32(x + i, simd.mul_add(a, c, simd.mul(simd.mul(b, s), minus)))
        simd.store_f32(y + i, simd.mul_add(b, c, simd.mul(a, s)))
    for i in range(whole, end, 4):
        p, q = simd.peek_f32(x + i), simd.peek_f32(y + i)
        u, w = simd.peek_f32(cos + i), simd.peek_f32(sin + i)
        simd.poke_f32(x + i, p * u - q * w)
        simd.poke_f32(y + i, q * u + p * w)


@inner
def _copy_values(values, latent, key, value, dim):
    """V of a token, [dim], or the first latent / 2 channels of either half of its key."""
    if latent == 0:
        for i in range(0, 4 * dim, 64):
            simd.store_f32(values + i, simd.load_f32(value + i))
        return
    for i in range(0, 2 * latent, 64):
        simd.store_f32(values + i, simd.load_f32(key + i))
        simd.store_f32(values + 2 * latent + i, simd.load_f32(key + 2 * dim + i))


@inner
def _scale_queries(queries, count, beta, steps):
    """Multiply `count` numbers of queries that are so many steps of `QueryScale` away."""
    factor = np.float32(1.0) + beta * np.log(np.float32(1 + steps))
    for i in range(0, 4 * count, 64):
        simd.store_f32(queries + i, simd.mul(simd.load_f32(queries + i), simd.splat_f32(factor)))


@inner
def _append_token(args, token):
    """Normalize, rotate and scale one token's queries and keys in place; copy keys and values."""
    dim, heads = simd.peek_i64(args + f.DIM), simd.peek_i64(args + f.HEADS)
    kv_heads, capacity = simd.peek_i64(args + f.KV_HEADS), simd.peek_i64(args + f.CAPACITY)
    row = simd.peek_i64(args + f.QKV) + token * simd.peek_i64(args + f.QKV_STRIDE)
    position = simd.peek_i64(simd.peek_i64(args + f.POSITIONS) + 8 * token)
    place = simd.peek_i64(simd.peek_i64(args + f.PLACES) + 8 * token)
    slot = simd.peek_i64(simd.peek_i64(args + f.SLOTS) + 8 * token)
    eps = simd.peek_f32(args + f.NORM_EPS)
    cos = simd.peek_i64(args + f.COS)
    pairs = simd.peek_i64(args + f.PAIRS)
    angles = position * pairs * 4
    whole_norms, last = simd.peek_i64(args + f.WHOLE_NORMS), simd.peek_i64(args + f.NORM_LAST)
    latent, width = simd.peek_i64(args + f.LATENT), simd.peek_i64(args + f.VALUE_DIM)
    apart = pairs if latent == 0 else dim // 2
    own = kv_heads if simd.peek_i64(args + f.APPENDS) != 0 else 0
    for head in range(own):  # a key goes to as many lines as it has channels
        to = 4 * ((slot * kv_heads + head) * capacity + place // 16 * 16) * dim
        for i in range(dim):
            simd.prefetch_write(simd.peek_i64(args + f.KEYS) + to + 64 * i)
    if whole_norms != 0:
        _normalize(row, dim * heads, simd.peek_i64(args + f.Q_NORM), eps)
        _normalize(row + 4 * dim * heads, dim * own, simd.peek_i64(args + f.K_NORM), eps)
    for head in range(heads + own):
        x = row + 4 * dim * head
        norm = simd.peek_i64(args + f.Q_NORM) if head < heads else simd.peek_i64(args + f.K_NORM)
        of_head = norm != 0 and whole_norms == 0
        if of_head and last == 0:
            _normalize(x, dim, norm, eps)
        if cos != 0:
            turned = x + 2 * latent
            _rotate_head(turned, pairs, apart, cos + angles, simd.peek_i64(args + f.SIN) + angles)
        if of_head and last != 0:
            _normalize(x, dim, norm, eps)
    every = simd.peek_i64(args + f.QUERY_EVERY)
    ahead = position + simd.peek_i64(args + f.QUERY_AHEAD)
    if every != 0 and ahead >= every:  # log 1 before
        _scale_queries(row, dim * heads, simd.peek_f32(args + f.QUERY_BETA), ahead // every)
    for head in range(own):
        to = 4 * (slot * kv_heads + head) * capacity
        key = row + 4 * dim * (heads + head)
        value = row + 4 * dim * (heads + kv_heads + head)
        if simd.peek_i64(args + f.VALUE_NORM) != 0:
            _normalize(value, dim, 0, eps)
        keys = simd.peek_i64(args + f.KEYS) + to * dim + 4 * (place // 16 * 16 * dim + place % 16)
        values = simd.peek_i64(args + f.VALUES) + to * width + 4 * place * width
        for i in range(dim):
            simd.poke_f32(keys + 64 * i, simd.peek_f32(key + 4 * i))
        _copy_values(values, latent, key, value, dim)


@inner
def append_all(pool, args, together):
    """Phase 0 of the attention jobs: all tokens, so many neighbours by one thread."""
    tokens = simd.peek_i64(args + f.M)
    items = (tokens + together - 1) // together
    item = take(pool, 0)
    while item < items:
        for token in range(item * together, min((item + 1) * together, tokens)):
            _append_token(args, token)
        finish(pool, 0)
        item = take(pool, 0)
    wait(pool, 0, items)


@inner
def attends(args, token):
    """Whether a token attends to all tokens before it; chosen ones come to others later."""
    below = simd.peek_i64(args + f.BELOW)
    return below == 0 or simd.peek_i64(simd.peek_i64(args + f.POSITIONS) + 8 * token) < below


@job
def append_job(pool, thread, threads, args):
    """Append every token's keys and values, and nothing else."""
    append_all(pool, args, 16 if simd.peek_i64(args + f.M) >= 16 * threads else 1)
