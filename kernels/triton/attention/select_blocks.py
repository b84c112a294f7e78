"""Which packed blocks a new token attends to, on a GPU: bounds of their scores, then the best.

A bound is a sum of float32 in another order than the reference's, so where two bounds differ by
rounding alone either may be the larger. A bound becomes a 32-bit integer of the same order; the
least that is chosen is found bit by bit, and of equal ones the first are chosen.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import astuple
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import kept_blocks
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.overlap import (
    let_next_begin,
    overlap_options,
    overlaps,
    wait_for_earlier,
)
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2
from qoff.kernels.triton.linear.planes import halves

from .kv_tiles import TOKENS, first_seen, form_constants, window_constants
from .new_token import NewTokens, load_step

_LOWEST, _HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
_ROWS, _CHUNK = 16, 1024  # blocks whose bounds, or whose keys, a program has at a time
_PROGRAMS = 8  # for a processor, at most


class ChosenBlocks(NamedTuple):
    """Blocks that the new token of each sequence attends to, the oldest first.

    blocks: int32 [S, kv_heads, most], their numbers in the pool; counts: int32 [S, kv_heads], how
    many of them there are. far: int32 [S, kv_heads], how many of these, the first ones, are in host
    memory, of which `blocks` has places in the sequence; None: none are.
    """

    blocks: Tensor
    counts: Tensor
    far: Tensor | None = None


@triton.jit
def _visible(end, in_blocks, window, WINDOW: tl.constexpr):
    """The first block that the token at end - 1 sees, and how many there are from it on."""
    first_key = tl.maximum(first_seen(end - 1, window, WINDOW), 0) if WINDOW else 0
    first = first_key // TOKENS
    return first, tl.maximum(in_blocks // TOKENS - first, 0)


@triton.jit
def _load_folded(records, inside, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Parameters of channels, float32 [ROWS, PAIRS] of the even and odd ones of both halves."""
    QUARTER: tl.constexpr = HEAD_DIM // 4
    pair = tl.arange(0, PAIRS)[None, :]
    at = records.to(tl.pointer_type(tl.uint32)) + pair
    mask = inside & (pair < QUARTER)
    a, b = halves(tl.load(at, mask=mask, other=0), tl.float16)
    c, d = halves(tl.load(at + QUARTER, mask=mask, other=0), tl.float16)
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def ordered(bound):
    """int32 of the same order as float32, of zeros one."""
    bits = (bound + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _HIGHEST, bits)


@triton.jit(do_not_specialize=["run", "max_blocks", "most"])
def block_bounds_kernel(
    q,  # [rows, Hq, D]
    pool,
    bounds,  # of the blocks in host memory, those below 0 in the table
    block_table, compressed, length, row_start, cos, sin, q_norm,
    keys,  # int32 [S, kv_heads, most]
    eps,
    window,
    query_beta,
    query_every,
    query_ahead,
    kv_heads,
    q_stride,
    run,  # blocks of a program
    max_blocks,
    most,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
    K_BITS: tl.constexpr, K_SCALE: tl.constexpr, NBYTES: tl.constexpr, WINDOW: tl.constexpr,
    NEW: tl.constexpr, TURNED: tl.constexpr, Q_NORM: tl.constexpr, QUERY_SCALE: tl.constexpr,
    FAR: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Bounds of the scores of a run of blocks, by the queries of one KV head, as ordered integers.

    The sum over channels and queries of max(q * minimum, q * (minimum + levels * scale)) is that of
    (sum of q) * minimum + (sum of what is above 0 of q) * levels * scale.
    """
    wait_for_earlier(OVERLAP)
    LEVELS: tl.constexpr = 2**K_BITS - 1
    kv_head = tl.program_id(0)
    s = tl.program_id(2)
    end = tl.load(length + s)
    first, count = _visible(end, tl.load(compressed + s), window, WINDOW)
    begin = tl.program_id(1) * run
    stop = tl.minimum(begin + run, count)
    t0 = tl.zeros([PAIRS], tl.float32)
    t1 = tl.zeros([PAIRS], tl.float32)
    t2 = tl.zeros([PAIRS], tl.float32)
    t3 = tl.zeros([PAIRS], tl.float32)
    p0 = tl.zeros([PAIRS], tl.float32)
    p1 = tl.zeros([PAIRS], tl.float32)
    p2 = tl.zeros([PAIRS], tl.float32)
    p3 = tl.zeros([PAIRS], tl.float32)
    for tile in range(0, tl.where(begin < stop, GROUP, 0), COLUMNS):
        in_group = tile + tl.arange(0, COLUMNS)
        q0, q1, q2, q3, _, _, _ = load_step(
            q, q_stride, row_start, cos, sin, q_norm, eps, query_beta, query_every, query_ahead,
            s, end, kv_head * GROUP + in_group, in_group,
            GROUP, HEAD_DIM, PAIRS, NEW, TURNED, Q_NORM, QUERY_SCALE,
        )  # fmt: skip
        f0, f1, f2, f3 = q0.to(tl.float32), q1.to(tl.float32), q2.to(tl.float32), q3.to(tl.float32)
        t0 += tl.sum(f0, 1)
        t1 += tl.sum(f1, 1)
        t2 += tl.sum(f2, 1)
        t3 += tl.sum(f3, 1)
        p0 += tl.sum(tl.maximum(f0, 0.0), 1)
        p1 += tl.sum(tl.maximum(f1, 0.0), 1)
        p2 += tl.sum(tl.maximum(f2, 0.0), 1)
        p3 += tl.sum(tl.maximum(f3, 0.0), 1)
    table = block_table + s.to(tl.int64) * max_blocks + first
    into = keys + (s * kv_heads + kv_head).to(tl.int64) * most
    for row in range(begin, stop, ROWS):
        at = row + tl.arange(0, ROWS)
        inside = at < stop
        block = tl.load(table + at, mask=inside, other=0).to(tl.int64)
        scales = pool + (block * kv_heads + kv_head) * NBYTES + K_SCALE
        if FAR:
            there = bounds + ((-1 - block) * kv_heads + kv_head) * (4 * HEAD_DIM)
            scales = tl.where(block < 0, there, scales)
        scales = scales[:, None]
        m0, m1, m2, m3 = _load_folded(scales + 2 * HEAD_DIM, inside[:, None], HEAD_DIM, PAIRS)
        s0, s1, s2, s3 = _load_folded(scales, inside[:, None], HEAD_DIM, PAIRS)
        low = m0 * t0[None, :] + m1 * t1[None, :] + m2 * t2[None, :] + m3 * t3[None, :]
        wide = s0 * p0[None, :] + s1 * p1[None, :] + s2 * p2[None, :] + s3 * p3[None, :]
        tl.store(into + at, ordered(tl.sum(low + LEVELS * wide, 1)), mask=inside)
    let_next_begin(OVERLAP)


@triton.jit
def _load_keys(source, at, count, sink):
    """Keys of blocks; the sequence's first, if it is kept whatever its bound, has the highest."""
    key = tl.load(source + at, mask=at < count, other=_LOWEST)
    return tl.where((at == 0) & sink, _HIGHEST, key)


@triton.jit(do_not_specialize=["max_blocks", "most", "most_chosen"])
def select_blocks_kernel(
    keys,  # int32 [S, kv_heads, most]
    block_table, compressed, length,
    chosen,  # int32 [S, kv_heads, most_chosen]
    counts,  # int32 [S, kv_heads]
    far,
    window,
    kv_heads,
    max_blocks,
    most,
    most_chosen,
    TOP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr,
    FAR: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """List the best blocks of one sequence and KV head: of equal ones the first, in their order.

    ONE_CHUNK: there are no more than CHUNK, so keys stay in registers while the least is searched.
    """
    wait_for_earlier(OVERLAP)
    s = tl.program_id(1)
    number = (s * kv_heads + tl.program_id(0)).to(tl.int64)
    first, count = _visible(tl.load(length + s), tl.load(compressed + s), window, WINDOW)
    # `layer_cache.kept_blocks`
    wanted = count.to(tl.float64) * TOP - 1e-9
    kept = wanted.to(tl.int32)
    kept += (wanted > kept.to(tl.float64)).to(tl.int32)
    kept = tl.minimum(tl.minimum(tl.maximum(kept, 1), count), most_chosen)
    sink = (first == 0) & (kept > 1)
    source = keys + number * most
    lane = tl.arange(0, CHUNK)
    # The kept-th largest key is the largest number that so many keys are not below.
    least = tl.full([], _LOWEST, tl.int32)
    if ONE_CHUNK:
        all_keys = _load_keys(source, lane, count, sink)
    for step in range(32):
        candidate = tl.where(step == 0, 0, least | (tl.full([], 1, tl.int32) << (31 - step)))
        if ONE_CHUNK:
            found = (all_keys >= candidate).to(tl.int32)
        else:
            found = tl.zeros([CHUNK], tl.int32)
            for begin in range(0, count, CHUNK):
                found += (_load_keys(source, begin + lane, count, sink) >= candidate).to(tl.int32)
        least = tl.where(tl.sum(found) >= kept, candidate, least)
    found = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, count, CHUNK):
        found += (_load_keys(source, begin + lane, count, sink) > least).to(tl.int32)
    table = block_table + s.to(tl.int64) * max_blocks + first
    equal = kept - tl.sum(found)  # how many of those with the least key
    taken = tl.zeros([], tl.int32)
    offloaded = tl.zeros([], tl.int32)
    for begin in range(0, count, CHUNK):
        at = begin + lane
        key = _load_keys(source, at, count, sink)
        same = ((key == least) & (at < count)).to(tl.int32)
        take = ((key > least) | ((same > 0) & (tl.cumsum(same) <= equal))).to(tl.int32)
        to = taken + tl.cumsum(take) - 1
        block = tl.load(table + at, mask=take > 0, other=0)
        if FAR:
            offloaded += tl.sum((block < 0).to(tl.int32))
            block = tl.where(block < 0, first + at, block)
        tl.store(chosen + number * most_chosen + to, block, mask=take > 0)
        taken += tl.sum(take)
        equal -= tl.sum(same)
    tl.store(counts + number, kept)
    if FAR:
        tl.store(far + number, offloaded)
    let_next_begin(OVERLAP)


def select_blocks(
    q: Tensor, cache: DeviceLayerCache, shape: HeadShape, new: NewTokens | None = None
) -> ChosenBlocks | None:
    """Choose `kept_blocks(cache.top, n)` of the n blocks that each new token sees, per KV head.

    What is chosen is what `reference.select_blocks` says, wherever blocks lie. q, new: as for
    `decode.decode_attention`, whose rows they are; reads the queries, and of K the scales and
    minima alone. None: all blocks are attended to, as for short sequences, and none of them is in
    host memory. Allocates `select_bytes`. Raises OpError for blocks there without bounds here.
    """
    step, form, top = cache.step, cache.form, cache.top
    elsewhere = step.resident_from is not None
    if elsewhere and cache.bounds is None:
        raise OpError("attention to a part of the blocks needs bounds of those in host memory")
    most = step.max_packed if step.max_ranked is None else step.max_ranked
    blocks = min(most // BLOCK_TOKENS, most_seen(shape))
    kept = kept_blocks(top, blocks)
    if kept >= blocks and not cache.offloaded:
        return None
    sequences, device = len(step.start), q.device
    turned = 0 if new is None or new.tables is None else new.tables[0].shape[1]
    q_norm = None if new is None else new.q_norm
    flags = (new is not None, turned, 0 if q_norm is None else 1 + shape.norm_last)
    several = blocks <= _CHUNK, elsewhere
    bound, select = _bound(device, q.dtype, form, shape, top, flags, *several)
    keys = q.new_empty(sequences, shape.kv_heads, blocks, dtype=torch.int32)
    chosen = q.new_empty(sequences, shape.kv_heads, kept, dtype=torch.int32)
    counts = q.new_empty(sequences, shape.kv_heads, dtype=torch.int32)
    far = torch.empty_like(counts) if elsewhere else None
    if not sequences:
        return ChosenBlocks(chosen, counts, far)
    fresh = (None, None, None)
    if new is not None:
        fresh = (step.row_start, *(new.tables or (None, None)))
    by = (0.0, 1, 0) if shape.query_scale is None else astuple(shape.query_scale)
    programs = _PROGRAMS * Gpu.of(device).processors
    run = _ROWS * cdiv(blocks * shape.kv_heads * sequences, _ROWS * programs)
    window = abs(shape.reach)
    bound(
        (shape.kv_heads, cdiv(blocks, run), sequences),
        q, cache.pool, cache.bounds, step.table, step.packed, step.length, *fresh, q_norm, keys,
        shape.norm_eps, window, *by, shape.kv_heads, q.stride(0),
        run, step.table.stride(0), blocks,
    )  # fmt: skip
    select(
        (shape.kv_heads, sequences, 1),
        keys, step.table, step.packed, step.length, chosen, counts, far, window, shape.kv_heads,
        step.table.stride(0), blocks, kept,
    )  # fmt: skip
    return ChosenBlocks(chosen, counts, far)


def select_bytes(
    sequences: int, kv_heads: int, blocks: int, top: float, offloaded: bool = False
) -> int:
    """The most bytes `select_blocks` allocates for up to `blocks` blocks of each sequence.

    offloaded: some of them may be in host memory.
    """
    kept = kept_blocks(top, blocks)
    if top == 1 or (kept >= blocks and not offloaded):
        return 0
    return 4 * sequences * kv_heads * (blocks + kept + 1 + offloaded)


def most_seen(shape: HeadShape) -> int:
    """Blocks that a query sees, at most; a window that starts inside one reaches into one more."""
    window = abs(shape.reach)
    return window // BLOCK_TOKENS + 1 if window else 1 << 30


@cache
def _bound(
    device: torch.device,
    dtype: torch.dtype,
    form: KVFormat,
    shape: HeadShape,
    top: float,
    flags: tuple[int, ...],
    one_chunk: bool,
    elsewhere: bool,
) -> tuple[BoundKernel, BoundKernel]:
    """Both kernels for all that does not change from step to step.

    flags: new tokens, pairs that are turned, norm of queries (see `load_new`).
    one_chunk: as in the kernel. elsewhere: some blocks may be in host memory.
    """
    group, (_, windowed) = shape.heads // shape.kv_heads, window_constants(shape)
    constants = form_constants(form)
    common = {
        "WINDOW": windowed,
        "FAR": elsewhere,
        "OVERLAP": overlaps(device),
        "num_stages": 1,
    }
    bound = BoundKernel(
        block_bounds_kernel,
        **{name: constants[name] for name in ("HEAD_DIM", "K_BITS", "K_SCALE", "NBYTES")},
        **dict(zip(("NEW", "TURNED", "Q_NORM"), flags, strict=True)),
        GROUP=group,
        COLUMNS=8 if group <= 8 else 16,
        PAIRS=max(16, next_power_of_2(form.head_dim // 4)),
        QUERY_SCALE=shape.query_scale is not None,
        ROWS=_ROWS,
        num_warps=4,
        **common,
        **overlap_options(device),
    )
    select = BoundKernel(
        select_blocks_kernel, TOP=top, CHUNK=_CHUNK, ONE_CHUNK=one_chunk, num_warps=4, **common,
        **overlap_options(device),
    )  # fmt: skip
    return bound, select
