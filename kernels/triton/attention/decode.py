"""Attention of one new token per sequence over its packed blocks and its recent window, on a GPU.

Keys are the rows of the score tile and the queries of a GQA group its columns: a tile of packed
codes is the left operand of a tensor-core instruction as it comes out of memory, and eight columns
do where the other way round sixteen rows would be needed. All sums over channels and tokens are
such dots too: of K's minima with the queries, of probabilities with V's minima and with ones. So a
block costs a few operations per tile beside the unpacking, whatever the number of queries.

A sequence is cut into runs of blocks, one program each, and its recent window, one more; `merge`
joins them (flash-decoding).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.linear.nibbles import use_asm

from .decode_tiles import attend_blocks, attend_ring, load_queries
from .kv_tiles import LN2, LOG2E, TOKENS, add_sink, form_constants
from .merge import merge, merge_bytes


@dataclass(frozen=True)
class DecodeConfig:
    """How a block is spread over warps, and how many programs a processor is given."""

    num_warps: int
    num_stages: int = 1
    prefetch: int = 0  # 1: the next block is brought to L2 ahead (capability 90 and later)
    programs: int = 16  # per processor, at most
    min_blocks: int = 4  # in a run


@triton.jit
def decode_attention_kernel(
    q,  # [S, Hq, D]
    pool, block_table, compressed, length, recent_k, recent_v, sinks, resident_from,
    outs,  # [runs + 1, S, Hq, D]
    lses,
    scale,  # softmax scale * log2(e)
    soft_cap,  # * log2(e)
    window,
    run,  # blocks in a run
    max_blocks,
    ring,  # W
    kv_heads,
    q_stride,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, PARTS: tl.constexpr, K_SCALE: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, NBYTES: tl.constexpr, SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, RESIDENT_FROM: tl.constexpr,
    PREFETCH: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One run of blocks, or (the first of a sequence) its recent window, for COLUMNS queries."""
    HALF: tl.constexpr = HEAD_DIM // 2
    TILES: tl.constexpr = (GROUP + COLUMNS - 1) // COLUMNS
    kv_head = tl.program_id(0) // TILES
    part = tl.program_id(1)
    s = tl.program_id(2)
    in_group = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    head = kv_head * GROUP + in_group
    channel = 2 * tl.arange(0, PAIRS)
    mask = (in_group < GROUP)[None, :] & (channel < HALF)[:, None]
    at = head[None, :] * HEAD_DIM + channel[:, None]
    end = tl.load(length + s)
    in_blocks = tl.load(compressed + s)
    first_key = tl.maximum(end - window, 0) if WINDOW else 0
    q0, q1, q2, q3 = load_queries(q + s.to(tl.int64) * q_stride + at, mask, HALF)
    if part == 0:
        row = kv_heads * HEAD_DIM
        ring_base = s.to(tl.int64) * ring * row + kv_head * HEAD_DIM
        o0, o1, o2, o3, top, total = attend_ring(
            q0, q1, q2, q3, recent_k + ring_base, recent_v + ring_base, row, ring,
            tl.maximum(in_blocks, first_key), end, scale, soft_cap,
            COLUMNS, HEAD_DIM, PAIRS, SOFT_CAP, ASM,
        )  # fmt: skip
        if SINKS:
            top, total, fade = add_sink(sinks, head, in_group < GROUP, top, total)
            o0 = o0 * fade[None, :]
            o1 = o1 * fade[None, :]
            o2 = o2 * fade[None, :]
            o3 = o3 * fade[None, :]
    else:
        first_block = first_key // TOKENS
        if RESIDENT_FROM:
            first_block = tl.maximum(first_block, tl.load(resident_from + s) // TOKENS)
        begin = (part - 1) * run + first_block
        stop = tl.minimum(begin + run, in_blocks // TOKENS)
        o0, o1, o2, o3, top, total = attend_blocks(
            q0.to(tl.float16), q1.to(tl.float16), q2.to(tl.float16), q3.to(tl.float16),
            pool + kv_head * NBYTES, kv_heads * NBYTES, block_table + s.to(tl.int64) * max_blocks,
            begin, stop, first_key, scale, soft_cap,
            COLUMNS, HEAD_DIM, PAIRS, K_BITS, V_BITS, PARTS, K_SCALE, V_CODES, V_SCALE,
            SOFT_CAP, WINDOW, PREFETCH, STAGES, ASM,
        )  # fmt: skip
    safe = tl.where(total == 0, 1.0, total)
    inverse = (1.0 / safe)[None, :]
    lse = tl.where(total == 0, -float("inf"), (top + tl.log2(safe)) * LN2)
    row = (part * tl.num_programs(2) + s).to(tl.int64) * (kv_heads * GROUP)
    tl.store(lses + row + head, lse, mask=in_group < GROUP)
    target = outs + row * HEAD_DIM + at
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
) -> tuple[Tensor, Tensor]:
    """Output [S, Hq, D] in q's type and log-sum-exp float32 [S, Hq]: one query per sequence.

    Meaning and arguments are those of `reference.attention.decode_attention`. q: in the dtype of
    the ring; its rows may lie apart. Raises OpError.
    """
    cache.check_queries(q, shape, sinks)
    step, form, window = cache.step, cache.form, shape.window or 0
    sequences, heads, kv_heads = len(step.start), shape.heads, shape.kv_heads
    if len(q) != sequences:
        raise OpError(f"q has a row for each of {sequences} sequences, not {len(q)}")
    group = heads // kv_heads
    columns = _columns(group)
    config = config or _configured(q.device, q.dtype, form, columns)
    blocks = step.max_packed // BLOCK_TOKENS
    if window:  # a window that starts inside a block reaches into one more
        blocks = min(blocks, window // BLOCK_TOKENS + 1)
    tiles = kv_heads * triton.cdiv(group, columns)
    run = blocks_per_run(sequences * tiles, blocks, Gpu.of(q.device).processors, config)
    parts = 1 + triton.cdiv(blocks, run)
    outs = torch.empty(parts, sequences, heads, form.head_dim, dtype=q.dtype, device=q.device)
    lses = torch.empty(parts, sequences, heads, dtype=torch.float32, device=q.device)
    if sequences:
        decode_attention_kernel[(tiles, parts, sequences)](
            q, cache.pool, step.table, step.packed, step.length, cache.recent_k, cache.recent_v,
            sinks, step.resident_from, outs, lses, shape.scale * LOG2E.value,
            shape.soft_cap * LOG2E.value, window, run, step.table.stride(0),
            cache.recent_k.shape[1], kv_heads, q.stride(0), **form_constants(form),
            GROUP=group,
            COLUMNS=columns,
            PAIRS=max(16, triton.next_power_of_2(form.head_dim // 4)),
            SOFT_CAP=shape.soft_cap != 0,
            WINDOW=window != 0,
            SINKS=sinks is not None,
            RESIDENT_FROM=step.resident_from is not None,
            PREFETCH=bool(config.prefetch) and use_asm(),
            STAGES=config.num_stages,
            ASM=use_asm(),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **LAUNCH,
        )  # fmt: skip
    if parts == 1:
        return outs[0], lses[0]
    return merge(outs, lses)


@cache
def _configured(
    device: torch.device, dtype: torch.dtype, form: KVFormat, columns: int
) -> DecodeConfig:
    key = f"{str(dtype)[6:]}-{form.head_dim}-k{form.k_bits}-v{form.v_bits}-{columns}"
    entry = tuned.lookup("decode_attention", device, key)
    return DecodeConfig(**entry) if entry else _heuristic(Gpu.of(device).capability, form, columns)


def blocks_per_run(tiles: int, blocks: int, processors: int, config: DecodeConfig) -> int:
    """How many blocks a program attends to: few enough to fill the GPU, many enough to be worth it.

    tiles: programs without splitting; blocks: of the longest sequence. Runs are equally long in all
    sequences, so a long one among short ones gets more programs.
    """
    return max(config.min_blocks, triton.cdiv(blocks, _most_runs(tiles, processors, config)))


def decode_bytes(
    sequences: int,
    heads: int,
    kv_heads: int,
    blocks: int,
    form: KVFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """The most bytes `decode_attention` allocates for up to `blocks` blocks of each sequence.

    Partial results of each run of blocks and of the ring, and their merge.
    """
    group = heads // kv_heads
    columns = _columns(group)
    config = _configured(device, dtype, form, columns)
    tiles = sequences * kv_heads * triton.cdiv(group, columns)
    runs = _most_runs(tiles, Gpu.of(device).processors, config)
    parts = 1 + min(triton.cdiv(blocks, config.min_blocks), runs)
    return (parts + 1) * merge_bytes(sequences, heads, form.head_dim, dtype.itemsize)


def _most_runs(tiles: int, processors: int, config: DecodeConfig) -> int:
    """Into how many runs the blocks of a sequence are cut, at most."""
    return triton.cdiv(processors * config.programs, max(1, tiles))


def _columns(group: int) -> int:
    """Queries in a tile: 8, or 16 where that spares a second pass over the keys."""
    return 8 if group <= 8 else 16


def _heuristic(capability: int, form: KVFormat, columns: int) -> DecodeConfig:
    """As few warps as hold a block in registers: one warp needs no barriers.

    Where memory is fast for the number of processors, the loads of a block alone are too few bytes
    on the way. On Turing Triton multiplies without tensor cores, which takes more registers.
    """
    if capability < 80:
        return DecodeConfig(num_warps=8)
    small = form.head_dim <= 128
    warps = (1 if small else 2) * (columns // 8)
    return DecodeConfig(num_warps=warps, prefetch=int(small and capability in (90, 100)))
