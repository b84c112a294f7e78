"""Prefill attention over an uncompressed cache: six tokens of one head at a time.

Online softmax over runs of 512 keys (Milakov and Gimelshein, 2018). torch's own attention would do,
but its threads keep spinning after it, on the cores that the next job computes on.
"""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import take

from . import fields as f
from . import scratch as sizes
from .append import append_all, attends
from .decode import RUN, first_key
from .pairs import pair_keys, pair_values, round_query
from .product import ROWS, product, tile_rows
from .scratch import SCORES, STATE_BYTES
from .soft_cap import cap_scores
from .softmax import CORRECTIONS, SUMS, mask, row_bytes, softmax

# A thread's scratch: scores of a tile; queries, keys and values as pairs, if they are; what the
# rows of all tiles have attended to so far.
_QUERIES = ROWS * SCORES
_most_tokens, _tile_places = inner(sizes.most_tokens), inner(sizes.tile_places)


@inner
def _places(dim, value_dim, group, width):
    return _tile_places(dim, value_dim, group * _most_tokens(group), width)


@inner
def _position(args, token):
    return simd.peek_i64(simd.peek_i64(args + f.PLACES) + 8 * token)


@inner
def _slot(args, token):
    return simd.peek_i64(simd.peek_i64(args + f.SLOTS) + 8 * token)


@inner
def _group(args):
    """Heads to each KV head."""
    return simd.peek_i64(args + f.HEADS) // simd.peek_i64(args + f.KV_HEADS)


@inner
def _of_cache(args, token, kv_head, base):
    """Tokens from the first of the cache to `base` of a token's sequence and KV head."""
    place = _slot(args, token) * simd.peek_i64(args + f.KV_HEADS) + kv_head
    return place * simd.peek_i64(args + f.CAPACITY) + base


@inner
def _add_keys(args, width, token, rows, start, last, queries, stride, keys, values, scores, state):
    """Add keys [start, last) to the running attention of a tile: consecutive tokens of a head.

    width: bytes of a number. start: a multiple of 16. queries: `stride` bytes apart. keys, values:
    of `start` and on. scores: room for them.
    """
    dim, value_dim = simd.peek_i64(args + f.DIM), simd.peek_i64(args + f.VALUE_DIM)
    count = last - start
    vectors = (count + 15) // 16
    product(
        width, rows, queries, stride, keys, 16 * width * dim, 64, vectors, dim * width // 4,
        scores, SCORES, 0, simd.peek_f32(args + f.SCALE),
    )  # fmt: skip
    soft_cap = simd.peek_f32(args + f.SOFT_CAP)
    if soft_cap != np.float32(0.0):
        for row in range(rows):
            cap_scores(scores + row * SCORES, 16 * vectors, soft_cap)
    end, window = _position(args, token) + 1, simd.peek_i64(args + f.WINDOW)
    if window < 0:  # rows of one chunk begin where it does
        for row in range(rows):
            low = first_key(args, token + row) - start
            mask(1, scores + row * SCORES, SCORES, vectors, low, end - start + row, 1)
    else:
        low = end - window - start if window > 0 else -ROWS - 16
        mask(rows, scores, SCORES, vectors, low, end - start, 1)
    softmax(width, rows, scores, SCORES, vectors, state)
    product(
        width, rows, scores, SCORES, values, 64, 4 * value_dim, value_dim // 16,
        (count * width + 3) // 4, state + STATE_BYTES, 4 * value_dim, state + CORRECTIONS,
        np.float32(1.0),
    )  # fmt: skip


@inner
def _begin(args, rows, head, state):
    """A tile that has attended to nothing yet, but to the sink."""
    dim, sinks = simd.peek_i64(args + f.VALUE_DIM), simd.peek_i64(args + f.SINKS)
    sink = np.float32(-np.inf) if sinks == 0 else simd.peek_f32(sinks + 4 * head)
    weight = np.float32(0.0 if sinks == 0 else 1.0)
    for i in range(0, 128, 64):
        simd.store_f32(state + i, simd.splat_f32(sink))
        simd.store_f32(state + SUMS + i, simd.splat_f32(weight))
    for i in range(0, 4 * dim * rows, 64):
        simd.store_f32(state + STATE_BYTES + i, simd.splat_f32(np.float32(0.0)))


@inner
def _end(args, token, rows, head, state):
    """Write what a tile attended to, and the logarithms of the sums."""
    dim, lse = simd.peek_i64(args + f.VALUE_DIM), simd.peek_i64(args + f.LSE)
    for row in range(rows):
        peak, total = simd.peek_f32(state + 16 * row), simd.peek_f32(state + SUMS + 16 * row)
        out = simd.peek_i64(args + f.OUT) + (token + row) * simd.peek_i64(args + f.OUT_STRIDE)
        if lse != 0:
            at = lse + 4 * ((token + row) * simd.peek_i64(args + f.HEADS) + head)
            simd.poke_f32(at, peak + np.log(total))
        factor = simd.splat_f32(np.float32(1.0) / total)
        for i in range(0, 4 * dim, 64):
            value = simd.load_f32(state + STATE_BYTES + 4 * dim * row + i)
            simd.store_f32(out + 4 * dim * head + i, simd.mul(value, factor))


@inner
def _attend_tile(args, width, token, rows, head, base, last, stride, queries, keys, values, scratch,
                 state, begins, ends):  # fmt: skip
    """Let a tile attend to what it sees of the keys from `base` on and before `last`."""
    if begins:
        _begin(args, rows, head, state)
    start = max(base, first_key(args, token) // 16 * 16)
    last = min(last, _position(args, token + rows - 1) + 1)
    if start < last:
        before = width * (start - base)
        _add_keys(
            args, width, token, rows, start, last, queries, stride,
            keys + before * simd.peek_i64(args + f.DIM),
            values + before * simd.peek_i64(args + f.VALUE_DIM), scratch, state,
        )  # fmt: skip
    if ends:
        _end(args, token, rows, head, state)


@inner
def _attend_run(args, width, token, tokens, kv_head, base, last, scratch, begins, ends):
    """Let tokens attend to keys [base, last) of one KV head, with all heads of it."""
    dim, value_dim = simd.peek_i64(args + f.DIM), simd.peek_i64(args + f.VALUE_DIM)
    group = _group(args)
    pairs_at, values_at, states_at, _ = _places(dim, value_dim, group, width)
    states = scratch + states_at
    before = _of_cache(args, token, kv_head, base)
    keys = simd.peek_i64(args + f.KEYS) + 4 * dim * before
    values = simd.peek_i64(args + f.VALUES) + 4 * value_dim * before
    if width == 2:
        pairs, values_of = scratch + pairs_at, scratch + values_at
        pair_keys(keys, (last - base + 15) // 16, dim, pairs)
        pair_values(values, last - base, value_dim, values_of)
        keys, values = pairs, values_of
    for head in range(group):
        stride = simd.peek_i64(args + f.QKV_STRIDE)
        queries = simd.peek_i64(args + f.QKV) + token * stride + 4 * dim * (kv_head * group + head)
        if width == 2:
            queries, stride = scratch + _QUERIES + 2 * dim * tokens * head, 2 * dim
        done = 0
        while done < tokens:
            rows = tile_rows(tokens - done)
            state = states + (head * tokens + done) * row_bytes(value_dim)
            _attend_tile(
                args, width, token + done, rows, kv_head * group + head, base, last, stride,
                queries + done * stride, keys, values, scratch, state, begins, ends,
            )  # fmt: skip
            done += rows


@inner
def _round_queries(args, token, tokens, kv_head, out):
    """The queries of all heads of a KV head, of one token after the other, as bfloat16."""
    dim, group = simd.peek_i64(args + f.DIM), _group(args)
    for head in range(group):
        for row in range(tokens):
            query = simd.peek_i64(args + f.QKV) + (token + row) * simd.peek_i64(args + f.QKV_STRIDE)
            query += 4 * dim * (kv_head * group + head)
            round_query(query, dim, out + 2 * dim * (head * tokens + row))


@inner
def _only(args, token):
    """Whether a token is the only one of its sequence."""
    slot = _slot(args, token)
    if token > 0 and _slot(args, token - 1) == slot:
        return False
    return token + 1 == simd.peek_i64(args + f.M) or _slot(args, token + 1) != slot


@inner
def _attend_tokens(args, token, tokens, kv_head, scratch):
    """Attend consecutive tokens of one sequence, and write their output.

    Runs of keys begin at multiples of 512, and the only token of its sequence is attended with
    float32 numbers, as where all are such: so no bit depends on what is attended together.
    """
    width = simd.peek_i64(args + f.WIDTH)
    if tokens == 1 and _only(args, token):
        width = 4
    if width == 2:
        _round_queries(args, token, tokens, kv_head, scratch + _QUERIES)
    end = _position(args, token + tokens - 1) + 1
    base = first_key(args, token) // 16 * 16
    begins = True
    while base < end:
        last = min(base // RUN * RUN + RUN, end)
        _attend_run(args, width, token, tokens, kv_head, base, last, scratch, begins, last == end)
        base, begins = last, False


@inner
def _attend_item(args, first, last, kv_head, scratch):
    """Tokens [first, last), split where a sequence ends."""
    token = first
    while token < last:
        tokens = 1
        while token + tokens < last and _slot(args, token + tokens) == _slot(args, token):
            tokens += 1
        attending = tokens
        while attending > 0 and not attends(args, token + attending - 1):
            attending -= 1
        if attending > 0:
            _attend_tokens(args, token, attending, kv_head, scratch)
        token += tokens


@job
def append_prefill_job(pool, thread, threads, args):
    """Append every token's keys and values, then attend."""
    tokens, kv_heads = simd.peek_i64(args + f.M), simd.peek_i64(args + f.KV_HEADS)
    dim, group = simd.peek_i64(args + f.DIM), _group(args)
    # The keys of a vector are of neighbouring tokens: two threads would write to the same lines.
    append_all(pool, args, 16 if tokens >= 16 * threads else 1)
    value_dim = simd.peek_i64(args + f.VALUE_DIM)
    _, _, _, own = _places(dim, value_dim, group, simd.peek_i64(args + f.WIDTH))
    scratch = simd.peek_i64(args + f.PARTIALS) + thread * own
    size = _most_tokens(group)
    while size > ROWS and tokens * kv_heads < 16 * threads * size:
        size -= ROWS  # with so few items threads would wait for each other
    blocks = (tokens + size - 1) // size
    item = take(pool, 1)
    while item < blocks * kv_heads:
        first = (blocks - 1 - item // kv_heads) * size  # the longest first
        _attend_item(args, first, min(first + size, tokens), item % kv_heads, scratch)
        item = take(pool, 1)
