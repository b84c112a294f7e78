"""The compiled update of weights: one pass over them, their gradients and their moments."""

from __future__ import annotations

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, inner, job
from qoff.kernels.cpu.jit.pool_threads import take

from . import lanes
from .coded import adam_block, adam_numbers, adam_scales, block_of_one, encode
from .scratch import BLOCK, ROOTS_BYTES, SCRATCH_BYTES
from .weights import (
    ADAM,
    FIRST_SCALE,
    LION,
    RULE,
    SCRATCH,
    SGD,
    N,
    by_first,
    flags,
    gradient,
    memory,
    next_weight,
    rule_numbers,
    write_weight,
)

_ITEMS = 1 << 15, 1 << 18  # weights that a thread takes at a time: at least, at most
_PARTS = 4  # items of a thread, where they are neither


@inlined
def _wide(args, rule, start, stop):
    """Weights whose moments are float32. All is read before anything is written: a processor that
    compares the last 12 bits of addresses takes moments in other pages for what it has written.
    """
    numbers = rule_numbers(args)
    master, copy, first, second, grad = memory(args)
    half, narrow, decays, nesterov = flags(args)
    beta1, rest1, beta2, rest2 = numbers[6:]
    for at in range(start, stop, 16):
        p = simd.load_f32(master + 4 * at)
        g = gradient(numbers, grad, narrow, decays, at, p)
        m = v = simd.load_f32(first + 4 * at)
        if rule == ADAM:
            v = simd.load_f32(second + 4 * at)
        if rule == LION:
            m_next = simd.mul_add(beta2, m, simd.mul(rest2, g))
        else:
            m_next = simd.mul_add(beta1, m, simd.mul(rest1, g))
        if rule == ADAM:
            v_next = simd.mul_add(beta2, v, simd.mul(simd.mul(g, g), rest2))
            simd.store_f32(second + 4 * at, v_next)
            step = simd.div(m_next, simd.mul_add(lanes.sqrt(v_next), numbers[4], numbers[5]))
        else:
            step = by_first(rule, nesterov, g, m, m_next, beta1, rest1)
        simd.store_f32(first + 4 * at, m_next)
        write_weight(master, copy, half, at, next_weight(numbers, p, step))


@inner
def _some(args, rule, start, stop, scratch):
    if simd.peek_i64(args + FIRST_SCALE) == 0:
        _wide(args, rule, start, stop)
    else:
        numbers, common = rule_numbers(args), adam_numbers(args)
        scales = adam_scales(args, common, start) if rule == ADAM else common[2:4]
        for block in range(start, stop + BLOCK, BLOCK):  # codes are made of roots a block later
            odd = (block // BLOCK) & 1
            roots, last = scratch + odd * ROOTS_BYTES, scratch + (1 - odd) * ROOTS_BYTES
            if block < stop and rule == ADAM:
                spare = scratch + 2 * ROOTS_BYTES
                adam_block(args, numbers, common, scales, block, roots, spare)
                scales = adam_scales(args, common, min(block + BLOCK, stop - BLOCK))
            elif block < stop:
                block_of_one(args, numbers, rule, block, roots)
            if block > start:
                encode(args, rule, block - BLOCK, last)


@job
def update_job(pool, thread, threads, args):
    """The whole update; its arguments are the fields above."""
    n, rule = simd.peek_i64(args + N), simd.peek_i64(args + RULE)
    scratch = simd.peek_i64(args + SCRATCH) + thread * SCRATCH_BYTES
    item = min(max(n // (_PARTS * threads), _ITEMS[0]), _ITEMS[1]) // BLOCK * BLOCK
    start = take(pool, 0) * item
    while start < n:
        stop = min(start + item, n)
        if rule == ADAM:
            _some(args, ADAM, start, stop, scratch)
        elif rule == LION:
            _some(args, LION, start, stop, scratch)
        else:
            _some(args, SGD, start, stop, scratch)
        start = take(pool, 0) * item
