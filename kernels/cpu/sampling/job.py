"""The compiled jobs that choose a token of each row of logits."""

from __future__ import annotations

import ctypes
import math

import numpy as np
from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit import emit, simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.pool_threads import finish, take, wait
from qoff.kernels.cpu.jit.simd import vector_intrinsic
from qoff.kernels.cpu.operands import int64s, offsets

from . import mersenne
from .scan import compact, first_from, kept_from, lanes_from, largest, least_from, total_from
from .scratch import GROUP


class Row(ctypes.Structure):
    """One row: address of its logits, how it is warped (top_k 0: all), the token that is chosen."""

    _fields_ = (
        *int64s("logits", "top_k", "token"),
        *((name, ctypes.c_float) for name in ("temperature", "min_p", "top_p", "least", "total")),
    )


class SamplingArguments(ctypes.Structure):
    """Addresses and sizes. noise: float64, of each row; 0: of torch's generator, in `state`.

    columns: of a row of `weights` and `compact`, whole groups. min_p_last: it bounds what top_p
    has left, else what top_p looks at. words: `mersenne.words_bytes`, which may be `compact`.
    """

    _fields_ = int64s(
        "rows", "count", "vocab", "columns", "noise", "noise_size", "state", "min_p_last",
        "weights", "compact", "words",
    )  # fmt: skip


LOGITS, TOP_K, TOKEN, TEMPERATURE, MIN_P, TOP_P, LEAST, TOTAL = offsets(Row)
(ROWS, COUNT, VOCAB, COLUMNS, NOISE, NOISE_SIZE, STATE, MIN_P_LAST, WEIGHTS, COMPACT, WORDS
 ) = offsets(SamplingArguments)  # fmt: skip
ROW_BYTES = ctypes.sizeof(Row)
_TINY = np.float32(np.finfo(np.float32).smallest_subnormal)
_ROUNDED = np.float32(1 - 1e-6)  # what rounding may make of a product of three numbers


@vector_intrinsic(types.float64, types.int64)
def _peek_f64(b, address):
    return emit.load(b, address, 0, ir.DoubleType())


@inner
def _likeliest(row, vocab):
    """The first of the largest logits, -1 where they are not finite; the largest one."""
    logits = simd.peek_i64(row + LOGITS)
    peak, good = largest(logits, vocab)
    if not good or not math.isfinite(peak):
        return -1, peak
    return first_from(logits, vocab, peak), peak


@inner
def _weigh(row, vocab, columns, peak, weights):
    """Weights of all tokens, 1 for the likeliest, and zeros behind them."""
    logits, whole = simd.peek_i64(row + LOGITS), vocab // 16 * 16
    below, factor = simd.splat_f32(-peak), np.float32(1.0) / simd.peek_f32(row + TEMPERATURE)
    scale = simd.splat_f32(factor)
    for i in range(0, 4 * whole, 64):
        x = simd.mul(simd.add(simd.load_f32(logits + i), below), scale)
        simd.store_f32(weights + i, simd.exp(x))
    for i in range(4 * whole, 4 * columns, 64):
        simd.store_f32(weights + i, simd.splat_f32(np.float32(0.0)))
    for i in range(4 * whole, 4 * vocab, 4):
        x = simd.splat_f32((simd.peek_f32(logits + i) - peak) * factor)
        simd.poke_f32(weights + i, simd.max_f32(simd.exp(x)))


@inner
def _bound(row, args, weights, columns, scratch):
    """The least weight of a token that may be drawn."""
    top_k, top_p = simd.peek_i64(row + TOP_K), simd.peek_f32(row + TOP_P)
    min_p = max(simd.peek_f32(row + MIN_P), _TINY)
    last = simd.peek_i64(args + MIN_P_LAST) != 0
    least = _TINY if last else min_p
    some, size = weights, columns
    if top_k > 0 and top_k < simd.peek_i64(args + VOCAB):
        least = max(least, least_from(some, size, np.float64(top_k), True, scratch))
        size, some = compact(weights, columns, least, scratch), scratch
    if top_p < np.float32(1.0):
        wanted = np.float64(top_p) * total_from(some, size, least)
        least = max(least, least_from(some, size, wanted, False, scratch))
    return max(least, min_p)


@inner
def _keep(weights, columns, least):
    """Set the weights of tokens that may not be drawn to 0."""
    limit = simd.splat_f32(least)
    for i in range(weights, weights + 4 * columns, 64):
        simd.store_f32(i, kept_from(simd.load_f32(i), limit))


@inner
def _group_sum(group):
    total = simd.splat_f32(np.float32(0.0))
    for i in range(group, group + 4 * GROUP, 64):
        total = simd.add(total, simd.load_f32(i))
    return np.float64(simd.sum_f32(total))


@inner
def _race(weights, columns, noise):
    """The token whose clock rings first: of the groups, then of the first group's tokens."""
    best, chosen = np.inf, 0
    for group in range(columns // GROUP):
        total = _group_sum(weights + 4 * GROUP * group)
        if total > 0.0:
            time = -math.log(_peek_f64(noise + 8 * (GROUP + group))) / total
            if time < best:
                best, chosen = time, group
    best, token = np.inf, 0
    for i in range(GROUP * chosen, GROUP * (chosen + 1)):
        weight = np.float64(simd.peek_f32(weights + 4 * i))
        if weight > 0.0:
            time = -math.log(_peek_f64(noise + 8 * (i - GROUP * chosen))) / weight
            if time < best:
                best, token = time, i
    return token


@inner
def _ratio(weights, total, words, i):
    noise = np.float32(-math.log1p(-mersenne.uniform(words + 8 * i)))
    return simd.peek_f32(weights + 4 * i) / total / noise


@inner
def _multinomial(weights, vocab, total, words, token):
    """What `torch.multinomial` draws: the largest probability over its exponential number.

    -log(1 - u) is at least u: few logarithms are needed to know which one it is. token: the
    likeliest, which few are better than.
    """
    best = _ratio(weights, total, words, token)
    reach = simd.splat_f32(best * total * _ROUNDED)
    for first in range(0, vocab, 16):
        weight = simd.load_f32(weights + 4 * first)
        bits, i = lanes_from(weight, simd.mul(mersenne.floors(words + 8 * first), reach)), first
        while bits != 0:
            if bits & 1:
                ratio = _ratio(weights, total, words, i)
                if ratio > best:
                    best, token = ratio, i
                    reach = simd.splat_f32(best * total * _ROUNDED)
            bits >>= 1
            i += 1
    return token


@inner
def _next(pool, item):
    """The next row; without a pool (0) one thread has all of them."""
    return item + 1 if pool == 0 else take(pool, 0)


@job
def likeliest_job(pool, thread, threads, args):
    """The likeliest token of each row."""
    count, vocab = simd.peek_i64(args + COUNT), simd.peek_i64(args + VOCAB)
    item = _next(pool, -1)
    while item < count:
        row = simd.peek_i64(args + ROWS) + item * ROW_BYTES
        simd.poke_i64(row + TOKEN, _likeliest(row, vocab)[0])
        item = _next(pool, item)


@inner
def _prepare(args, item, row):
    """Weights of a row's tokens, 0 for those that may not be drawn; and a token, by its noise."""
    vocab, columns = simd.peek_i64(args + VOCAB), simd.peek_i64(args + COLUMNS)
    token, peak = _likeliest(row, vocab)
    simd.poke_i64(row + TOKEN, token)
    if token < 0:
        return
    weights = simd.peek_i64(args + WEIGHTS) + 4 * columns * item
    _weigh(row, vocab, columns, peak, weights)
    scratch = simd.peek_i64(args + COMPACT) + 4 * columns * item
    least = _bound(row, args, weights, columns, scratch)
    _keep(weights, columns, least)
    noise = simd.peek_i64(args + NOISE)
    if noise != 0:
        noise += 8 * simd.peek_i64(args + NOISE_SIZE) * item
        simd.poke_i64(row + TOKEN, _race(weights, columns, noise))
    else:
        simd.poke_f32(row + TOTAL, np.float32(total_from(weights, columns, _TINY)))


@job
def draw_job(pool, thread, threads, args):
    """Draw a token of each row; with torch's generator one row after another."""
    count, vocab = simd.peek_i64(args + COUNT), simd.peek_i64(args + VOCAB)
    item = _next(pool, -1)
    while item < count:
        _prepare(args, item, simd.peek_i64(args + ROWS) + item * ROW_BYTES)
        if pool != 0:
            finish(pool, 0)
        item = _next(pool, item)
    if simd.peek_i64(args + NOISE) != 0:
        return
    if pool != 0:
        if take(pool, 1) > 0:
            return
        wait(pool, 0, count)
    words, state = simd.peek_i64(args + WORDS), simd.peek_i64(args + STATE)
    used = mersenne.read_state(state, words)
    for item in range(count):
        row = simd.peek_i64(args + ROWS) + item * ROW_BYTES
        weights = simd.peek_i64(args + WEIGHTS) + 4 * simd.peek_i64(args + COLUMNS) * item
        mersenne.make_words(words, used, vocab)
        token, total = simd.peek_i64(row + TOKEN), simd.peek_f32(row + TOTAL)
        if token >= 0:
            token = _multinomial(weights, vocab, total, words + 4 * used, token)
            simd.poke_i64(row + TOKEN, token)
        used = mersenne.advance(words, used, vocab)
    mersenne.write_state(state, words, used)
