"""The compiled job that attends to chosen tokens, with some heads of a row at a time.

Keys are rows and queries columns of the first product, so that a vector has the scores of one key
with 16 heads: maxima and sums of the online softmax (Milakov and Gimelshein, 2018) are whole
vectors, and values, which are channels of the keys, are read where those lie. Of a sequence that
has packed tokens, which are rounded already, products are of bfloat16 where the processor
multiplies these faster (AVX512-BF16), with sums of float32.
"""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.attention.pairs import pair_keys, pair_values, round_query
from qoff.kernels.cpu.attention.product import product, tile_rows
from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.emit import HAS_BF16
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.kernels.cpu.operands import int64s, offsets

from . import rows as r
from . import scratch as sizes
from .scratch import RUN_CHOSEN

_thread_bytes = inner(sizes.attend_thread_bytes)


class AttendArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes in elements. together: heads of an item.

    Each layer is told, as of `ChooseArguments`.
    """

    _fields_ = (
        *int64s(
            "tokens", "queries", "stride", "heads", "together", "latent", "top", "chosen",
            "scratch", "out", "out_stride",
        ),
        ("scale", ctypes.c_float),
    )  # fmt: skip


(TOKENS, QUERIES, STRIDE, HEADS, TOGETHER, LATENT, TOP, CHOSEN, SCRATCH_AT, OUT, OUT_STRIDE,
 SCALE) = offsets(AttendArguments)  # fmt: skip


@inner
def _read_chosen(tokens, group, slot, chosen, count, scales, keys):
    """Write the keys of some chosen tokens, float32 rows."""
    last, size = 0, 4 * simd.peek_i64(tokens + r.DIM)
    for i in range(count):
        position = simd.peek_i32(chosen + 4 * i)
        last = r.read_key(tokens, group, slot, position, last, scales, keys + i * size)


@inner
def _soften(scores, count, heads, lanes, begins, state, weights):
    """Online softmax of scores [count, lanes]: weights [heads, RUN_CHOSEN] of them.

    state: float32 [2, lanes], maxima and sums; behind it what corrects earlier ones, quads of
    heads. begins: there were none before.
    """
    sums, corrections = state + 4 * lanes, state + 8 * lanes
    for i in range(0, 4 * lanes, 64):
        peak = simd.load_f32(scores + i)
        for key in range(1, count):
            peak = simd.maximum(peak, simd.load_f32(scores + 4 * lanes * key + i))
        total = simd.splat_f32(np.float32(0.0))
        if not begins:
            before = simd.load_f32(state + i)
            peak = simd.maximum(peak, before)
            minus = simd.mul(peak, simd.splat_f32(np.float32(-1.0)))
            correction = simd.exp(simd.add(before, minus))
            total = simd.mul(simd.load_f32(sums + i), correction)
            simd.store_f32(sums + i, correction)  # read below, before the sums are written
            for lane in range(0, 64, 4):
                if (i + lane) // 4 < heads:
                    value = simd.peek_f32(sums + i + lane)
                    simd.poke_f32(corrections + 4 * (i + lane), value)
        minus = simd.mul(peak, simd.splat_f32(np.float32(-1.0)))
        for key in range(count):
            at = scores + 4 * lanes * key + i
            weight = simd.exp(simd.add(simd.load_f32(at), minus))
            total = simd.add(total, weight)
            simd.store_f32(at, weight)
        simd.store_f32(state + i, peak)
        simd.store_f32(sums + i, total)
    for head in range(heads):
        for key in range(count):
            weight = simd.peek_f32(scores + 4 * (lanes * key + head))
            simd.poke_f32(weights + 4 * (RUN_CHOSEN * head + key), weight)


@inner
def _score(width, keys, dim, count, queries, lanes, scale, scores):
    """scores [count, lanes] = scale * keys @ queries; width: of numbers in bytes, 4 or 2."""
    done = 0
    while done < count:
        some = tile_rows(count - done)
        product(
            width, some, keys + width * dim * done, width * dim, queries, 16 * width * dim, 64,
            lanes // 16, dim * width // 4, scores + 4 * lanes * done, 4 * lanes, 0, scale,
        )  # fmt: skip
        done += some


@inner
def _add_values(width, values, dim, latent, count, heads, begins, weights, corrections, found):
    """found [heads, latent] = found * correction + weights @ values; the latter of either half.

    width: of weights in bytes; where it is 2, values are pairs of tokens.
    """
    done = 0
    while done < heads:
        rows = tile_rows(heads - done)
        by = 0 if begins else corrections + 16 * done
        for half in range(2):
            product(
                width, rows, weights + width * RUN_CHOSEN * done, width * RUN_CHOSEN,
                values + 2 * dim * half, 64, 4 * dim, latent // 32, (count * width + 3) // 4,
                found + 4 * latent * done + 2 * latent * half, 4 * latent, by, np.float32(1.0),
            )  # fmt: skip
        done += rows


@inner
def _round_keys(keys, count, dim, rounded):
    """Keys [count, dim] as bfloat16, row after row."""
    for i in range(count):
        round_query(keys + 4 * dim * i, dim, rounded + 2 * dim * i)


@inner
def _round_weights(weights, count, heads, rounded):
    """Weights [heads, RUN_CHOSEN] as bfloat16; behind the last an odd count has a 0."""
    for head in range(heads):
        row = weights + 4 * RUN_CHOSEN * head
        if count % 2:
            simd.poke_f32(row + 4 * count, np.float32(0.0))
        round_query(row, RUN_CHOSEN, rounded + 2 * RUN_CHOSEN * head)


@inner
def _end(args, row, head, heads, latent, sums, found):
    """Write what the heads of a row found."""
    out = simd.peek_i64(args + OUT) + row * simd.peek_i64(args + OUT_STRIDE) + 4 * latent * head
    for i in range(heads):
        factor = simd.splat_f32(np.float32(1.0) / simd.peek_f32(sums + 4 * i))
        for at in range(4 * latent * i, 4 * latent * (i + 1), 64):
            simd.store_f32(out + at, simd.mul(simd.load_f32(found + at), factor))


@inner
def _attend_item(args, group, row, head, scratch):
    """Some heads of a row, all of whose chosen tokens are attended in their order."""
    tokens, top = simd.peek_i64(args + TOKENS), simd.peek_i64(args + TOP)
    first, rows = r.group_rows(tokens, group)
    if row >= rows or r.position_of(tokens, first + row) < top:
        return
    row += first
    heads = min(simd.peek_i64(args + TOGETHER), simd.peek_i64(args + HEADS) - head)
    dim, latent = simd.peek_i64(tokens + r.DIM), simd.peek_i64(args + LATENT)
    lanes, scale = (heads + 15) // 16 * 16, simd.peek_f32(args + SCALE)
    queries = scratch + 8 * dim
    scores = queries + 4 * lanes * dim
    weights = scores + 4 * lanes * RUN_CHOSEN
    state = weights + 4 * lanes * RUN_CHOSEN
    found = state + 4 * lanes * (2 + 4)
    keys = found + 4 * lanes * latent
    pairs = keys + 4 * RUN_CHOSEN * dim  # of queries, then of values; keys, weights
    value_pairs = pairs + 2 * lanes * dim
    rounded_weights = value_pairs + 2 * RUN_CHOSEN * dim
    rounded_keys = rounded_weights + 2 * lanes * RUN_CHOSEN
    source = simd.peek_i64(args + QUERIES) + row * simd.peek_i64(args + STRIDE) + 4 * dim * head
    r.turn_heads(source, heads, dim, lanes, queries)
    narrow = HAS_BF16 and r.packed_before(tokens, group) > 0
    if narrow:
        pair_keys(queries, lanes // 16, dim, pairs)
    slot = simd.peek_i64(simd.peek_i64(tokens + r.SLOTS) + 8 * row)
    chosen, corrections = simd.peek_i64(args + CHOSEN) + 4 * row * top, state + 8 * lanes
    for begin in range(0, top, RUN_CHOSEN):
        count, begins = min(RUN_CHOSEN, top - begin), begin == 0
        _read_chosen(tokens, group, slot, chosen + 4 * begin, count, scratch, keys)
        if narrow:
            _round_keys(keys, count, dim, rounded_keys)
            _score(2, rounded_keys, dim, count, pairs, lanes, scale, scores)
        else:
            _score(4, keys, dim, count, queries, lanes, scale, scores)
        _soften(scores, count, heads, lanes, begins, state, weights)
        if narrow:
            pair_values(keys, count, dim, value_pairs)
            _round_weights(weights, count, heads, rounded_weights)
            _add_values(
                2, value_pairs, dim, latent, count, heads, begins, rounded_weights, corrections,
                found,
            )  # fmt: skip
        else:
            _add_values(4, keys, dim, latent, count, heads, begins, weights, corrections, found)
    _end(args, row, head, heads, latent, state + 4 * lanes, found)


@job
def attend_job(pool, thread, threads, args):
    """All rows at position `top` or later, some heads at a time."""
    tokens, together = simd.peek_i64(args + TOKENS), simd.peek_i64(args + TOGETHER)
    own = _thread_bytes(together, simd.peek_i64(tokens + r.DIM), simd.peek_i64(args + LATENT))
    scratch = simd.peek_i64(args + SCRATCH_AT) + thread * own
    parts = (simd.peek_i64(args + HEADS) + together - 1) // together
    each = simd.peek_i64(tokens + r.EACH)
    work = simd.peek_i64(tokens + r.GROUP_COUNT) * each * parts
    item = take(pool, 0)
    while item < work:
        row = item // parts
        _attend_item(args, row // each, row % each, item % parts * together, scratch)
        item = take(pool, 0)
