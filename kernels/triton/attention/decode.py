"""Attention of one new token per sequence over its packed blocks and its recent window, on a GPU.

Keys are the rows of the score tile and the queries of a GQA group its columns: a tile of packed
codes is the left operand of a tensor-core instruction as it comes out of memory, and eight columns
do where the other way round sixteen rows would be needed. All sums over channels and tokens are
such dots too: of K's minima with the queries, of probabilities with V's minima and with ones. So a
block costs a few operations per tile beside the unpacking, whatever the number of queries.

A sequence is cut into runs of blocks and, where that fills the GPU, runs of its recent window, one
program each; `merge` joins them (flash-decoding).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.rotation import value_run
from qoff.kernels.operands import FLOATS_AND_32, require
from qoff.kernels.triton.elementwise.rope import check_tables
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import use_asm
from qoff.kernels.triton.launch.overlap import (
    let_next_begin,
    overlap_options,
    overlaps,
    wait_for_earlier,
)
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .decode_tiles import attend_blocks, attend_ring
from .kv_tiles import LN2, LOG2E, TOKENS, add_sink, first_seen, form_constants, window_constants
from .merge import join, merge_bytes
from .new_token import NewTokens, keep_new, load_step
from .runs import Split, most_recent_parts
from .select_blocks import ChosenBlocks, most_seen, select_blocks, select_bytes


@dataclass(frozen=True)
class DecodeConfig:
    """How a block is spread over warps, and what is known about programs of that kind."""

    num_warps: int
    num_stages: int = 2  # 2: a block is copied to shared memory while the one before is computed
    resident: int = 8  # programs that a processor holds at once


@triton.jit(
    do_not_specialize=[
        "recent_parts", "recent_run", "run", "max_blocks", "most_chosen", "rows",
    ]
)  # fmt: skip
def decode_attention_kernel(
    q,  # [rows, Hq, D]
    pool, block_table, compressed, length, recent_k, recent_v, sinks, resident_from,
    outs,  # [runs + 1, rows, Hq, D]
    lses, row_start, key, value, cos, sin, q_norm, k_norm, chosen, counts, far,
    scale,  # softmax scale * log2(e)
    soft_cap,  # * log2(e)
    eps,
    window,
    query_beta,
    query_every,
    query_ahead,
    ring,  # W
    kv_heads,
    q_stride,
    key_stride,
    value_stride,
    recent_parts,  # of the recent window
    recent_run,  # tokens in each
    run,  # blocks in a run
    max_blocks,
    most_chosen,
    rows,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, PARTS: tl.constexpr, K_SCALE: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, NBYTES: tl.constexpr, SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, RESIDENT_FROM: tl.constexpr,
    SPARSE: tl.constexpr, NEW: tl.constexpr, TURNED: tl.constexpr, Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr, V_RUN: tl.constexpr, QUERY_SCALE: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A run of blocks, or (the first ones of a sequence) of its recent window, for COLUMNS queries.

    With SPARSE the blocks are those that are `chosen`, from `far` to `counts`: `ChosenBlocks`.
    With NEW the row of a sequence is at `row_start`, and unless that is 2 the program that attends
    to the new token of a KV head puts it into the ring before: see `new_token`.
    """
    wait_for_earlier(OVERLAP)
    HALF: tl.constexpr = HEAD_DIM // 2
    TILES: tl.constexpr = (GROUP + COLUMNS - 1) // COLUMNS
    kv_head = tl.program_id(0) // TILES
    part = tl.program_id(1)
    s = tl.program_id(2)
    in_group = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    head = kv_head * GROUP + in_group
    channel = 2 * tl.arange(0, PAIRS)
    at = head[None, :] * HEAD_DIM + channel[:, None]
    end = tl.load(length + s)
    in_blocks = tl.load(compressed + s)
    first_key = tl.maximum(first_seen(end - 1, window, WINDOW), 0) if WINDOW else 0
    q0, q1, q2, q3, at_row, there, mask = load_step(
        q, q_stride, row_start, cos, sin, q_norm, eps, query_beta, query_every, query_ahead,
        s, end, head, in_group,
        GROUP, HEAD_DIM, PAIRS, NEW, TURNED, Q_NORM, QUERY_SCALE,
    )  # fmt: skip
    if part < recent_parts:
        row = kv_heads * HEAD_DIM
        ring_base = s.to(tl.int64) * ring * row + kv_head * HEAD_DIM
        first = tl.maximum(in_blocks, first_key) + part * recent_run
        stop = tl.minimum(first + recent_run, end)
        if NEW == 1 and first < end and stop == end:
            position = tl.maximum(end - 1, 0)
            slot = ring_base + (position % ring) * row
            keep_new(
                key + at_row.to(tl.int64) * key_stride + kv_head * HEAD_DIM,
                value + at_row.to(tl.int64) * value_stride + kv_head * HEAD_DIM,
                recent_k + slot, recent_v + slot, tl.minimum(end, 1), position, cos, sin, k_norm,
                eps, HEAD_DIM, PAIRS, TURNED, K_NORM, V_RUN,
            )  # fmt: skip
        o0, o1, o2, o3, top, total = attend_ring(
            q0, q1, q2, q3, recent_k + ring_base, recent_v + ring_base, row, ring,
            first, stop, scale, soft_cap,
            COLUMNS, HEAD_DIM, PAIRS, SOFT_CAP, ASM,
        )  # fmt: skip
        if SINKS and part == 0:
            top, total, fade = add_sink(sinks, head, in_group < GROUP, top, total)
            o0 = o0 * fade[None, :]
            o1 = o1 * fade[None, :]
            o2 = o2 * fade[None, :]
            o3 = o3 * fade[None, :]
    else:
        first_block = first_key // TOKENS
        begin = (part - recent_parts) * run
        table = block_table + s.to(tl.int64) * max_blocks
        hidden = first_key
        if SPARSE:
            number = (s * kv_heads + kv_head).to(tl.int64)
            if RESIDENT_FROM:
                begin += tl.load(far + number)
            stop = tl.minimum(begin + run, tl.load(counts + number))
            blocks = chosen + number * most_chosen
            if WINDOW:  # of those that are chosen, the first alone may begin before the window
                oldest = tl.load(table + first_block, mask=begin < stop, other=0)
                same = oldest == tl.load(blocks, mask=begin < stop, other=-1)
                hidden = tl.where(same, first_key % TOKENS, 0)
            table = blocks
        else:
            if RESIDENT_FROM:
                first_block = tl.maximum(first_block, tl.load(resident_from + s) // TOKENS)
            begin += first_block
            stop = tl.minimum(begin + run, in_blocks // TOKENS)
        o0, o1, o2, o3, top, total = attend_blocks(
            q0.to(tl.float16), q1.to(tl.float16), q2.to(tl.float16), q3.to(tl.float16),
            pool + kv_head * NBYTES, kv_heads * NBYTES, table,
            begin, stop, hidden, scale, soft_cap,
            COLUMNS, HEAD_DIM, PAIRS, K_BITS, V_BITS, PARTS, K_SCALE, V_CODES, V_SCALE,
            SOFT_CAP, WINDOW, STAGES, ASM,
        )  # fmt: skip
    let_next_begin(OVERLAP)
    safe = tl.where(total == 0, 1.0, total)
    inverse = (1.0 / safe)[None, :]
    lse = tl.where(total == 0, -float("inf"), (top + tl.log2(safe)) * LN2)
    first_head = (part * rows + at_row).to(tl.int64) * (kv_heads * GROUP)
    tl.store(lses + first_head + head, lse, mask=there)
    target = outs + first_head * HEAD_DIM + at
    DTYPE: tl.constexpr = outs.dtype.element_ty
    tl.store(target, (o0 * inverse).to(DTYPE), mask=mask)
    tl.store(target + 1, (o1 * inverse).to(DTYPE), mask=mask)
    tl.store(target + HALF, (o2 * inverse).to(DTYPE), mask=mask)
    tl.store(target + HALF + 1, (o3 * inverse).to(DTYPE), mask=mask)


def decode_attention(
    q: Tensor,
    cache: DeviceLayerCache,
    shape: HeadShape,
    sinks: Tensor | None = None,
    config: DecodeConfig | None = None,
    new: NewTokens | None = None,
    chosen: ChosenBlocks | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [S, Hq, D] in q's type and log-sum-exp float32 [S, Hq]: one query per sequence.

    Meaning and arguments are those of `reference.attention.decode_attention`. q: in the dtype of
    the ring; its rows may lie apart. new: the ring gets these keys and values first, and q are
    queries as they come out of the projection; their rows, and those of the results, are those of
    the pass, one for each sequence that has a new token; only they get the shape's `query_scale`.
    With a `top` of the cache below 1 blocks are those of `select_blocks`, which are chosen here
    unless they are given, and of the others scales and minima of K alone are read. Raises OpError.
    """
    cache.check_queries(q, shape, sinks)
    if new is not None:
        check_new(new, cache)
    step, form = cache.step, cache.form
    sequences = step.start.shape[0]
    rows = sequences if new is None else step.positions.shape[0]
    if q.shape[0] != rows:
        raise OpError(f"q has a row for each of {rows} sequences, not {len(q)}")
    outputs = (shape.heads, form.head_dim)
    if chosen is None and cache.top < 1:
        chosen = select_blocks(q, cache, shape, new)
    turned = 0 if new is None or new.tables is None else new.tables[0].shape[1]
    norms = (None, None) if new is None else (new.q_norm, new.k_norm)
    flags = (
        sinks is not None,
        step.resident_from is not None,
        chosen is not None,
        0 if new is None else 1 + new.kept,
        turned,
        *(0 if by is None else 1 + shape.norm_last for by in norms),
        value_run(form.head_dim) if new is not None and new.rotated else 1,
    )
    ring = cache.recent_k.shape[1]
    kernel, split, most_parts = _bound(
        q.device, q.dtype, form, shape, sequences, ring, flags, config
    )
    lists = (None, None, None) if chosen is None else chosen
    most = step.max_packed // BLOCK_TOKENS if chosen is None else chosen.blocks.shape[2]
    parts, run = split.of(most)
    outs = q.new_empty(parts, rows, *outputs)
    lses = q.new_empty(parts, rows, shape.heads, dtype=torch.float32)
    if rows:
        fresh, strides = _NOTHING, (0, 0)
        by = (0.0, 1, 0) if shape.query_scale is None else astuple(shape.query_scale)
        if new is not None:
            fresh = (step.row_start, new.key, new.value, *(new.tables or (None, None)), *new[3:5])
            strides = (new.key.stride(0), new.value.stride(0))
        kernel(
            (split.tiles, parts, sequences),
            q, cache.pool, step.table, step.packed, step.length, cache.recent_k, cache.recent_v,
            sinks, step.resident_from, outs, lses, *fresh, *lists,
            shape.scale * LOG2E.value, shape.soft_cap * LOG2E.value, shape.norm_eps,
            abs(shape.reach), *by, ring, shape.kv_heads, q.stride(0), *strides,
            *split.recent, run, step.table.stride(0), 0 if chosen is None else most, rows,
        )  # fmt: skip
    if parts == 1 and flags[-1] == 1:
        return outs[0], lses[0]
    return join(outs, lses, most_parts, flags[-1])


_SHARED_KIB = {80: 164, 89: 100, 120: 100}  # of a processor
_NOTHING = (None,) * 7  # of new tokens


def check_new(new: NewTokens, cache: DeviceLayerCache) -> None:
    """Raise OpError unless the new tokens fit the cache."""
    cache.check_fresh(new.key, new.value)
    dim = cache.form.head_dim
    if new.tables is not None:
        check_tables(*new.tables, dim, new.key.device)
    for name, weight in (("q_norm", new.q_norm), ("k_norm", new.k_norm)):
        if weight is not None:
            require(name, weight, FLOATS_AND_32, (dim,), new.key.device)


@cache
def _bound(
    device: torch.device,
    dtype: torch.dtype,
    form: KVFormat,
    shape: HeadShape,
    sequences: int,
    ring: int,
    flags: tuple[int, ...],
    config: DecodeConfig | None,
) -> tuple[BoundKernel, Split, int]:
    """The kernel for all that does not change from step to step, how blocks are cut, and the most
    parts.

    flags: sinks, resident_from, chosen blocks, new tokens (2: kept), pairs that are turned, norms
    of queries and of keys (see `load_new`), channels of V that are rotated together.
    """
    (_, windowed), group = window_constants(shape), shape.heads // shape.kv_heads
    columns = _columns(group)
    config = config or _configured(device, dtype, form, columns)
    tiles, processors = shape.kv_heads * cdiv(group, columns), Gpu.of(device).processors
    split = Split(tiles, sequences, processors, config.resident, most_seen(shape), ring)
    names = ("SINKS", "RESIDENT_FROM", "SPARSE", "NEW", "TURNED", "Q_NORM", "K_NORM", "V_RUN")
    kernel = BoundKernel(
        decode_attention_kernel,
        **form_constants(form),
        **dict(zip(names, flags, strict=True)),
        GROUP=group,
        COLUMNS=columns,
        PAIRS=max(16, next_power_of_2(form.head_dim // 4)),
        SOFT_CAP=shape.soft_cap != 0,
        WINDOW=windowed,
        QUERY_SCALE=shape.query_scale is not None,
        STAGES=config.num_stages,
        OVERLAP=overlaps(device),
        ASM=use_asm(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlap_options(device),
    )
    return kernel, split, split.most_parts


@cache
def _configured(
    device: torch.device, dtype: torch.dtype, form: KVFormat, columns: int
) -> DecodeConfig:
    key = f"{str(dtype)[6:]}-{form.head_dim}-k{form.k_bits}-v{form.v_bits}-{columns}"
    entry = tuned.lookup("decode_attention", device, key)
    return DecodeConfig(**entry) if entry else _heuristic(Gpu.of(device).capability, form, columns)


def decode_bytes(
    sequences: int,
    heads: int,
    kv_heads: int,
    blocks: int,
    form: KVFormat,
    dtype: torch.dtype,
    device: torch.device,
    top: float = 1.0,
    offloaded: bool = False,
) -> int:
    """The most bytes `decode_attention` allocates for up to `blocks` blocks of each sequence.

    Partial results of each run of blocks and of the ring, and their merge; and what chooses blocks,
    some of which are in host memory where `offloaded`. top: see `DeviceLayerCache`.
    """
    group = heads // kv_heads
    columns = _columns(group)
    config = _configured(device, dtype, form, columns)
    tiles = sequences * kv_heads * cdiv(group, columns)
    processors = Gpu.of(device).processors
    split = Split(tiles, 1, processors, config.resident, blocks, 0)
    parts = most_recent_parts(tiles, processors) + split.most_runs(blocks)
    merged = (parts + 1) * merge_bytes(sequences, heads, form.head_dim, dtype.itemsize)
    return merged + select_bytes(sequences, kv_heads, blocks, top, offloaded)


def _columns(group: int) -> int:
    """Queries in a tile: 8, or 16 where that spares a second pass over the keys."""
    return 8 if group <= 8 else 16


def _heuristic(capability: int, form: KVFormat, columns: int) -> DecodeConfig:
    """As few warps as hold a block in registers: one warp needs no barriers.

    Codes of 2 and 3 bits take too many registers to be copied ahead. On Turing, which has no copies
    to shared memory, Triton multiplies without tensor cores, and that takes more registers.
    """
    if capability < 80:
        return DecodeConfig(num_warps=8, num_stages=1, resident=1)
    warps = (1 if form.head_dim <= 128 else 2) * (columns // 8)
    held = (12 if form.head_dim <= 64 else 8) // warps
    room = (_SHARED_KIB.get(capability, 227) << 10) // (form.nbytes + 1024)
    return DecodeConfig(
        num_warps=warps,
        num_stages=1 if min(form.k_bits, form.v_bits) < 4 else 2,
        resident=max(1, min(held, room)),
    )
