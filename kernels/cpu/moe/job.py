"""The two compiled jobs of a mixture of experts: up with its activation, down with the sum.

Pairs of a token and one of its experts are sorted by expert; a segment is the run of pairs of one
expert. Items of work are a segment times a few blocks of rows, so an expert's weights are read
once for all of its tokens, and experts that nobody chose are not read at all. What a pair gets
does not depend on what else its segment holds, and a token's pairs are summed in its own order.
"""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.cpu.linear.activation import activated
from qoff.kernels.cpu.linear.activation import gated as gated_activation
from qoff.kernels.cpu.linear.job import with_bias
from qoff.kernels.cpu.linear.multiply import multiply, while_cached
from qoff.kernels.cpu.linear.norm_job import LONG
from qoff.kernels.cpu.linear.quantize import quantize_groups
from qoff.kernels.cpu.linear.scales import ROW_BLOCK_BYTES
from qoff.kernels.cpu.linear.scratch import PANEL_TOKENS, TILE_BYTES
from qoff.kernels.cpu.operands import int64s, offsets

from .scratch import SEGMENT_BYTES


class MatrixArguments(ctypes.Structure):
    """One matrix of each expert and the quantized inputs of its pairs; distances are in bytes."""

    _fields_ = int64s(
        "n", "k", "codes", "codes_stride", "scale_min", "scale_min_stride", "width", "group",
        "bits", "bias", "high", "low", "scales",
    )  # fmt: skip


class ExpertsArguments(ctypes.Structure):
    """The arguments of both jobs: addresses and strides in bytes, sizes, flags."""

    _fields_ = (
        ("gate_up", MatrixArguments),
        ("down", MatrixArguments),
        *int64s(
            "x", "x_stride", "tokens", "per_token", "experts", "topk_ids", "topk_weights",
            "weighs_input", "activation", "gated", "residual", "residual_stride", "out",
            "out_stride", "planes", "sorted", "order", "segments", "counts", "inner", "weighted",
            "scratch",
        ),
        ("limit", ctypes.c_float),
    )  # fmt: skip


(N, K, CODES, CODES_STRIDE, SCALE_MIN, SCALE_MIN_STRIDE, WIDTH, GROUP, BITS, BIAS, HIGH, LOW,
 SCALES) = offsets(MatrixArguments)  # fmt: skip
(GATE_UP, DOWN, X, X_STRIDE, M, PER_TOKEN, EXPERTS, TOPK_IDS, TOPK_WEIGHTS, WEIGHS_INPUT,
 ACTIVATION, GATED, RESIDUAL, RESIDUAL_STRIDE, OUT, OUT_STRIDE, PLANES, SORTED, ORDER, SEGMENTS,
 COUNTS, INNER, WEIGHTED, SCRATCH, LIMIT) = offsets(ExpertsArguments)  # fmt: skip
_COLUMNS = 512  # of a token's sum, in one item


@inner
def _sort(args):
    """Order the pairs by expert; leaves 0 pairs if an expert is not there."""
    pairs = simd.peek_i64(args + M) * simd.peek_i64(args + PER_TOKEN)
    experts, topk_ids = simd.peek_i64(args + EXPERTS), simd.peek_i64(args + TOPK_IDS)
    counts, order = simd.peek_i64(args + COUNTS), simd.peek_i64(args + ORDER)
    segment = simd.peek_i64(args + SEGMENTS)
    counted = simd.peek_i64(args + SORTED)
    simd.poke_i64(counted, 0)
    simd.poke_i64(counted + 8, 0)
    for e in range(experts):
        simd.poke_i64(counts + 8 * e, 0)
    for p in range(pairs):
        e = simd.peek_i64(topk_ids + 8 * p)
        if e < 0 or e >= experts:
            return
        simd.poke_i64(counts + 8 * e, simd.peek_i64(counts + 8 * e) + 1)
    total, found = 0, 0
    for e in range(experts):
        count = simd.peek_i64(counts + 8 * e)
        if count > 0:
            simd.poke_i64(segment, e)
            simd.poke_i64(segment + 8, total)
            simd.poke_i64(segment + 16, total + count)
            simd.poke_i64(counts + 8 * e, total)
            segment += SEGMENT_BYTES
            total += count
            found += 1
    for p in range(pairs):
        place = counts + 8 * simd.peek_i64(topk_ids + 8 * p)
        simd.poke_i64(order + 8 * simd.peek_i64(place), p)
        simd.poke_i64(place, simd.peek_i64(place) + 1)
    simd.poke_i64(counted, pairs)
    simd.poke_i64(counted + 8, found)


@inner
def _pair(args, place):
    """The pair at a place of the sorted ones."""
    return simd.peek_i64(simd.peek_i64(args + ORDER) + 8 * place)


@inner
def _topk_weight(args, place):
    return simd.peek_f32(simd.peek_i64(args + TOPK_WEIGHTS) + 4 * _pair(args, place))


@inner
def _quantize(pool, phase, threads, args, matrix, row_bytes):
    """Inputs of all pairs, sorted, as int8 planes; row_bytes: of `inner`, 0 for rows of x."""
    pairs, k = simd.peek_i64(simd.peek_i64(args + SORTED)), simd.peek_i64(matrix + K)
    group, planes = simd.peek_i64(matrix + GROUP), simd.peek_i64(args + PLANES)
    groups = k // group
    parts = min(threads, groups) if pairs < 2 * threads and k >= LONG else 1
    items = pairs * parts
    item = take(pool, phase)
    while item < items:
        place = item // parts
        if row_bytes != 0:
            x = simd.peek_i64(args + INNER) + place * row_bytes
        else:
            pair = _pair(args, place)
            token = pair // simd.peek_i64(args + PER_TOKEN)
            x = simd.peek_i64(args + X) + token * simd.peek_i64(args + X_STRIDE)
        high = simd.peek_i64(matrix + HIGH) + place * k
        low = simd.peek_i64(matrix + LOW) + place * k
        scales = simd.peek_i64(matrix + SCALES) + place * groups * 8
        part = item % parts
        first, last = part * groups // parts, (part + 1) * groups // parts
        quantize_groups(x, first, last, group, planes, high, low, scales)
        if row_bytes == 0 and simd.peek_i64(args + WEIGHS_INPUT) != 0:
            weight = _topk_weight(args, place)
            for i in range(8 * first, 8 * last, 4):  # scales and sums
                simd.poke_f32(scales + i, simd.peek_f32(scales + i) * weight)
        finish(pool, phase)
        item = take(pool, phase)
    wait(pool, phase, items)


@inner
def _write_gated(args, matrix, bias, scratch, block, place, tokens):
    """Activations of 16 columns of `inner`, from blocks of gate and of up."""
    n, kind = simd.peek_i64(matrix + N), simd.peek_i64(args + ACTIVATION)
    limit = simd.peek_f32(args + LIMIT)
    for t in range(tokens):
        gate = with_bias(scratch + 64 * t, bias, 16 * block, n)
        up = with_bias(scratch + 64 * (tokens + t), bias, 16 * block + 16, n)
        to = simd.peek_i64(args + INNER) + (place + t) * 2 * n + 32 * block
        simd.store_f32(to, gated_activation(kind, limit, gate, up))


@inner
def _write_activated(args, matrix, bias, scratch, block, place, tokens):
    """32 columns of `inner`, of which each has its own activation."""
    n, kind = simd.peek_i64(matrix + N), simd.peek_i64(args + ACTIVATION)
    for t in range(tokens):
        to = simd.peek_i64(args + INNER) + (place + t) * 4 * n
        for r in range(2):
            row = 16 * (block + r)
            value = with_bias(scratch + 64 * (r * tokens + t), bias, row, n)
            simd.store_f32(to + 4 * row, activated(kind, value))


@inner
def _write_weighted(args, matrix, bias, scratch, block, place, tokens):
    """32 columns of outputs, weighted, to the places of their pairs in their tokens."""
    n = simd.peek_i64(matrix + N)
    for t in range(tokens):
        weight = np.float32(1.0)
        if simd.peek_i64(args + WEIGHS_INPUT) == 0:
            weight = _topk_weight(args, place + t)
        to = simd.peek_i64(args + WEIGHTED) + _pair(args, place + t) * 4 * n
        for r in range(2):
            row = 16 * (block + r)
            value = with_bias(scratch + 64 * (r * tokens + t), bias, row, n)
            simd.store_f32(to + 4 * row, simd.mul(value, simd.splat_f32(weight)))


@inner
def _accumulate(args, matrix, scratch, expert, block, place, tokens, is_first):
    """Accumulators [2, tokens, 16]; is_first: of these rows, when the next codes are asked for."""
    k, group = simd.peek_i64(matrix + K), simd.peek_i64(matrix + GROUP)
    bits, width = simd.peek_i64(matrix + BITS), simd.peek_i64(matrix + WIDTH)
    groups = k // group
    codes_stride, scale_stride = 2 * k * bits, groups * (ROW_BLOCK_BYTES << width)
    codes = simd.peek_i64(matrix + CODES) + expert * simd.peek_i64(matrix + CODES_STRIDE)
    scale_min = simd.peek_i64(matrix + SCALE_MIN)
    scale_min += expert * simd.peek_i64(matrix + SCALE_MIN_STRIDE)
    high = simd.peek_i64(matrix + HIGH) + place * k
    low = simd.peek_i64(matrix + LOW) + place * k
    scales = simd.peek_i64(matrix + SCALES) + place * groups * 8
    codes += block * codes_stride
    ahead = codes + 2 * codes_stride if is_first else 0
    scale_min += block * scale_stride
    multiply(bits, 2, tokens, simd.peek_i64(args + PLANES), scratch, codes, codes_stride, scale_min,
             scale_stride, width, group, groups, high, low, k, scales, scratch, 64 * tokens, 64,
             0, 0, ahead)  # fmt: skip


@inner
def _rows_of_expert(args, matrix, scratch, activates, expert, first, last, start, stop):
    """Row blocks [start, stop) of one expert times its pairs [first, last)."""
    k, bias = simd.peek_i64(matrix + K), simd.peek_i64(matrix + BIAS)
    if bias != 0:
        bias += expert * 4 * simd.peek_i64(matrix + N)
    together = while_cached(k)
    for run in range(first, last, together):
        end = min(run + together, last)
        for block in range(start, stop, 2):
            place = run
            while place < end:
                tokens = min(end - place, PANEL_TOKENS)
                first_ones = place == run
                _accumulate(args, matrix, scratch, expert, block, place, tokens, first_ones)
                if activates == 0:
                    _write_weighted(args, matrix, bias, scratch, block, place, tokens)
                elif simd.peek_i64(args + GATED) != 0:
                    _write_gated(args, matrix, bias, scratch, block, place, tokens)
                else:
                    _write_activated(args, matrix, bias, scratch, block, place, tokens)
                place += tokens


@inner
def _multiply(pool, phase, thread, threads, args, matrix, activates):
    """All segments, in items of a few row blocks; waits until all are done.

    activates: the first matrix, or else the second one.
    """
    blocks = simd.peek_i64(matrix + N) // 16
    step = 2 * max(1, blocks // (16 * threads))
    chunks = (blocks + step - 1) // step  # of a segment
    total = simd.peek_i64(simd.peek_i64(args + SORTED) + 8) * chunks
    part = (total + threads - 1) // threads  # chunks a thread
    scratch = simd.peek_i64(args + SCRATCH) + thread * TILE_BYTES
    item = take(pool, phase)
    while item < part * threads:
        # Threads that take turns walk through a part of their own, as the tile's prefetch expects.
        place = item % threads * part + item // threads
        if place < total:
            segment = simd.peek_i64(args + SEGMENTS) + place // chunks * SEGMENT_BYTES
            expert = simd.peek_i64(segment)
            first, last = simd.peek_i64(segment + 8), simd.peek_i64(segment + 16)
            start = place % chunks * step
            stop = min(start + step, blocks)
            _rows_of_expert(args, matrix, scratch, activates, expert, first, last, start, stop)
        finish(pool, phase)
        item = take(pool, phase)
    wait(pool, phase, part * threads)


@inner
def _add_up(pool, phase, args, matrix):
    """The sum of a token's weighted outputs, in the order of its experts, and its residual."""
    tokens, per_token = simd.peek_i64(args + M), simd.peek_i64(args + PER_TOKEN)
    n = simd.peek_i64(matrix + N)
    residual, parts = simd.peek_i64(args + RESIDUAL), (n + _COLUMNS - 1) // _COLUMNS
    item = take(pool, phase)
    while item < tokens * parts:
        token, first = item // parts, item % parts * _COLUMNS
        to = simd.peek_i64(args + OUT) + token * simd.peek_i64(args + OUT_STRIDE)
        plus = residual + token * simd.peek_i64(args + RESIDUAL_STRIDE)
        summands = simd.peek_i64(args + WEIGHTED) + token * per_token * 4 * n
        for column in range(4 * first, 4 * min(first + _COLUMNS, n), 64):
            total = simd.load_f32(summands + column)
            for t in range(1, per_token):
                total = simd.add(total, simd.load_f32(summands + t * 4 * n + column))
            if residual != 0:
                total = simd.add(total, simd.load_f32(plus + column))
            simd.store_f32(to + column, total)
        item = take(pool, phase)


@job
def gate_up_job(pool, thread, threads, args):
    """Sort the pairs, and compute their activations; the arguments are the fields above."""
    item = take(pool, 0)
    if item == 0:
        _sort(args)
        finish(pool, 0)
    wait(pool, 0, 1)
    _quantize(pool, 1, threads, args, args + GATE_UP, 0)
    _multiply(pool, 2, thread, threads, args, args + GATE_UP, 1)


@job
def down_job(pool, thread, threads, args):
    """Down projections of sorted pairs, and the sum of each token's."""
    _quantize(pool, 0, threads, args, args + DOWN, 4 * simd.peek_i64(args + DOWN + K))
    _multiply(pool, 1, thread, threads, args, args + DOWN, 0)
    _add_up(pool, 2, args, args + DOWN)
