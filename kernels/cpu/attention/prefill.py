"""Prefill attention over an uncompressed cache: four tokens of one head at a time.

Online softmax over runs of 512 keys (Milakov and Gimelshein, 2018). torch's own attention would do,
but its threads keep spinning after it, on the cores that the next job computes on.
"""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner, job
from qoff.kernels.cpu.jit.pool import take

from . import fields as f
from .append import append_all
from .decode import first_key
from .soft_cap import cap_scores

ROWS = 4  # tokens whose scores are computed together
_RUN = 512  # keys between two corrections of the running softmax
_SCORES = 4 * (_RUN + 16)  # bytes of one row of scores


@inner
def tile_bytes(head_dim):
    """Bytes of scratch that a thread needs: scores, maximum and sum, output of each row."""
    return ROWS * (_SCORES + 64 + 4 * head_dim)


@inner
def _scores(q0, q1, q2, q3, keys, dim, scale, out):
    """Scores of four queries against 16 keys; row i goes to out + i * _SCORES."""
    zero = simd.splat_f32(np.float32(0.0))
    a0, a1, a2, a3 = zero, zero, zero, zero
    b0, b1, b2, b3 = zero, zero, zero, zero
    for i in range(0, 4 * dim, 8):
        k = simd.load_f32(keys + 16 * i)
        a0 = simd.mul_add(simd.splat_f32(simd.peek_f32(q0 + i)), k, a0)
        a1 = simd.mul_add(simd.splat_f32(simd.peek_f32(q1 + i)), k, a1)
        a2 = simd.mul_add(simd.splat_f32(simd.peek_f32(q2 + i)), k, a2)
        a3 = simd.mul_add(simd.splat_f32(simd.peek_f32(q3 + i)), k, a3)
        k = simd.load_f32(keys + 16 * i + 64)
        b0 = simd.mul_add(simd.splat_f32(simd.peek_f32(q0 + i + 4)), k, b0)
        b1 = simd.mul_add(simd.splat_f32(simd.peek_f32(q1 + i + 4)), k, b1)
        b2 = simd.mul_add(simd.splat_f32(simd.peek_f32(q2 + i + 4)), k, b2)
        b3 = simd.mul_add(simd.splat_f32(simd.peek_f32(q3 + i + 4)), k, b3)
    factor = simd.splat_f32(scale)
    simd.store_f32(out, simd.mul(simd.add(a0, b0), factor))
    simd.store_f32(out + _SCORES, simd.mul(simd.add(a1, b1), factor))
    simd.store_f32(out + 2 * _SCORES, simd.mul(simd.add(a2, b2), factor))
    simd.store_f32(out + 3 * _SCORES, simd.mul(simd.add(a3, b3), factor))


@inner
def _softmax_row(scores, start, last, low, high, state):
    """Turn scores of keys [start, last) into weights; those outside of [low, high) weigh nothing.

    state: running maximum, sum, and the factor that corrects what was summed before.
    """
    for key in range(start, min(low, last)):
        simd.poke_f32(scores + 4 * (key - start), np.float32(-np.inf))
    for key in range(max(high, start), last):
        simd.poke_f32(scores + 4 * (key - start), np.float32(-np.inf))
    before = simd.peek_f32(state)
    top = simd.splat_f32(before)
    for i in range(0, 4 * (last - start), 64):
        top = simd.maximum(simd.load_f32(scores + i), top)
    peak = simd.max_f32(top)
    if peak == np.float32(-np.inf):  # this row sees none of these keys
        for i in range(0, 4 * (last - start), 64):
            simd.store_f32(scores + i, simd.splat_f32(np.float32(0.0)))
        simd.poke_f32(state + 8, np.float32(1.0))
        return
    minus_peak = simd.splat_f32(-peak)
    total = simd.splat_f32(np.float32(0.0))
    for i in range(0, 4 * (last - start), 64):
        p = simd.exp(simd.add(simd.load_f32(scores + i), minus_peak))
        simd.store_f32(scores + i, p)
        total = simd.add(total, p)
    correction = np.exp(before - peak)
    simd.poke_f32(state, peak)
    simd.poke_f32(state + 4, simd.peek_f32(state + 4) * correction + simd.sum_f32(total))
    simd.poke_f32(state + 8, correction)


@inlined
def _weigh_vectors(scores, values, count, dim, states, out, both):
    """One or `both` of two neighbouring vectors of the sums of four rows; see `_weigh`."""
    row = 4 * dim
    c0, c1 = simd.splat_f32(simd.peek_f32(states + 8)), simd.splat_f32(simd.peek_f32(states + 72))
    c2, c3 = (
        simd.splat_f32(simd.peek_f32(states + 136)),
        simd.splat_f32(simd.peek_f32(states + 200)),
    )
    a0, a1 = simd.mul(simd.load_f32(out), c0), simd.mul(simd.load_f32(out + row), c1)
    a2, a3 = simd.mul(simd.load_f32(out + 2 * row), c2), simd.mul(simd.load_f32(out + 3 * row), c3)
    b0, b1, b2, b3 = a0, a1, a2, a3
    if both:
        b0 = simd.mul(simd.load_f32(out + 64), c0)
        b1 = simd.mul(simd.load_f32(out + row + 64), c1)
        b2 = simd.mul(simd.load_f32(out + 2 * row + 64), c2)
        b3 = simd.mul(simd.load_f32(out + 3 * row + 64), c3)
    for key in range(count):
        at, w = values + row * key, scores + 4 * key
        w0, w1 = simd.splat_f32(simd.peek_f32(w)), simd.splat_f32(simd.peek_f32(w + _SCORES))
        w2 = simd.splat_f32(simd.peek_f32(w + 2 * _SCORES))
        w3 = simd.splat_f32(simd.peek_f32(w + 3 * _SCORES))
        v = simd.load_f32(at)
        a0, a1 = simd.mul_add(w0, v, a0), simd.mul_add(w1, v, a1)
        a2, a3 = simd.mul_add(w2, v, a2), simd.mul_add(w3, v, a3)
        if both:
            v = simd.load_f32(at + 64)
            b0, b1 = simd.mul_add(w0, v, b0), simd.mul_add(w1, v, b1)
            b2, b3 = simd.mul_add(w2, v, b2), simd.mul_add(w3, v, b3)
    simd.store_f32(out, a0)
    simd.store_f32(out + row, a1)
    simd.store_f32(out + 2 * row, a2)
    simd.store_f32(out + 3 * row, a3)
    if both:
        simd.store_f32(out + 64, b0)
        simd.store_f32(out + row + 64, b1)
        simd.store_f32(out + 2 * row + 64, b2)
        simd.store_f32(out + 3 * row + 64, b3)


@inner
def _weigh(scores, values, count, dim, states, sums):
    """sums[row] = sums[row] * correction[row] + weights[row] @ values, for keys 0..count-1."""
    paired = 4 * dim // 128 * 128
    for column in range(0, paired, 128):
        _weigh_vectors(scores, values + column, count, dim, states, sums + column, True)
    if paired < 4 * dim:
        _weigh_vectors(scores, values + paired, count, dim, states, sums + paired, False)


@inner
def _position(args, token):
    return simd.peek_i64(simd.peek_i64(args + f.PLACES) + 8 * token)


@inner
def _slot(args, token):
    return simd.peek_i64(simd.peek_i64(args + f.SLOTS) + 8 * token)


@inner
def _run_of_keys(args, token, rows, head, start, last, scratch):
    """Add keys [start, last) of the cache to the running attention of `rows` tokens."""
    dim = simd.peek_i64(args + f.DIM)
    group = simd.peek_i64(args + f.HEADS) // simd.peek_i64(args + f.KV_HEADS)
    cache = _slot(args, token) * simd.peek_i64(args + f.KV_HEADS) + head // group
    cache = 4 * cache * simd.peek_i64(args + f.CAPACITY) * dim
    stride = simd.peek_i64(args + f.QKV_STRIDE)
    q0 = simd.peek_i64(args + f.QKV) + token * stride + 4 * dim * head
    q1, q2 = q0 + min(1, rows - 1) * stride, q0 + min(2, rows - 1) * stride
    q3 = q0 + min(3, rows - 1) * stride
    keys = simd.peek_i64(args + f.KEYS) + cache
    for key in range(start, last, 16):
        _scores(
            q0, q1, q2, q3, keys + 4 * key * dim, dim, simd.peek_f32(args + f.SCALE),
            scratch + 4 * (key - start),
        )  # fmt: skip
    soft_cap = simd.peek_f32(args + f.SOFT_CAP)
    states = scratch + ROWS * _SCORES
    whole = (last - start + 15) // 16 * 16 + start
    for row in range(ROWS):
        position = _position(args, token + min(row, rows - 1))
        low, high = first_key(args, position), position + 1
        if soft_cap != np.float32(0.0):
            cap_scores(scratch + row * _SCORES, whole - start, soft_cap)
        _softmax_row(scratch + row * _SCORES, start, whole, low, high, states + 64 * row)
    values = simd.peek_i64(args + f.VALUES) + cache + 4 * start * dim
    _weigh(scratch, values, last - start, dim, states, states + 64 * ROWS)


@inner
def _attend_rows(args, token, rows, head, scratch):
    """Attend up to four consecutive tokens of one sequence and write their output."""
    dim = simd.peek_i64(args + f.DIM)
    states = scratch + ROWS * _SCORES
    sums = states + 64 * ROWS
    sinks = simd.peek_i64(args + f.SINKS)
    for row in range(ROWS):
        sink = np.float32(-np.inf) if sinks == 0 else simd.peek_f32(sinks + 4 * head)
        simd.poke_f32(states + 64 * row, sink)
        simd.poke_f32(states + 64 * row + 4, np.float32(0.0 if sinks == 0 else 1.0))
    for i in range(0, 4 * dim * ROWS, 64):
        simd.store_f32(sums + i, simd.splat_f32(np.float32(0.0)))
    end = _position(args, token + rows - 1) + 1
    start = first_key(args, _position(args, token)) // 16 * 16
    while start < end:
        _run_of_keys(args, token, rows, head, start, min(start + _RUN, end), scratch)
        start += _RUN
    for row in range(rows):
        out = simd.peek_i64(args + f.OUT) + (token + row) * simd.peek_i64(args + f.OUT_STRIDE)
        total = simd.splat_f32(np.float32(1.0) / simd.peek_f32(states + 64 * row + 4))
        lse = simd.peek_i64(args + f.LSE)
        if lse != 0:
            at = lse + 4 * ((token + row) * simd.peek_i64(args + f.HEADS) + head)
            peak = simd.peek_f32(states + 64 * row)
            simd.poke_f32(at, peak + np.log(simd.peek_f32(states + 64 * row + 4)))
        for i in range(0, 4 * dim, 64):
            value = simd.load_f32(sums + 4 * dim * row + i)
            simd.store_f32(out + 4 * dim * head + i, simd.mul(value, total))


@inner
def _attend_item(args, first, last, head, scratch):
    """Tokens [first, last), split where a sequence ends."""
    token = first
    while token < last:
        rows = 1
        while token + rows < last and _slot(args, token + rows) == _slot(args, token):
            rows += 1
        _attend_rows(args, token, rows, head, scratch)
        token += rows


@job
def append_prefill_job(pool, thread, threads, args):
    """Append every token's keys and values, then attend."""
    tokens, heads = simd.peek_i64(args + f.M), simd.peek_i64(args + f.HEADS)
    dim = simd.peek_i64(args + f.DIM)
    # The keys of a vector are of neighbouring tokens: two threads would write to the same lines.
    append_all(pool, args, 16 if tokens >= 16 * threads else 1)
    scratch = simd.peek_i64(args + f.PARTIALS) + thread * tile_bytes(dim)
    items = (tokens + ROWS - 1) // ROWS * heads
    item = take(pool, 1)
    while item < items:
        first = item // heads * ROWS
        _attend_item(args, first, min(first + ROWS, tokens), item % heads, scratch)
        item = take(pool, 1)
