"""The compiled job of attention over packed blocks: runs of blocks, then their merge."""

from __future__ import annotations

import ctypes

import numpy as np

from . import simd
from .compiled import inner, job
from .packed_block import ROWS, SCRATCH, TOKENS, attend_block, chunk_count
from .pool import finish, take, wait

THREAD_BYTES = SCRATCH + 8 * ROWS  # the scratch of a block, maxima and sums
RUN = 16  # blocks whose partial result is one item; fixed, so that threads change no bit


class PackedArguments(ctypes.Structure):
    """Addresses, sizes in elements, flags."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "queries", "sequences", "heads", "kv_heads", "half", "k_bits", "v_bits", "pool",
                "record", "table", "table_width", "compressed", "firsts", "runs", "partials",
                "scratch", "out", "lse",
            )
        ),
    )  # fmt: skip


(QUERIES, SEQUENCES, HEADS, KV_HEADS, HALF, K_BITS, V_BITS, POOL, RECORD, TABLE, TABLE_WIDTH,
 COMPRESSED, FIRSTS, RUNS, PARTIALS, SCRATCH_AT, OUT, LSE) = (
    getattr(PackedArguments, field[0]).offset for field in PackedArguments._fields_
)  # fmt: skip


def partial_floats(half: int) -> int:
    """Floats of one query's partial result: maximum, sum, output."""
    chunks = 1 if half == 32 else 2 * -(-half // 64)
    return 2 + 64 * chunks


@inner
def _record(args, sequence, kv_head, block):
    width = simd.peek_i64(args + TABLE_WIDTH)
    entry = simd.peek_i64(args + TABLE) + 4 * (sequence * width + block)
    physical = simd.peek_i32(entry)
    index = physical * simd.peek_i64(args + KV_HEADS) + kv_head
    return simd.peek_i64(args + POOL) + index * simd.peek_i64(args + RECORD)


@inner
def _run(args, sequence, kv_head, run, scratch):
    """One run of blocks for all query heads of one KV head."""
    tokens = simd.peek_i32(simd.peek_i64(args + COMPRESSED) + 4 * sequence)
    first = simd.peek_i32(simd.peek_i64(args + FIRSTS) + 4 * sequence)
    begin = max(run * RUN, first // TOKENS)
    end = min((run + 1) * RUN, tokens // TOKENS)
    heads, half = simd.peek_i64(args + HEADS), simd.peek_i64(args + HALF)
    group, runs = heads // simd.peek_i64(args + KV_HEADS), simd.peek_i64(args + RUNS)
    chunks = chunk_count(half)
    for start in range(0, group, ROWS):
        rows = min(ROWS, group - start)
        head = kv_head * group + start
        # Partial results: states [S, runs, Hq, 2], then outputs [S, runs, Hq, chunks * 64].
        index = (sequence * runs + run) * heads + head
        states = simd.peek_i64(args + PARTIALS) + 8 * index
        out = simd.peek_i64(args + PARTIALS)
        out += 4 * (2 * simd.peek_i64(args + SEQUENCES) * runs * heads + index * chunks * 64)
        maxima, sums = scratch + SCRATCH, scratch + SCRATCH + 4 * ROWS
        simd.store_f32(maxima, simd.splat_f32(np.float32(-np.inf)))
        simd.store_f32(sums, simd.splat_f32(np.float32(0.0)))
        for i in range(0, rows * chunks * 256, 64):
            simd.store_f32(out + i, simd.splat_f32(np.float32(0.0)))
        queries = simd.peek_i64(args + QUERIES) + 4 * (sequence * heads + head) * 2 * half
        for block in range(begin, end):
            record = _record(args, sequence, kv_head, block)
            following = record
            if block + 1 < end:
                following = _record(args, sequence, kv_head, block + 1)
            attend_block(
                record, following - record, queries, rows, half, simd.peek_i64(args + K_BITS),
                simd.peek_i64(args + V_BITS), max(0, first - block * TOKENS), maxima, sums, out,
                scratch,
            )  # fmt: skip
        for row in range(rows):
            simd.poke_f32(states + 8 * row, simd.peek_f32(maxima + 4 * row))
            simd.poke_f32(states + 8 * row + 4, simd.peek_f32(sums + 4 * row))


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
def _merge(args, sequence, head):
    """Join the runs of one query: output and log-sum-exp."""
    heads, half = simd.peek_i64(args + HEADS), simd.peek_i64(args + HALF)
    runs, sequences = simd.peek_i64(args + RUNS), simd.peek_i64(args + SEQUENCES)
    lanes = 64 * chunk_count(half)
    states = simd.peek_i64(args + PARTIALS)
    outs = states + 8 * sequences * runs * heads
    first = sequence * runs * heads + head
    peak = np.float32(-np.inf)
    for run in range(runs):
        peak = max(peak, simd.peek_f32(states + 8 * (first + run * heads)))
    index = sequence * heads + head
    to = simd.peek_i64(args + OUT) + 8 * half * index
    if peak == np.float32(-np.inf):
        for i in range(0, 8 * half, 4):
            simd.poke_f32(to + i, np.float32(0.0))
        simd.poke_f32(simd.peek_i64(args + LSE) + 4 * index, peak)
        return
    total = np.float32(0.0)
    for run in range(runs):
        at = states + 8 * (first + run * heads)
        weight = np.exp(simd.peek_f32(at) - peak)
        total += weight * simd.peek_f32(at + 4)
        simd.poke_f32(at, weight)
    for lane in range(lanes):
        channel = _channel(lane, half)
        if channel < 0:
            continue
        value = np.float32(0.0)
        for run in range(runs):
            i = first + run * heads
            value += simd.peek_f32(states + 8 * i) * simd.peek_f32(outs + 4 * (i * lanes + lane))
        simd.poke_f32(to + 4 * channel, value / total)
    simd.poke_f32(simd.peek_i64(args + LSE) + 4 * index, peak + np.log(total))


@job
def packed_job(pool, thread, threads, args):
    """All sequences, KV heads and runs, then all queries."""
    sequences, heads = simd.peek_i64(args + SEQUENCES), simd.peek_i64(args + HEADS)
    kv_heads, runs = simd.peek_i64(args + KV_HEADS), simd.peek_i64(args + RUNS)
    scratch = simd.peek_i64(args + SCRATCH_AT) + thread * THREAD_BYTES
    items = sequences * kv_heads * runs
    item = take(pool, 0)
    while item < items:
        _run(args, item // (kv_heads * runs), item // runs % kv_heads, item % runs, scratch)
        finish(pool, 0)
        item = take(pool, 0)
    wait(pool, 0, items)
    item = take(pool, 1)
    while item < sequences * heads:
        _merge(args, item // heads, item % heads)
        item = take(pool, 1)
