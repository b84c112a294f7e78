"""The compiled job of attention over packed blocks: runs of blocks, and their merge."""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.attention.hadamard import rotate, rotate_back
from qoff.kernels.cpu.attention.window import first_seen
from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.cpu.operands import int64s, offsets
from qoff.kernels.layout.layer_cache import ITEM_FIELDS

from . import scratch as sizes
from .block import (
    LN_2,
    LOG2_E,
    chunk_count,
    lane_of,
    score_block,
    sum_block,
    weigh_block,
)
from .scratch import (
    FIRSTS,
    MAXIMA,
    QUERY_PLACES,
    ROWS,
    STATE_BYTES,
    SUMS,
    THREAD_BYTES,
    TOGETHER,
    TOKENS,
)

_thread_bytes = inner(sizes.thread_bytes)
ITEM_BYTES = 8 * len(ITEM_FIELDS)
_BEFORE = 8 * ITEM_FIELDS.index("tokens before")


class PackedArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes in elements; first: row of the first partial results.

    below: rows from this position on attend to nothing here; 0: there are none.
    """

    _fields_ = (
        *int64s(
            "queries", "stride", "tokens", "heads", "kv_heads", "half", "k_bits", "v_bits",
            "pool", "record", "block_bytes", "table", "table_width", "items", "item_count",
            "window", "runs", "run_blocks", "partials", "scratch", "out", "out_stride", "lse",
            "merge", "chosen", "counts", "width", "rotated", "latent", "first", "below",
        ),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )  # fmt: skip
    OF_LAYER = ("pool",)


(QUERIES, STRIDE, M, HEADS, KV_HEADS, HALF, K_BITS, V_BITS, POOL, RECORD, BLOCK_BYTES, TABLE,
 TABLE_WIDTH, ITEMS, ITEM_COUNT, WINDOW, RUNS, RUN_BLOCKS, PARTIALS, SCRATCH_AT, OUT, OUT_STRIDE,
 LSE, MERGE, CHOSEN, COUNTS, WIDTH, ROTATED, LATENT, FIRST, BELOW, SCALE, SOFT_CAP) = (
    offsets(PackedArguments)
)  # fmt: skip


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
def _partial(args, token, run, head, scratch):
    """Addresses of the state (maximum, sum) and of the output of one query over one run.

    Of one run in all they are the thread's.
    """
    runs, heads = simd.peek_i64(args + RUNS), simd.peek_i64(args + HEADS)
    out_bytes = 256 * chunk_count(simd.peek_i64(args + HALF))
    if runs == 1:
        state = scratch + THREAD_BYTES + ROWS * out_bytes
        return state, state + STATE_BYTES
    index = ((token - simd.peek_i64(args + FIRST)) * runs + run) * heads + head
    states = simd.peek_i64(args + PARTIALS)
    outs = states + 8 * simd.peek_i64(args + M) * runs * heads
    return states + 8 * index, outs + out_bytes * index


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
    oldest = 0
    if window != 0:
        oldest = max(0, first_seen(position, position + simd.peek_i64(item + _BEFORE), window))
    return max(first, oldest // TOKENS), min(last, packed // TOKENS), chosen


@inner
def _kv_heads_together(args):
    """KV heads whose blocks are attended in turns: their records are neighbours in memory.

    Only where each has one token's queries, and the same blocks; ROWS bounds their queries.
    """
    decode = simd.peek_i64(args + M) == simd.peek_i64(args + ITEM_COUNT)
    if not decode or simd.peek_i64(args + COUNTS) != 0:
        return 1
    kv_heads = simd.peek_i64(args + KV_HEADS)
    count = min(kv_heads, max(1, ROWS // _padded(simd.peek_i64(args + HEADS) // kv_heads)))
    while kv_heads % count != 0:
        count -= 1
    return count


@inner
def _padded(rows):
    """Rows rounded up to whole groups of TOGETHER."""
    return (rows + TOGETHER - 1) // TOGETHER * TOGETHER


@inner
def _item(args, number, together):
    """Address, first KV head and run of an item of the work."""
    runs = simd.peek_i64(args + RUNS)
    parts = simd.peek_i64(args + KV_HEADS) // together
    item = simd.peek_i64(args + ITEMS) + ITEM_BYTES * (number // (parts * runs))
    return item, number // runs % parts * together, number % runs


@inner
def _first_record(args, number, together, otherwise):
    """The record that an item of the work begins with; `otherwise` where it has none."""
    item, kv_head, run = _item(args, number, together)
    begin, end, chosen = _range(args, item, kv_head, run, 0)
    if begin >= end:
        return otherwise
    return _record(args, simd.peek_i64(item + 16), kv_head, _block(chosen, begin))


@inner
def _attend_run(
    args, item, kv_head, kv_count, rows, begin, end, chosen, position, heads, after, scratch
):
    """Attend listed blocks, a group of TOGETHER rows of a KV head at a time; see `_attend_rows`.

    A turn takes the first step of a block and group between the other two of the last ones: no step
    stands directly behind the one whose results it waits for.
    """
    slot, half = simd.peek_i64(item + 16), simd.peek_i64(args + HALF)
    k_bits, v_bits = simd.peek_i64(args + K_BITS), simd.peek_i64(args + V_BITS)
    latent = simd.peek_i64(args + LATENT)
    soft_cap, factor = simd.peek_f32(args + SOFT_CAP), simd.peek_f32(args + SCALE)
    if soft_cap == np.float32(0.0):
        factor *= LOG2_E
    out_bytes, padded = 256 * chunk_count(half), _padded(rows)
    place, head, row = begin, 0, 0  # of the turn; row: of those of a KV head
    block, record, ahead, at, count = 0, 0, 0, 0, 0
    turns = max(0, end - begin) * kv_count * (padded // TOGETHER)
    for turn in range(turns + 1):
        last_record, last_ahead, last_at, last_count = record, ahead, at, count
        if turn > 0:
            last_row = last_at % padded
            firsts = _firsts(args, item, block, last_row, last_count, position, heads, scratch)
            weigh_block(
                last_count, firsts, soft_cap, half, v_bits, latent,
                scratch + MAXIMA + 16 * last_at, scratch + SUMS + 16 * last_at, scratch,
            )  # fmt: skip
        if turn < turns:
            if row == 0:
                block = _block(chosen, place)
                record = _record(args, slot, kv_head + head, block)
                following = after
                if head + 1 < kv_count:
                    following = record + simd.peek_i64(args + RECORD)
                elif place + 1 < end:
                    following = _record(args, slot, kv_head, _block(chosen, place + 1))
                ahead = following - record
            at, count = head * padded + row, min(TOGETHER, rows - row)
            score_block(
                record, ahead, row, count, scratch + QUERY_PLACES + 8 * at, factor, half, k_bits,
                v_bits, latent, scratch,
            )  # fmt: skip
            row += TOGETHER
            if row == padded:
                row, head = 0, head + 1
                if head == kv_count:
                    head, place = 0, place + 1
        if turn > 0:
            sum_block(
                last_record, last_ahead, last_at % padded, last_count, half, k_bits, v_bits, latent,
                scratch + THREAD_BYTES + out_bytes * last_at, scratch,
            )  # fmt: skip


@inner
def _firsts(args, item, block, row, rows, position, heads, scratch):
    """Address of the first token of a block that rows from `row` on attend to; 0: all to all."""
    window = simd.peek_i64(args + WINDOW)
    if window == 0:
        return 0
    any_left_out, before = False, simd.peek_i64(item + _BEFORE)
    for i in range(rows):
        place = position + (row + i) // heads
        first = first_seen(place, place + before, window) - block * TOKENS
        simd.poke_i64(scratch + FIRSTS + 8 * i, first)
        any_left_out = any_left_out or first > 0
    return scratch + FIRSTS if any_left_out else 0


@inner
def _sum_runs(args, token, head, peak, scratch):
    """Sum what the runs of one query found, relative to `peak`: outputs at `scratch`, and sums."""
    total = np.float32(0.0)
    lanes = 64 * chunk_count(simd.peek_i64(args + HALF))
    for i in range(0, 4 * lanes, 64):
        simd.store_f32(scratch + i, simd.splat_f32(np.float32(0.0)))
    for run in range(simd.peek_i64(args + RUNS)):
        state, out = _partial(args, token, run, head, scratch)
        weight = np.exp(simd.peek_f32(state) - peak)
        total += weight * simd.peek_f32(state + 4)
        weights = simd.splat_f32(weight)
        for i in range(0, 4 * lanes, 64):
            found = simd.mul_add(simd.load_f32(out + i), weights, simd.load_f32(scratch + i))
            simd.store_f32(scratch + i, found)
    return total


@inner
def _merge(args, token, head, scratch):
    """Join the runs of one query, and what `out` and `lse` hold of it already if MERGE says so."""
    half, runs = simd.peek_i64(args + HALF), simd.peek_i64(args + RUNS)
    latent = simd.peek_i64(args + LATENT)
    channels = 2 * half if latent == 0 else latent
    to = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE) + 4 * channels * head
    lse = simd.peek_i64(args + LSE) + 4 * (token * simd.peek_i64(args + HEADS) + head)
    before = np.float32(-np.inf)
    if simd.peek_i64(args + MERGE) != 0:
        before = simd.peek_f32(lse)
    peak = np.float32(-np.inf)
    for run in range(runs):
        state, _ = _partial(args, token, run, head, scratch)
        peak = max(peak, simd.peek_f32(state))
    if peak == np.float32(-np.inf) and before > peak:
        return  # nothing to add
    peak = max(peak, before)
    if peak == np.float32(-np.inf):
        for i in range(0, 4 * channels, 4):
            simd.poke_f32(to + i, np.float32(0.0))
        simd.poke_f32(lse, peak)
        return
    run_channels = simd.peek_i64(args + ROTATED)
    kept = np.exp(before - peak)
    if run_channels != 0 and kept > np.float32(0.0):
        rotate(to, 2 * half, run_channels)
    total = kept + _sum_runs(args, token, head, peak, scratch)
    v_bits = simd.peek_i64(args + V_BITS)
    for channel in range(0, channels, 4):
        of_key = channel + half - latent // 2 if latent != 0 and channel >= latent // 2 else channel
        lane = lane_of(of_key, half, v_bits)
        for i in range(4):
            value = simd.peek_f32(scratch + 4 * (lane + i))
            if kept > np.float32(0.0):
                value += kept * simd.peek_f32(to + 4 * (channel + i))
            simd.poke_f32(to + 4 * (channel + i), value / total)
    if run_channels != 0:
        rotate_back(to, 2 * half, run_channels)
    simd.poke_f32(lse, peak + np.log(total))


@inner
def _attend_rows(args, item, kv_head, kv_count, run, head, heads, token, tokens, after, scratch):
    """One run of blocks for `heads` query heads of `tokens` tokens: ROWS rows at most.

    For `kv_count` KV heads from `kv_head` on, if more than one, all query heads of one token.
    """
    first_row, position = simd.peek_i64(item), simd.peek_i64(item + 24) + token
    half = simd.peek_i64(args + HALF)
    rows, floats = heads * tokens, 64 * chunk_count(half)
    padded = _padded(rows)
    begin, end, chosen = _range(args, item, kv_head, run, token)
    maxima, sums = scratch + MAXIMA, scratch + SUMS
    for i in range(0, 16 * ROWS, 64):
        simd.store_f32(maxima + i, simd.splat_f32(np.float32(-np.inf)))
        simd.store_f32(sums + i, simd.splat_f32(np.float32(0.0)))
    # Rows of a token are neighbours in the partial results only if there is one token or run.
    out = scratch + THREAD_BYTES
    for i in range(0, 4 * kv_count * padded * floats, 64):
        simd.store_f32(out + i, simd.splat_f32(np.float32(0.0)))
    stride = simd.peek_i64(args + STRIDE)
    query = simd.peek_i64(args + QUERIES) + (first_row + token) * stride + 8 * half * head
    for kv in range(kv_count):
        for row in range(rows):
            at = query + row // heads * stride + 8 * half * (kv * heads + row % heads)
            simd.poke_i64(scratch + QUERY_PLACES + 8 * (kv * padded + row), at)
    _attend_run(
        args, item, kv_head, kv_count, rows, begin, end, chosen, position, heads, after, scratch
    )
    for kv in range(kv_count):
        for row in range(rows):
            query_head, of = head + kv * heads + row % heads, first_row + token + row // heads
            state, to = _partial(args, of, run, query_head, scratch)
            place = kv * padded + row
            total = simd.peek_f32(sums + 16 * place)
            peak = simd.peek_f32(maxima + 16 * place) * LN_2
            # A sum that is no number has to show in the output.
            simd.poke_f32(state, np.float32(-np.inf) if total == np.float32(0.0) else peak)
            simd.poke_f32(state + 4, total)
            for i in range(0, 4 * floats, 64):
                simd.store_f32(to + i, simd.load_f32(out + 4 * place * floats + i))
            if simd.peek_i64(args + RUNS) == 1:
                _merge(args, of, query_head, scratch)


@inner
def _attending(args, item):
    """How many tokens of an item, the first ones, attend."""
    tokens, below = simd.peek_i64(item + 8), simd.peek_i64(args + BELOW)
    if below == 0:
        return tokens
    return max(0, min(tokens, below - simd.peek_i64(item + 24) - simd.peek_i64(item + _BEFORE)))


@inner
def _attend_item(args, item, kv_head, kv_count, run, after, scratch):
    """One run of blocks for all query heads of some KV heads and some tokens of a sequence."""
    group = simd.peek_i64(args + HEADS) // simd.peek_i64(args + KV_HEADS)
    tokens = _attending(args, item)
    heads = min(group, ROWS)
    together = ROWS // heads
    for token in range(0, tokens, together):
        for head in range(0, group, heads):
            _attend_rows(
                args, item, kv_head, kv_count, run, kv_head * group + head,
                min(heads, group - head), token, min(together, tokens - token), after, scratch,
            )  # fmt: skip


@job
def packed_job(pool, thread, threads, args):
    """All items, KV heads and runs, then all queries."""
    together = _kv_heads_together(args)
    parts = simd.peek_i64(args + KV_HEADS) // together * simd.peek_i64(args + RUNS)
    own = _thread_bytes(chunk_count(simd.peek_i64(args + HALF)))
    scratch = simd.peek_i64(args + SCRATCH_AT) + thread * own
    work = simd.peek_i64(args + ITEM_COUNT) * parts
    item = take(pool, 0)
    while item < work:
        following = take(pool, 0)
        after = simd.peek_i64(args + POOL)
        if following < work:
            after = _first_record(args, following, together, after)
        at, kv_head, run = _item(args, item, together)
        _attend_item(args, at, kv_head, together, run, after, scratch)
        finish(pool, 0)
        item = following
    if simd.peek_i64(args + RUNS) == 1:  # each was merged as it was found
        return
    wait(pool, 0, work)
    queries = simd.peek_i64(args + M) * simd.peek_i64(args + HEADS)
    heads, first = simd.peek_i64(args + HEADS), simd.peek_i64(args + FIRST)
    item = take(pool, 1)
    while item < queries:
        if _attending(args, simd.peek_i64(args + ITEMS) + ITEM_BYTES * (item // heads)) > 0:
            _merge(args, first + item // heads, item % heads, scratch)
        item = take(pool, 1)
