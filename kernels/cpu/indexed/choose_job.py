"""The compiled job that chooses tokens by an index: scores of all keys, then the largest.

Keys are rows and queries columns of a product, so that a vector has the scores of one key with 16
heads: a few operations on whole vectors, and one sum, make the key's score of them.
"""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.attention.largest import (
    pad_scores,
    poke_i32,
    poke_score,
    threshold,
)
from qoff.kernels.cpu.attention.product import ROWS, product, tile_rows
from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.cpu.operands import int64s, offsets

from . import rows as r
from . import scratch as sizes
from .scratch import RUN_KEYS

_thread_bytes = inner(sizes.choose_thread_bytes)


class ChooseArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes in elements. first: the first of `count` groups.

    longest: scores of a row. scores: int32 [rows, longest]. chosen: int32 [M, top]. No field is
    that of a layer alone (`jit.alike`): `tokens` lie elsewhere, so each layer is told.
    """

    _fields_ = int64s(
        "tokens", "queries", "stride", "weights", "weights_stride", "heads", "top", "first",
        "count", "longest", "scores", "scratch", "chosen",
    )  # fmt: skip


(TOKENS, QUERIES, STRIDE, WEIGHTS, WEIGHTS_STRIDE, HEADS, TOP, FIRST, COUNT, LONGEST, SCORES,
 SCRATCH_AT, CHOSEN) = offsets(ChooseArguments)  # fmt: skip


@inner
def _scores_of(args, row):
    """Where the scores of a row are."""
    tokens = simd.peek_i64(args + TOKENS)
    place = row - r.group_rows(tokens, simd.peek_i64(args + FIRST))[0]
    return simd.peek_i64(args + SCORES) + 4 * place * simd.peek_i64(args + LONGEST)


@inner
def _read_keys(tokens, group, slot, begin, end, scales, keys):
    """Write the keys of positions [begin, end), float32 rows."""
    last, size = 0, 4 * simd.peek_i64(tokens + r.DIM)
    for position in range(begin, end):
        to = keys + (position - begin) * size
        last = r.read_key(tokens, group, slot, position, last, scales, to)


@inner
def _score_row(args, row, begin, end, keys, lanes, memory, scores):
    """Write the scores of a row and the keys of positions [begin, end).

    memory: of [dim + ROWS, lanes] float32 numbers: queries, scores of a tile.
    """
    heads, dim = simd.peek_i64(args + HEADS), simd.peek_i64(simd.peek_i64(args + TOKENS) + r.DIM)
    weights = simd.peek_i64(args + WEIGHTS) + row * simd.peek_i64(args + WEIGHTS_STRIDE)
    r.turn_heads(
        simd.peek_i64(args + QUERIES) + row * simd.peek_i64(args + STRIDE), heads, dim, lanes,
        memory,
    )  # fmt: skip
    tile = memory + 4 * lanes * dim
    done = 0
    while done < end - begin:
        count = tile_rows(end - begin - done)
        product(
            4, count, keys + 4 * dim * done, 4 * dim, memory, 64 * dim, 64, lanes // 16, dim, tile,
            4 * lanes, 0, np.float32(1.0),
        )  # fmt: skip
        for key in range(count):
            total = simd.splat_f32(np.float32(0.0))
            for i in range(0, 4 * lanes, 64):
                found = simd.load_f32(tile + 4 * lanes * key + i)
                found = simd.maximum(found, simd.splat_f32(np.float32(0.0)))
                total = simd.mul_add(found, simd.load_f32(weights + i), total)
            poke_score(scores + 4 * (begin + done + key), simd.sum_f32(total))
        done += count


@inner
def _score_item(args, group, run, scratch):
    """The scores of a run of keys for the rows of a group at position `top` or later."""
    tokens, lanes = simd.peek_i64(args + TOKENS), simd.peek_i64(args + HEADS)
    first, rows = r.group_rows(tokens, group)
    position, dim = r.position_of(tokens, first), simd.peek_i64(tokens + r.DIM)
    begin, end = run * RUN_KEYS, min((run + 1) * RUN_KEYS, position + rows)
    skipped = max(0, simd.peek_i64(args + TOP) - position)
    if skipped >= rows or begin >= end:
        return
    slot = simd.peek_i64(simd.peek_i64(tokens + r.SLOTS) + 8 * first)
    memory = scratch + 8 * dim
    keys = memory + 4 * lanes * (dim + ROWS)
    _read_keys(tokens, group, slot, begin, end, scratch, keys)
    for row in range(skipped, rows):
        scores = _scores_of(args, first + row)
        _score_row(args, first + row, begin, end, keys, lanes, memory, scores)


@inner
def _choose_item(args, group, row):
    """List the tokens of largest scores of one row: of equal ones the first, in their order."""
    tokens, keep = simd.peek_i64(args + TOKENS), simd.peek_i64(args + TOP)
    first, rows = r.group_rows(tokens, group)
    if row >= rows or r.position_of(tokens, first + row) < keep:
        return
    count, scores = r.position_of(tokens, first + row) + 1, _scores_of(args, first + row)
    least, equal = threshold(scores, pad_scores(scores, count), keep)
    to = simd.peek_i64(args + CHOSEN) + 4 * (first + row) * keep
    for position in range(count):
        value = simd.peek_i32(scores + 4 * position)
        if value > least or (value == least and equal > 0):
            equal -= value == least
            poke_i32(to, position)
            to += 4


@job
def choose_job(pool, thread, threads, args):
    """All runs of keys of all groups, then all rows."""
    tokens, first = simd.peek_i64(args + TOKENS), simd.peek_i64(args + FIRST)
    own = _thread_bytes(simd.peek_i64(args + HEADS), simd.peek_i64(tokens + r.DIM))
    scratch = simd.peek_i64(args + SCRATCH_AT) + thread * own
    count, each = simd.peek_i64(args + COUNT), simd.peek_i64(tokens + r.EACH)
    runs = (simd.peek_i64(args + LONGEST) + RUN_KEYS - 1) // RUN_KEYS
    item = take(pool, 0)
    while item < count * runs:
        _score_item(args, first + item // runs, item % runs, scratch)
        finish(pool, 0)
        item = take(pool, 0)
    wait(pool, 0, count * runs)
    item = take(pool, 1)
    while item < count * each:
        _choose_item(args, first + item // each, item % each)
        item = take(pool, 1)
