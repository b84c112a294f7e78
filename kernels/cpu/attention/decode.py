"""Decode attention over an uncompressed cache: each token against all keys before it.

Keys are attended in runs of 512 whose partial results are merged by their maximum and sum; the
runs depend on positions alone, so the result does not depend on the threads.
"""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool import finish, take, wait
from qoff.kernels.layout.layer_cache import RUN_TOKENS

from . import fields as f
from .append import append_all
from .soft_cap import capped

RUN = RUN_TOKENS  # keys per partial result


@inner
def partial_bytes(value_dim):
    """Bytes of one partial result: maximum, sum, scores of a run, output."""
    return 64 + 4 * (RUN + 32) + 4 * value_dim


@inner
def _scores(query, keys, dim, scale, soft_cap):
    """Scaled and capped scores of one query against 16 keys."""
    zero = simd.splat_f32(np.float32(0.0))
    a, b, c, d = zero, zero, zero, zero
    for i in range(0, dim, 4):
        q, k = query + 4 * i, keys + 64 * i
        a = simd.mul_add(simd.splat_f32(simd.peek_f32(q)), simd.load_f32(k), a)
        b = simd.mul_add(simd.splat_f32(simd.peek_f32(q + 4)), simd.load_f32(k + 64), b)
        c = simd.mul_add(simd.splat_f32(simd.peek_f32(q + 8)), simd.load_f32(k + 128), c)
        d = simd.mul_add(simd.splat_f32(simd.peek_f32(q + 12)), simd.load_f32(k + 192), d)
    scores = simd.mul(simd.add(simd.add(a, b), simd.add(c, d)), simd.splat_f32(scale))
    return capped(scores, soft_cap) if soft_cap != np.float32(0.0) else scores


@inner
def _weigh_values(weights, values, first, last, dim, out):
    """out[dim] = sum of weights[i] * values[i] over keys [first, last)."""
    zero = simd.splat_f32(np.float32(0.0))
    column = 0
    while column + 64 <= dim:
        a, b, c, d = zero, zero, zero, zero
        for i in range(first, last):
            w = simd.splat_f32(simd.peek_f32(weights + 4 * (i - first)))
            v = values + 4 * (i * dim + column)
            a = simd.mul_add(w, simd.load_f32(v), a)
            b = simd.mul_add(w, simd.load_f32(v + 64), b)
            c = simd.mul_add(w, simd.load_f32(v + 128), c)
            d = simd.mul_add(w, simd.load_f32(v + 192), d)
        to = out + 4 * column
        simd.store_f32(to, a)
        simd.store_f32(to + 64, b)
        simd.store_f32(to + 128, c)
        simd.store_f32(to + 192, d)
        column += 64
    while column < dim:
        a = zero
        for i in range(first, last):
            w = simd.splat_f32(simd.peek_f32(weights + 4 * (i - first)))
            a = simd.mul_add(w, simd.load_f32(values + 4 * (i * dim + column)), a)
        simd.store_f32(out + 4 * column, a)
        column += 16


@inner
def _attend_run(query, keys, values, first, last, dim, width, scale, soft_cap, partial):
    """Softmax over keys [first, last): partial = [max, sum, scratch of 512 + 32, out[width]]."""
    start = first // 16 * 16
    scores = partial + 64
    top = simd.splat_f32(np.float32(-np.inf))
    for i in range(start, last, 16):
        s = _scores(query, keys + 4 * i * dim, dim, scale, soft_cap)
        simd.store_f32(scores + 4 * (i - start), s)
        if i < first or i + 16 > last:
            for lane in range(i, i + 16):
                if lane < first or lane >= last:
                    simd.poke_f32(scores + 4 * (lane - start), np.float32(-np.inf))
            s = simd.load_f32(scores + 4 * (i - start))
        top = simd.maximum(s, top)
    peak = simd.max_f32(top)
    minus_peak = simd.splat_f32(-peak)
    total = simd.splat_f32(np.float32(0.0))
    for i in range(start, last, 16):
        p = simd.exp(simd.add(simd.load_f32(scores + 4 * (i - start)), minus_peak))
        simd.store_f32(scores + 4 * (i - start), p)
        total = simd.add(total, p)
    simd.poke_f32(partial, peak)
    simd.poke_f32(partial + 4, simd.sum_f32(total))
    _weigh_values(
        scores + 4 * (first - start), values, first, last, width, partial + 64 + 4 * (RUN + 32)
    )


@inner
def first_key(args, position):
    """The oldest key that a query sees."""
    window = simd.peek_i64(args + f.WINDOW)
    return max(0, position + 1 - window) if window > 0 else 0


@inner
def _attend_item(args, token, kv_head, run):
    """One run of keys for all query heads of one KV head."""
    dim, heads = simd.peek_i64(args + f.DIM), simd.peek_i64(args + f.HEADS)
    kv_heads, capacity = simd.peek_i64(args + f.KV_HEADS), simd.peek_i64(args + f.CAPACITY)
    position = simd.peek_i64(simd.peek_i64(args + f.PLACES) + 8 * token)
    first = max(first_key(args, position), run * RUN)
    last = min(position + 1, (run + 1) * RUN)
    if first >= last:
        return
    slot = simd.peek_i64(simd.peek_i64(args + f.SLOTS) + 8 * token)
    cache, width = 4 * (slot * kv_heads + kv_head) * capacity, simd.peek_i64(args + f.VALUE_DIM)
    keys, values = (
        simd.peek_i64(args + f.KEYS) + cache * dim,
        simd.peek_i64(args + f.VALUES) + cache * width,
    )
    queries = simd.peek_i64(args + f.QKV) + token * simd.peek_i64(args + f.QKV_STRIDE)
    group, runs = heads // kv_heads, simd.peek_i64(args + f.RUNS)
    for head in range(kv_head * group, (kv_head + 1) * group):
        index = (token * heads + head) * runs + run
        partial = simd.peek_i64(args + f.PARTIALS) + index * partial_bytes(width)
        _attend_run(
            queries + 4 * dim * head, keys, values, first, last, dim, width,
            simd.peek_f32(args + f.SCALE), simd.peek_f32(args + f.SOFT_CAP), partial,
        )  # fmt: skip


@inner
def _merge(args, token, head):
    """Join the partial results of one query head."""
    dim, runs = simd.peek_i64(args + f.VALUE_DIM), simd.peek_i64(args + f.RUNS)
    size = partial_bytes(dim)
    index = (token * simd.peek_i64(args + f.HEADS) + head) * runs
    partials = simd.peek_i64(args + f.PARTIALS) + index * size
    position = simd.peek_i64(simd.peek_i64(args + f.PLACES) + 8 * token)
    low, high = first_key(args, position) // RUN, position // RUN + 1
    lse = simd.peek_i64(args + f.LSE)
    sinks = simd.peek_i64(args + f.SINKS)
    sink = np.float32(-np.inf) if sinks == 0 else simd.peek_f32(sinks + 4 * head)
    peak = sink
    for run in range(low, high):
        peak = max(peak, simd.peek_f32(partials + run * size))
    total = np.exp(sink - peak)
    for run in range(low, high):
        at = partials + run * size
        total += np.exp(simd.peek_f32(at) - peak) * simd.peek_f32(at + 4)
    if lse != 0:
        at = lse + 4 * (token * simd.peek_i64(args + f.HEADS) + head)
        simd.poke_f32(at, peak + np.log(total))
    out = simd.peek_i64(args + f.OUT) + token * simd.peek_i64(args + f.OUT_STRIDE) + 4 * dim * head
    for i in range(0, 4 * dim, 64):
        value = simd.splat_f32(np.float32(0.0))
        for run in range(low, high):
            at = partials + run * size
            weight = np.exp(simd.peek_f32(at) - peak) / total
            part = simd.load_f32(at + 64 + 4 * (RUN + 32) + i)
            value = simd.mul_add(simd.splat_f32(weight), part, value)
        simd.store_f32(out + i, value)


@inner
def _attend_all(pool, args):
    tokens, heads = simd.peek_i64(args + f.M), simd.peek_i64(args + f.HEADS)
    kv_heads, runs = simd.peek_i64(args + f.KV_HEADS), simd.peek_i64(args + f.RUNS)
    items = tokens * kv_heads * runs
    item = take(pool, 1)
    while item < items:
        _attend_item(args, item // (kv_heads * runs), item // runs % kv_heads, item % runs)
        finish(pool, 1)
        item = take(pool, 1)
    wait(pool, 1, items)
    item = take(pool, 2)
    while item < tokens * heads:
        _merge(args, item // heads, item % heads)
        item = take(pool, 2)


@job
def append_attend_job(pool, thread, threads, args):
    """Append every token's keys and values, then attend."""
    append_all(pool, args, 1)
    _attend_all(pool, args)
