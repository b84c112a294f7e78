"""Decode attention over an uncompressed cache: each token against all keys before it.

Keys are attended in runs of 512, by all query heads of a KV head together, and partial results are
merged by their maxima and sums; the runs depend on positions alone, so the result does not depend
on the threads.
"""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.layout.layer_cache import RUN_TOKENS

from . import fields as f
from .append import append_all, attends
from .product import ROWS, product, tile_rows
from .scratch import SCORES, STATE_BYTES
from .soft_cap import cap_scores
from .softmax import SUMS, mask, row_bytes, softmax
from .window import first_seen

RUN = RUN_TOKENS  # keys per partial result
_SCRATCH_BYTES = ROWS * SCORES  # of a thread


@inner
def _state(args, threads, token, run, head):
    """Where the partial results of a tile begin, whose first row is a head's."""
    place = (token * simd.peek_i64(args + f.RUNS) + run) * simd.peek_i64(args + f.HEADS) + head
    partials = simd.peek_i64(args + f.PARTIALS) + threads * _SCRATCH_BYTES
    return partials + place * row_bytes(simd.peek_i64(args + f.VALUE_DIM))


@inner
def first_key(args, token):
    """The oldest place of the cache that a token's query sees."""
    window = simd.peek_i64(args + f.WINDOW)
    if window == 0:
        return 0
    place = simd.peek_i64(simd.peek_i64(args + f.PLACES) + 8 * token)
    position = simd.peek_i64(simd.peek_i64(args + f.POSITIONS) + 8 * token)
    return max(0, first_seen(place, position, window))


@inner
def _attend_tile(args, rows, queries, keys, values, first, count, scores, state):
    """Attend with some heads' queries to keys [first, count), of the vectors where those begin.

    What is found is the tile's state, and the output that is not divided by the sums yet.
    """
    dim, value_dim = simd.peek_i64(args + f.DIM), simd.peek_i64(args + f.VALUE_DIM)
    vectors = (count + 15) // 16
    product(
        4, rows, queries, 4 * dim, keys, 64 * dim, 64, vectors, dim, scores, SCORES, 0,
        simd.peek_f32(args + f.SCALE),
    )  # fmt: skip
    soft_cap = simd.peek_f32(args + f.SOFT_CAP)
    if soft_cap != np.float32(0.0):
        for row in range(rows):
            cap_scores(scores + row * SCORES, 16 * vectors, soft_cap)
    mask(rows, scores, SCORES, vectors, first, count, 0)
    for i in range(0, 128, 64):
        simd.store_f32(state + i, simd.splat_f32(np.float32(-np.inf)))
        simd.store_f32(state + SUMS + i, simd.splat_f32(np.float32(0.0)))
    softmax(4, rows, scores, SCORES, vectors, state)
    product(
        4, rows, scores, SCORES, values, 64, 4 * value_dim, value_dim // 16, count,
        state + STATE_BYTES, 4 * value_dim, 0, np.float32(1.0),
    )  # fmt: skip


@inner
def _attend_item(args, thread, threads, item):
    """One run of keys for all query heads of one KV head."""
    dim, heads = simd.peek_i64(args + f.DIM), simd.peek_i64(args + f.HEADS)
    kv_heads, runs = simd.peek_i64(args + f.KV_HEADS), simd.peek_i64(args + f.RUNS)
    token, run, kv_head = item // (kv_heads * runs), item % runs, item // runs % kv_heads
    position = simd.peek_i64(simd.peek_i64(args + f.PLACES) + 8 * token)
    first = max(first_key(args, token), run * RUN)
    last = min(position + 1, (run + 1) * RUN)
    if first >= last:
        return
    start, group = first // 16 * 16, heads // kv_heads
    slot = simd.peek_i64(simd.peek_i64(args + f.SLOTS) + 8 * token)
    place = 4 * ((slot * kv_heads + kv_head) * simd.peek_i64(args + f.CAPACITY) + start)
    keys = simd.peek_i64(args + f.KEYS) + place * dim
    values = simd.peek_i64(args + f.VALUES) + place * simd.peek_i64(args + f.VALUE_DIM)
    queries = simd.peek_i64(args + f.QKV) + token * simd.peek_i64(args + f.QKV_STRIDE)
    scores = simd.peek_i64(args + f.PARTIALS) + thread * _SCRATCH_BYTES
    head = kv_head * group
    while head < (kv_head + 1) * group:
        rows = tile_rows((kv_head + 1) * group - head)
        _attend_tile(
            args, rows, queries + 4 * dim * head, keys, values, first - start, last - start,
            scores, _state(args, threads, token, run, head),
        )  # fmt: skip
        head += rows


@inner
def _merge(args, threads, token, head, row):
    """Join the partial results of one query head, which is a row of a tile."""
    dim, heads = simd.peek_i64(args + f.VALUE_DIM), simd.peek_i64(args + f.HEADS)
    states, size = _state(args, threads, token, 0, head - row), heads * row_bytes(dim)
    position = simd.peek_i64(simd.peek_i64(args + f.PLACES) + 8 * token)
    low, high = first_key(args, token) // RUN, position // RUN + 1
    lse, sinks = simd.peek_i64(args + f.LSE), simd.peek_i64(args + f.SINKS)
    sink = np.float32(-np.inf) if sinks == 0 else simd.peek_f32(sinks + 4 * head)
    peak = sink
    for run in range(low, high):
        peak = max(peak, simd.peek_f32(states + run * size + 16 * row))
    total = np.float32(0.0) if sinks == 0 else np.exp(sink - peak)
    for run in range(low, high):
        at = states + run * size + 16 * row
        weight = np.exp(simd.peek_f32(at) - peak)
        total += weight * simd.peek_f32(at + SUMS)
    if lse != 0:
        simd.poke_f32(lse + 4 * (token * heads + head), peak + np.log(total))
    out = simd.peek_i64(args + f.OUT) + token * simd.peek_i64(args + f.OUT_STRIDE) + 4 * dim * head
    for run in range(low, high):
        at = states + run * size
        weight = simd.splat_f32(np.exp(simd.peek_f32(at + 16 * row) - peak) / total)
        part = at + STATE_BYTES + 4 * dim * row
        for i in range(0, 4 * dim, 64):
            value = simd.mul(weight, simd.load_f32(part + i))
            simd.store_f32(
                out + i, value if run == low else simd.add(simd.load_f32(out + i), value)
            )


@inner
def _merge_group(args, threads, token, kv_head):
    group = simd.peek_i64(args + f.HEADS) // simd.peek_i64(args + f.KV_HEADS)
    done = 0
    while done < group:
        rows = tile_rows(group - done)
        for row in range(rows):
            _merge(args, threads, token, kv_head * group + done + row, row)
        done += rows


@job
def append_attend_job(pool, thread, threads, args):
    """Append every token's keys and values, then attend."""
    append_all(pool, args, 1)
    kv_heads, runs = simd.peek_i64(args + f.KV_HEADS), simd.peek_i64(args + f.RUNS)
    pairs = simd.peek_i64(args + f.M) * kv_heads
    item = take(pool, 1)
    while item < pairs * runs:
        if attends(args, item // (kv_heads * runs)):
            _attend_item(args, thread, threads, item)
            if runs == 1:  # which is all there is
                _merge_group(args, threads, item // kv_heads, item % kv_heads)
        finish(pool, 1)
        item = take(pool, 1)
    if runs == 1:
        return
    wait(pool, 1, pairs * runs)
    item = take(pool, 2)
    while item < pairs:
        if attends(args, item // kv_heads):
            _merge_group(args, threads, item // kv_heads, item % kv_heads)
        item = take(pool, 2)
