"""The compiled job of attention over packed blocks: runs of blocks, then their merge."""

from __future__ import annotations

import ctypes

import numpy as np

from ..layer_cache import ITEM_FIELDS
from . import simd
from .compiled import inner, job
from .hadamard import rotate, rotate_back
from .packed_block import ROWS, SCRATCH, TOKENS, attend_block, chunk_count
from .pool import finish, take, wait

# The scratch of a block, then maxima and sums, and the first token each row attends.
_MAXIMA, _SUMS, _FIRSTS = SCRATCH, SCRATCH + 4 * ROWS, SCRATCH + 8 * ROWS
THREAD_BYTES = SCRATCH + 16 * ROWS
_ITEM_BYTES = 8 * len(ITEM_FIELDS)


class PackedArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes in elements."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "queries", "stride", "tokens", "heads", "kv_heads", "half", "k_bits", "v_bits",
                "pool", "record", "block_bytes", "table", "table_width", "items", "item_count",
                "window", "runs", "run_blocks", "partials", "scratch", "out", "out_stride", "lse",
                "merge", "chosen", "counts", "width", "rotated",
            )
        ),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )  # fmt: skip


(QUERIES, STRIDE, M, HEADS, KV_HEADS, HALF, K_BITS, V_BITS, POOL, RECORD, BLOCK_BYTES, TABLE,
 TABLE_WIDTH, ITEMS, ITEM_COUNT, WINDOW, RUNS, RUN_BLOCKS, PARTIALS, SCRATCH_AT, OUT, OUT_STRIDE,
 LSE, MERGE, CHOSEN, COUNTS, WIDTH, ROTATED, SCALE, SOFT_CAP) = (
    getattr(PackedArguments, field[0]).offset for field in PackedArguments._fields_
)  # fmt: skip


def partial_floats(half: int) -> int:
    """Floats of one query's partial result: maximum, sum, output."""
    chunks = 1 if half == 32 else 2 * -(-half // 64)
    return 2 + 64 * chunks


@inner
def _record(args, slot, kv_head, block):
    entry = simd.peek_i64(args + TABLE) + 4 * (slot * simd.peek_i64(args + TABLE_WIDTH) + block)
    base = simd.peek_i64(args + POOL) + simd.peek_i32(entry) * simd.peek_i64(args + BLOCK_BYTES)
    return base + kv_head * simd.peek_i64(args + RECORD)


@inner
def _block(chosen, place):
    """An entry of a list of blocks; without one all blocks are listed."""
    return simd.peek_i32(chosen + 4 * place) if chosen != 0 else place


@inner
def _partial(args, token, run, head):
    """Addresses of the state (maximum, sum) and of the output of one query over one run."""
    runs, heads = simd.peek_i64(args + RUNS), simd.peek_i64(args + HEADS)
    index = (token * runs + run) * heads + head
    states = simd.peek_i64(args + PARTIALS)
    outs = states + 8 * simd.peek_i64(args + M) * runs * heads
    return states + 8 * index, outs + 256 * chunk_count(simd.peek_i64(args + HALF)) * index


@inner
def _range(args, item, kv_head, run, token):
    """What a run attends to: [begin, end) of the list of blocks at an address, 0 for all blocks."""
    blocks, window = simd.peek_i64(args + RUN_BLOCKS), simd.peek_i64(args + WINDOW)
    first, last = run * blocks, (run + 1) * blocks
    chosen, counts = simd.peek_i64(args + CHOSEN), simd.peek_i64(args + COUNTS)
    if counts != 0:
        index = simd.peek_i64(item) * simd.peek_i64(args + KV_HEADS) + kv_head
        chosen += 4 * index * simd.peek_i64(args + WIDTH)
        return first, min(last, simd.peek_i32(counts + 4 * index)), chosen
    position, packed = simd.peek_i64(item + 24) + token, simd.peek_i64(item + 32)
    oldest = max(0, position + 1 - window) if window > 0 else 0
    return max(first, oldest // TOKENS), min(last, packed // TOKENS), chosen


@inner
def _first_record(args, number, otherwise):
    """The record that an item of the work begins with; `otherwise` where it has none."""
    item, kv_head, run = _item(args, number)
    begin, end, chosen = _range(args, item, kv_head, run, 0)
    if begin >= end:
        return otherwise
    return _record(args, simd.peek_i64(item + 16), kv_head, _block(chosen, begin))


@inner
def _item(args, number):
    """Address, KV head and run of an item of the work."""
    runs = simd.peek_i64(args + RUNS)
    each = simd.peek_i64(args + KV_HEADS) * runs
    item = simd.peek_i64(args + ITEMS) + _ITEM_BYTES * (number // each)
    return item, number // runs % simd.peek_i64(args + KV_HEADS), number % runs


@inner
def _attend_rows(args, item, kv_head, run, head, heads, token, tokens, after, scratch):
    """One run of blocks for `heads` query heads of `tokens` tokens: ROWS rows at most."""
    first_row, slot = simd.peek_i64(item), simd.peek_i64(item + 16)
    position = simd.peek_i64(item + 24) + token
    window, half = simd.peek_i64(args + WINDOW), simd.peek_i64(args + HALF)
    rows, floats = heads * tokens, 64 * chunk_count(half)
    begin, end, chosen = _range(args, item, kv_head, run, token)
    maxima, sums = scratch + _MAXIMA, scratch + _SUMS
    simd.store_f32(maxima, simd.splat_f32(np.float32(-np.inf)))
    simd.store_f32(sums, simd.splat_f32(np.float32(0.0)))
    # Rows of a token are neighbours in the partial results only if there is one token or run.
    out = scratch + THREAD_BYTES
    for i in range(0, 4 * rows * floats, 64):
        simd.store_f32(out + i, simd.splat_f32(np.float32(0.0)))
    stride = simd.peek_i64(args + STRIDE)
    queries = simd.peek_i64(args + QUERIES) + (first_row + token) * stride + 8 * half * head
    for place in range(begin, end):
        block = _block(chosen, place)
        record = _record(args, slot, kv_head, block)
        following = after
        if place + 1 < end:
            following = _record(args, slot, kv_head, _block(chosen, place + 1))
        for row in range(rows):
            seen = position + row // heads + 1 - window if window > 0 else 0
            simd.poke_i64(scratch + _FIRSTS + 8 * row, seen - block * TOKENS)
        attend_block(
            record, following - record, queries, stride, heads, rows,
            simd.peek_f32(args + SCALE), simd.peek_f32(args + SOFT_CAP), half,
            simd.peek_i64(args + K_BITS), simd.peek_i64(args + V_BITS), scratch + _FIRSTS, maxima,
            sums, out, scratch,
        )  # fmt: skip
    for row in range(rows):
        state, to = _partial(args, first_row + token + row // heads, run, head + row % heads)
        total = simd.peek_f32(sums + 4 * row)
        peak = simd.peek_f32(maxima + 4 * row)
        simd.poke_f32(state, peak if total > np.float32(0.0) else np.float32(-np.inf))
        simd.poke_f32(state + 4, total)
        for i in range(0, 4 * floats, 64):
            simd.store_f32(to + i, simd.load_f32(out + 4 * row * floats + i))


@inner
def _attend_item(args, item, kv_head, run, after, scratch):
    """One run of blocks for all query heads of one KV head and some tokens of a sequence."""
    group = simd.peek_i64(args + HEADS) // simd.peek_i64(args + KV_HEADS)
    tokens = simd.peek_i64(item + 8)
    heads = min(group, ROWS)
    together = ROWS // heads
    for token in range(0, tokens, together):
        for head in range(0, group, heads):
            _attend_rows(
                args, item, kv_head, run, kv_head * group + head, min(heads, group - head), token,
                min(together, tokens - token), after, scratch,
            )  # fmt: skip


@inner
def _channel(lane, half):
    """The channel that a lane of the output [chunks * 64] holds, or -1."""
    chunk, vector, word, i = lane // 64, lane % 64 // 16, lane % 16 // 4, lane % 4
    inside = 16 * word + 4 * vector + i
    if half == 32:
        return inside
    per_half = (half + 63) // 64
    inside += chunk % per_half * 64
    if inside >= half:
        return -1
    return inside + half * (chunk // per_half)


@inner
def _merge(args, token, head):
    """Join the runs of one query, and what `out` and `lse` hold of it already if MERGE says so."""
    half, runs = simd.peek_i64(args + HALF), simd.peek_i64(args + RUNS)
    to = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE) + 8 * half * head
    lse = simd.peek_i64(args + LSE) + 4 * (token * simd.peek_i64(args + HEADS) + head)
    before = np.float32(-np.inf)
    if simd.peek_i64(args + MERGE) != 0:
        before = simd.peek_f32(lse)
    peak = np.float32(-np.inf)
    for run in range(runs):
        state, _ = _partial(args, token, run, head)
        peak = max(peak, simd.peek_f32(state))
    if peak == np.float32(-np.inf) and before > peak:
        return  # nothing to add
    peak = max(peak, before)
    if peak == np.float32(-np.inf):
        for i in range(0, 8 * half, 4):
            simd.poke_f32(to + i, np.float32(0.0))
        simd.poke_f32(lse, peak)
        return
    run_channels = simd.peek_i64(args + ROTATED)
    kept = np.exp(before - peak)
    if run_channels != 0 and kept > np.float32(0.0):
        rotate(to, 2 * half, run_channels)
    total = kept
    for run in range(runs):
        state, _ = _partial(args, token, run, head)
        weight = np.exp(simd.peek_f32(state) - peak)
        total += weight * simd.peek_f32(state + 4)
        simd.poke_f32(state, weight)
    for lane in range(64 * chunk_count(half)):
        channel = _channel(lane, half)
        if channel < 0:
            continue
        value = np.float32(0.0)
        if kept > np.float32(0.0):
            value = kept * simd.peek_f32(to + 4 * channel)
        for run in range(runs):
            state, out = _partial(args, token, run, head)
            value += simd.peek_f32(state) * simd.peek_f32(out + 4 * lane)
        simd.poke_f32(to + 4 * channel, value / total)
    if run_channels != 0:
        rotate_back(to, 2 * half, run_channels)
    simd.poke_f32(lse, peak + np.log(total))


@job
def packed_job(pool, thread, threads, args):
    """All items, KV heads and runs, then all queries."""
    kv_heads, runs = simd.peek_i64(args + KV_HEADS), simd.peek_i64(args + RUNS)
    lanes = 64 * chunk_count(simd.peek_i64(args + HALF))
    scratch = simd.peek_i64(args + SCRATCH_AT) + thread * (THREAD_BYTES + 4 * ROWS * lanes)
    work = simd.peek_i64(args + ITEM_COUNT) * kv_heads * runs
    item = take(pool, 0)
    while item < work:
        following = take(pool, 0)
        after = simd.peek_i64(args + POOL)
        if following < work:
            after = _first_record(args, following, after)
        at, kv_head, run = _item(args, item)
        _attend_item(args, at, kv_head, run, after, scratch)
        finish(pool, 0)
        item = following
    wait(pool, 0, work)
    queries = simd.peek_i64(args + M) * simd.peek_i64(args + HEADS)
    heads = simd.peek_i64(args + HEADS)
    item = take(pool, 1)
    while item < queries:
        _merge(args, item // heads, item % heads)
        item = take(pool, 1)
