"""The compiled job of the quantized matmul: norm, quantized activations, tiles, epilogue."""

from __future__ import annotations

import ctypes

import numpy as np

from qoff.kernels.cpu.attention.soft_cap import capped
from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.cpu.operands import int64s, offsets

from .activation import XIELU, activated, gated, sigmoid, xielu
from .multiply import is_panel, multiply, while_cached
from .norm_job import LONG, NormArguments, RowsArguments, norm_all, normalize
from .quantize import quantize_groups
from .scales import ROW_BLOCK_BYTES
from .scratch import PANEL_TOKENS, TILE_BYTES


class XieluArguments(ctypes.Structure):
    """The numbers of xIELU."""

    _fields_ = (
        ("alpha_p", ctypes.c_float),
        ("alpha_n", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


class LinearArguments(ctypes.Structure):
    """The job's arguments: addresses and strides in bytes, sizes, flags."""

    _fields_ = (
        *int64s(
            "x", "x_stride", "tokens", "k", "n", "codes", "scale_min", "width", "group", "bits",
            "bias", "bias_stride", "residual", "residual_stride", "activation", "gated", "score",
            "more", "out", "out_stride", "high", "low", "scales", "normed", "scratch", "planes",
            "row_norms",
        ),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("xielu", XieluArguments),
        ("norm", NormArguments),
        ("rows", RowsArguments),  # what follows when whole rows are there, with row_norms
    )  # fmt: skip
    OF_LAYER = (
        "codes", "scale_min", "width", "group", "bits", "bias", "xielu", "norm", "rows.norm",
    )  # fmt: skip


(X, X_STRIDE, M, K, N, CODES, SCALE_MIN, WIDTH, GROUP, BITS, BIAS, BIAS_STRIDE, RESIDUAL,
 RESIDUAL_STRIDE, ACTIVATION, GATED, SCORE, MORE, OUT, OUT_STRIDE, HIGH, LOW, SCALES, NORMED,
 SCRATCH, PLANES, ROW_NORMS, SCALE, SOFT_CAP, LIMIT, NUMBERS, NORM,
 ROWS) = offsets(LinearArguments)  # fmt: skip
ALPHA_P, ALPHA_N, BETA, EPS = offsets(XieluArguments)


@inner
def _quantize_token(args, thread, token, first, last):
    """Groups [first, last) of one token, normalized if there is a norm."""
    k, group = simd.peek_i64(args + K), simd.peek_i64(args + GROUP)
    x = simd.peek_i64(args + X) + token * simd.peek_i64(args + X_STRIDE)
    if simd.peek_i64(args + NORM) != 0:
        normed = simd.peek_i64(args + NORMED) + thread * 4 * k
        normalize(args + NORM, x, k, group * first, group * last, normed)
        x = normed
    high = simd.peek_i64(args + HIGH) + token * k
    low = simd.peek_i64(args + LOW) + token * k
    scales = simd.peek_i64(args + SCALES) + token * (k // group) * 8
    quantize_groups(x, first, last, group, simd.peek_i64(args + PLANES), high, low, scales)


@inner
def _quantize_all(pool, thread, threads, args):
    """Phase 0: all activations; long tokens are split when there are few."""
    tokens, k = simd.peek_i64(args + M), simd.peek_i64(args + K)
    groups = k // simd.peek_i64(args + GROUP)
    parts = min(threads, groups) if tokens < 2 * threads and k >= LONG else 1
    items = tokens * parts
    item = take(pool, 0)
    while item < items:
        part = item % parts
        first, last = part * groups // parts, (part + 1) * groups // parts
        _quantize_token(args, thread, item // parts, first, last)
        finish(pool, 0)
        item = take(pool, 0)
    wait(pool, 0, items)


@inlined
def _write(value, valid, residual, out, scratch):
    """Add the residual, if any, and write the first `valid` of 16 outputs."""
    if valid >= 16:
        if residual != 0:
            value = simd.add(value, simd.load_f32(residual))
        simd.store_f32(out, value)
        return
    simd.store_f32(scratch, value)
    for i in range(0, 4 * valid, 4):
        number = simd.peek_f32(scratch + i)
        if residual != 0:
            number += simd.peek_f32(residual + i)
        simd.poke_f32(out + i, number)


@inlined
def with_bias(address, bias, row, n):
    value = simd.load_f32(address)
    if bias != 0:
        if row + 16 <= n:
            value = simd.add(value, simd.load_f32(bias + 4 * row))
        else:
            for i in range(n - row):
                number = simd.peek_f32(address + 4 * i) + simd.peek_f32(bias + 4 * (row + i))
                simd.poke_f32(address + 4 * i, number)
            value = simd.load_f32(address)
    return value


@inlined
def _more(args, token, value):
    """What else follows a product than a gate: activation, score, scale and soft cap."""
    kind, score = simd.peek_i64(args + ACTIVATION), simd.peek_i64(args + SCORE)
    if kind == XIELU:
        by = args + NUMBERS
        value = xielu(
            simd.peek_f32(by + ALPHA_P), simd.peek_f32(by + ALPHA_N),
            simd.peek_f32(by + BETA), simd.peek_f32(by + EPS), value,
        )  # fmt: skip
    elif kind != 0:
        value = activated(kind, value)
    if score != 0:
        share = simd.splat_f32(simd.peek_f32(score + 4 * token))
        value = simd.mul(value, sigmoid(share, np.float32(1.0)))
    value = simd.mul(value, simd.splat_f32(simd.peek_f32(args + SCALE)))
    soft_cap = simd.peek_f32(args + SOFT_CAP)
    return capped(value, soft_cap) if soft_cap != np.float32(0.0) else value


@inner
def _epilogue(args, scratch, block, row_blocks, token, tokens):
    """Bias, what follows and residual for accumulators [row_blocks, tokens, 16]."""
    n, biases = simd.peek_i64(args + N), simd.peek_i64(args + BIAS)
    out, out_stride = simd.peek_i64(args + OUT), simd.peek_i64(args + OUT_STRIDE)
    residual = simd.peek_i64(args + RESIDUAL)
    residual_stride = simd.peek_i64(args + RESIDUAL_STRIDE)
    more, limit = simd.peek_i64(args + MORE), simd.peek_f32(args + LIMIT)
    for t in range(tokens):
        bias = biases + (token + t) * simd.peek_i64(args + BIAS_STRIDE)
        to = out + (token + t) * out_stride
        plus = residual + (token + t) * residual_stride if residual != 0 else 0
        if simd.peek_i64(args + GATED) != 0:
            gate = with_bias(scratch + 64 * t, bias, 16 * block, n)
            up = with_bias(scratch + 64 * (tokens + t), bias, 16 * block + 16, n)
            column = 4 * 8 * block
            if plus != 0:
                plus += column
            value = gated(simd.peek_i64(args + ACTIVATION), limit, gate, up)
            _write(value, 16, plus, to + column, scratch)
        else:
            for r in range(row_blocks):
                row = 16 * (block + r)
                address = scratch + 64 * (r * tokens + t)
                value = with_bias(address, bias, row, n)
                if more != 0:
                    value = _more(args, token + t, value)
                here = plus + 4 * row if plus != 0 else 0
                _write(value, n - row, here, to + 4 * row, address)


@inner
def _multiply(args, scratch, block, row_blocks, token, tokens, is_first):
    """Some tokens, to the result where nothing but the residual follows, or else by way of scratch.

    is_first: whether these are the first tokens of these rows; then the codes that follow are asked
    for.
    """
    k, group = simd.peek_i64(args + K), simd.peek_i64(args + GROUP)
    bits, width = simd.peek_i64(args + BITS), simd.peek_i64(args + WIDTH)
    groups = k // group
    codes_stride, scale_stride = 2 * k * bits, groups * (ROW_BLOCK_BYTES << width)
    codes = simd.peek_i64(args + CODES) + block * codes_stride
    scale_min = simd.peek_i64(args + SCALE_MIN) + block * scale_stride
    high = simd.peek_i64(args + HIGH) + token * k
    low = simd.peek_i64(args + LOW) + token * k
    scales = simd.peek_i64(args + SCALES) + token * groups * 8
    ahead = codes + row_blocks * codes_stride if is_first else 0
    follows = simd.peek_i64(args + BIAS) | simd.peek_i64(args + GATED) | simd.peek_i64(args + MORE)
    direct = follows == 0 and 16 * (block + row_blocks) <= simd.peek_i64(args + N)
    direct = direct and not is_panel(row_blocks, tokens)
    to, block_stride, stride, plus, plus_stride = scratch, 64 * tokens, 64, 0, 0
    if direct:
        block_stride, stride = 64, simd.peek_i64(args + OUT_STRIDE)
        to = simd.peek_i64(args + OUT) + token * stride + 64 * block
        plus, plus_stride = simd.peek_i64(args + RESIDUAL), simd.peek_i64(args + RESIDUAL_STRIDE)
        if plus != 0:
            plus += token * plus_stride + 64 * block
    multiply(bits, row_blocks, tokens, simd.peek_i64(args + PLANES), scratch, codes, codes_stride,
             scale_min, scale_stride, width, group, groups, high, low, k, scales, to, block_stride,
             stride, plus, plus_stride, ahead)  # fmt: skip
    if not direct:
        _epilogue(args, scratch, block, row_blocks, token, tokens)


@inner
def _fetch_outputs(args, block, token, tokens):
    """Ask for the memory that outputs go to, and for what is added to them."""
    out, out_stride = simd.peek_i64(args + OUT), simd.peek_i64(args + OUT_STRIDE)
    residual = simd.peek_i64(args + RESIDUAL)
    residual_stride = simd.peek_i64(args + RESIDUAL_STRIDE)
    column, nbytes = 64 * block, 128
    if simd.peek_i64(args + GATED) != 0:
        column, nbytes = 32 * block, 64
    for t in range(token, token + tokens):
        for offset in range(column, column + nbytes, 64):
            simd.prefetch_write(out + t * out_stride + offset)
            if residual != 0 and residual != out:
                simd.prefetch(residual + t * residual_stride + offset)


@inner
def _row_blocks_times_tokens(args, scratch, block, row_blocks, first, last):
    token = first
    while token < last:
        tokens = min(last - token, PANEL_TOKENS)
        if tokens > 1:
            _fetch_outputs(args, block, token, tokens)
        _multiply(args, scratch, block, row_blocks, token, tokens, token == first)
        token += tokens


@inner
def _first_block(item, chunks, threads, step):
    """Where the row blocks of an item begin.

    Threads that take turns walk through a part of their own, as the tile's prefetch expects.
    """
    part = chunks // threads
    return (item % threads * part + item % chunks // threads) * step


@inner
def _linear(pool, thread, threads, args):
    """The whole op on one thread of the pool."""
    tokens, k = simd.peek_i64(args + M), simd.peek_i64(args + K)
    blocks = (simd.peek_i64(args + N) + 15) // 16
    scratch = simd.peek_i64(args + SCRATCH) + thread * TILE_BYTES
    step = 2 * max(1, blocks // (16 * threads))
    part = ((blocks + step - 1) // step + threads - 1) // threads  # chunks a thread
    chunks = part * threads
    item = take(pool, 1)
    _quantize_all(pool, thread, threads, args)
    together = while_cached(k)
    runs = (tokens + together - 1) // together
    row_norms = simd.peek_i64(args + ROW_NORMS)
    while item < runs * chunks:
        first = item // chunks * together
        last = min(first + together, tokens)
        start = _first_block(item, chunks, threads, step)
        for block in range(start, min(start + step, blocks), 2):
            row_blocks = 2 if block + 2 <= blocks else 1
            _row_blocks_times_tokens(args, scratch, block, row_blocks, first, last)
        if row_norms != 0:
            finish(pool, 1)
        item = take(pool, 1)
    if row_norms != 0:
        wait(pool, 1, runs * chunks)
        norm_all(pool, 2, threads, args + ROWS)


@job
def linear_job(pool, thread, threads, args):
    """The whole op; its arguments are the fields above."""
    _linear(pool, thread, threads, args)
