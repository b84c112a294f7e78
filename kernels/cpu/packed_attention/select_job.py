"""The compiled job that chooses packed blocks for one new token a sequence: scores, then the best.

A score is the integer that `attention.largest` makes of it.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
from llvmlite import ir
from numba import types

from qoff.kernels.cpu.attention.largest import (
    ABOVE,
    LOWEST,
    pad_scores,
    poke_i32,
    poke_score,
    threshold,
)
from qoff.kernels.cpu.attention.window import first_seen
from qoff.kernels.cpu.jit import emit, simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.cpu.jit.simd import vector_intrinsic
from qoff.kernels.cpu.operands import int64s, offsets
from qoff.kernels.layout.layer_cache import ITEM_FIELDS

from .scratch import FOLDED_BYTES, TOKENS

_CHUNK = 64  # blocks to an item
_AHEAD = 8  # blocks from the one that is scored to the one that is fetched
_ITEM_BYTES = 8 * len(ITEM_FIELDS)
_BEFORE = 8 * ITEM_FIELDS.index("tokens before")
_ALMOST = 1e-9  # as `layer_cache.kept_blocks` has it


class SelectPart(ctypes.Structure):
    """One part of the packed tokens: addresses, sizes in elements, offsets in bytes."""

    _fields_ = int64s(
        "pool", "record", "block_bytes", "table", "table_width", "items", "k_scale", "levels"
    )  # fmt: skip


class SelectArguments(ctypes.Structure):
    """Addresses, strides in bytes, sizes in elements."""

    _fields_ = (
        *int64s(
            "queries", "stride", "tokens", "heads", "kv_heads", "dim", "parts", "part_count",
            "positions", "window", "longest", "scratch", "keys", "blocks", "width", "counts",
        ),
        ("top", ctypes.c_double),
    )  # fmt: skip


POOL, RECORD, BLOCK_BYTES, TABLE, TABLE_WIDTH, ITEMS, K_SCALE, LEVELS = offsets(SelectPart)
(QUERIES, STRIDE, M, HEADS, KV_HEADS, DIM, PARTS, PART_COUNT, POSITIONS, WINDOW, LONGEST,
 SCRATCH_AT, KEYS, BLOCKS, WIDTH, COUNTS, TOP) = offsets(SelectArguments)  # fmt: skip
_PART_BYTES = ctypes.sizeof(SelectPart)


@vector_intrinsic(types.float64, types.int64)
def _peek_f64(b, address):
    return emit.load(b, address, 0, ir.DoubleType())


@inner
def _candidates(args, part, row):
    """First block and number of blocks that a row may see of a part."""
    item = simd.peek_i64(part + ITEMS) + _ITEM_BYTES * row
    position, packed = simd.peek_i64(item + 24), simd.peek_i64(item + 32)
    window = simd.peek_i64(args + WINDOW)
    first = 0
    if window != 0:
        before = simd.peek_i64(item + _BEFORE)
        first = max(0, first_seen(position, position + before, window)) // TOKENS
    return first, max(0, packed // TOKENS - first)


@inner
def _fold_queries(query, group, dim, folded):
    """folded = [sum of the queries, sum of their positive parts], [dim] each."""
    zero = simd.splat_f32(np.float32(0.0))
    for i in range(0, 4 * dim, 64):
        total, positive = zero, zero
        for head in range(group):
            q = simd.load_f32(query + 4 * dim * head + i)
            total = simd.add(total, q)
            positive = simd.add(positive, simd.maximum(q, zero))
        simd.store_f32(folded + i, total)
        simd.store_f32(folded + 4 * dim + i, positive)


@inner
def _bound(folded, scale, dim, levels):
    """Sum over channels and queries of max(q * minimum, q * (minimum + levels * scale))."""
    low, wide = simd.splat_f32(np.float32(0.0)), simd.splat_f32(np.float32(0.0))
    for i in range(0, dim, 16):
        minimum = simd.load_f16(scale + 2 * dim + 2 * i)
        low = simd.mul_add(simd.load_f32(folded + 4 * i), minimum, low)
        positive = simd.load_f32(folded + 4 * dim + 4 * i)
        wide = simd.mul_add(positive, simd.load_f16(scale + 2 * i), wide)
    return simd.sum_f32(simd.mul_add(wide, simd.splat_f32(levels), low))


@inner
def _score_part(args, part, row, kv_head, begin, end, folded, keys):
    """Write the keys of blocks [begin, end) of a part."""
    dim = simd.peek_i64(args + DIM)
    slot = simd.peek_i64(simd.peek_i64(part + ITEMS) + _ITEM_BYTES * row + 16)
    entries = simd.peek_i64(part + TABLE) + 4 * slot * simd.peek_i64(part + TABLE_WIDTH)
    block_bytes = simd.peek_i64(part + BLOCK_BYTES)
    base = simd.peek_i64(part + POOL) + simd.peek_i64(part + K_SCALE)
    base += kv_head * simd.peek_i64(part + RECORD)
    levels = np.float32(simd.peek_i64(part + LEVELS))
    for block in range(begin, end):
        following = simd.peek_i32(entries + 4 * min(block + _AHEAD, end - 1))
        for i in range(0, 4 * dim, 64):
            simd.prefetch(base + following * block_bytes + i)
        scale = base + simd.peek_i32(entries + 4 * block) * block_bytes
        key = keys + 4 * (block - begin)
        poke_score(key, _bound(folded, scale, dim, levels))


@inner
def _keys_at(args, row, kv_head):
    index = row * simd.peek_i64(args + KV_HEADS) + kv_head
    return simd.peek_i64(args + KEYS) + 4 * index * simd.peek_i64(args + LONGEST)


@inner
def _score_item(args, row, kv_head, chunk, scratch):
    """Score _CHUNK of the blocks that a row may see, all parts one after another."""
    dim = simd.peek_i64(args + DIM)
    group = simd.peek_i64(args + HEADS) // simd.peek_i64(args + KV_HEADS)
    query = simd.peek_i64(args + QUERIES) + row * simd.peek_i64(args + STRIDE)
    _fold_queries(query + 4 * dim * group * kv_head, group, dim, scratch)
    keys = _keys_at(args, row, kv_head)
    before = 0
    for i in range(simd.peek_i64(args + PART_COUNT)):
        part = simd.peek_i64(args + PARTS) + _PART_BYTES * i
        first, count = _candidates(args, part, row)
        begin = max(chunk * _CHUNK, before)
        end = min((chunk + 1) * _CHUNK, before + count)
        if begin < end:
            shift = first - before
            _score_part(args, part, row, kv_head, begin + shift, end + shift, scratch,
                        keys + 4 * begin)  # fmt: skip
        before += count


@inner
def _begins(args, part, row):
    """Whether a part begins with the first token of the row's sequence."""
    position = simd.peek_i64(simd.peek_i64(part + ITEMS) + _ITEM_BYTES * row + 24)
    return position == simd.peek_i64(simd.peek_i64(args + POSITIONS) + 8 * row)


@inner
def _keep_first(args, row, keys):
    """Let the first block of the sequence, if it is a candidate, be the best."""
    key = keys
    for i in range(simd.peek_i64(args + PART_COUNT)):
        part = simd.peek_i64(args + PARTS) + _PART_BYTES * i
        first, count = _candidates(args, part, row)
        if count > 0 and first == 0 and _begins(args, part, row):
            poke_i32(key, ABOVE - 1)
        key += 4 * count


@inner
def _select_item(args, row, kv_head):
    """List the best blocks of one row and KV head: of equal ones the first, in their order."""
    parts, kv_heads = simd.peek_i64(args + PART_COUNT), simd.peek_i64(args + KV_HEADS)
    rows, width = simd.peek_i64(args + M), simd.peek_i64(args + WIDTH)
    total = 0
    for i in range(parts):
        total += _candidates(args, simd.peek_i64(args + PARTS) + _PART_BYTES * i, row)[1]
    keys = _keys_at(args, row, kv_head)
    padded = pad_scores(keys, total)
    keep = max(1, math.ceil(_peek_f64(args + TOP) * total - _ALMOST))
    if keep > 1:
        _keep_first(args, row, keys)
    least, equal = LOWEST, 0
    if total > 0:
        least, equal = threshold(keys, padded, keep)
    key = keys
    for i in range(parts):
        first, count = _candidates(args, simd.peek_i64(args + PARTS) + _PART_BYTES * i, row)
        index = (i * rows + row) * kv_heads + kv_head
        start = simd.peek_i64(args + BLOCKS) + 4 * width * index
        to = start
        for block in range(first, first + count):
            value = simd.peek_i32(key)
            key += 4
            if value > least or (value == least and equal > 0):
                equal -= value == least
                poke_i32(to, block)
                to += 4
        poke_i32(simd.peek_i64(args + COUNTS) + 4 * index, (to - start) // 4)


@job
def select_job(pool, thread, threads, args):
    """All chunks of all rows and KV heads, then all rows and KV heads."""
    kv_heads = simd.peek_i64(args + KV_HEADS)
    scratch = simd.peek_i64(args + SCRATCH_AT) + thread * FOLDED_BYTES
    lists = simd.peek_i64(args + M) * kv_heads
    chunks = (simd.peek_i64(args + LONGEST) + _CHUNK - 1) // _CHUNK
    item = take(pool, 0)
    while item < lists * chunks:
        row = item // (kv_heads * chunks)
        _score_item(args, row, item // chunks % kv_heads, item % chunks, scratch)
        finish(pool, 0)
        item = take(pool, 0)
    wait(pool, 0, lists * chunks)
    item = take(pool, 1)
    while item < lists:
        _select_item(args, item // kv_heads, item % kv_heads)
        item = take(pool, 1)
