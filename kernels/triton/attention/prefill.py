"""Causal attention of new tokens over packed blocks, recent window and themselves, on a GPU.

A program has the queries of one tile: consecutive positions of one sequence, times the heads of one
GQA group, so that a tile of keys serves them all. It reads packed blocks and dequantizes them in
registers. Every tile of queries does so again; where there are many, all blocks are dequantized
once into a scratch of bounded size and read from there.
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
from qoff.kernels.triton.launch.options import LAUNCH, WARPS_OVER_ROWS, use_asm
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .kv_tiles import LN2, LOG2E, TOKENS, add_sink, first_seen, form_constants, window_constants
from .prefill_scratch import dequantize_blocks, scratch_heads
from .prefill_tiles import attend, attend_rows, load_halves, load_packed_tile


@dataclass(frozen=True)
class PrefillConfig:
    """`rows` queries of a tile (positions times heads), and when blocks go through a scratch."""

    rows: int
    num_warps: int
    num_stages: int
    # Dequantizing a block costs a tile of queries about a third of its products; writing it out and
    # reading it back costs as much as five to eight tiles. Tiles per sequence and KV head:
    scratch_tiles: int = 8
    scratch_mib: int = 256


@triton.jit(do_not_specialize=["first_head"])
def prefill_attention_kernel(
    q,  # [T, Hq, D]
    k,  # [T, kv_heads, D]
    v, row_start, start, pool, block_table, compressed, recent_k, recent_v,
    scratch_k,  # [S, heads of the launch, scratch_tokens, D] or not read
    scratch_v, sinks, resident_from, out, lse,
    scale,  # softmax scale * log2(e)
    soft_cap,  # * log2(e)
    window,
    max_blocks,
    ring,  # W
    kv_heads, first_head, scratch_tokens, q_stride, k_stride, v_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PAD: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, PARTS: tl.constexpr, K_SCALE: tl.constexpr,
    V_CODES: tl.constexpr, V_SCALE: tl.constexpr, NBYTES: tl.constexpr, SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, RESIDENT_FROM: tl.constexpr, SCRATCH: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile of queries against all keys; the tiles with the most keys come first."""
    HALF: tl.constexpr = HEAD_DIM // 2
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = first_head + tl.program_id(1)
    s = tl.program_id(2)
    first_row = tl.load(row_start + s)
    rows = tl.load(row_start + s + 1) - first_row
    if tile * ROWS >= rows * GROUP:
        return
    begin = tl.load(start + s)
    in_blocks = tl.load(compressed + s)
    index = tile * ROWS + tl.arange(0, ROWS)
    row = index // GROUP
    position = begin + row
    head = kv_head * GROUP + index % GROUP
    inside = row < rows
    lowest = begin + (tile * ROWS) // GROUP
    first_key = tl.maximum(first_seen(lowest, window, WINDOW), 0) if WINDOW else 0
    first_block = first_key // TOKENS
    if RESIDENT_FROM:
        older = tl.load(resident_from + s)
        first_block = tl.maximum(first_block, older // TOKENS)

    low = tl.zeros([ROWS, PAD], tl.float32)
    high = tl.zeros([ROWS, PAD], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    place = (first_row + row).to(tl.int64)
    q_row = place * q_stride + head * HEAD_DIM
    q_low, q_high = load_halves(q, q_row, inside, HALF, PAD, True)
    q_low = q_low.to(tl.float16)
    q_high = q_high.to(tl.float16)
    if SCRATCH:
        base = (s.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * scratch_tokens * HEAD_DIM
        if RESIDENT_FROM:
            base -= older.to(tl.int64) * HEAD_DIM
        low, high, top, total = attend_rows(
            q_low, q_high, scratch_k + base, scratch_v + base, HEAD_DIM, HEAD_DIM,
            first_block * TOKENS, in_blocks, in_blocks, 1, 0,
            position, window, scale, soft_cap, low, high, top, total,
            HALF, PAD, SOFT_CAP, WINDOW, False, False, STAGES, ASM,
        )  # fmt: skip
    else:
        table = block_table + s.to(tl.int64) * max_blocks
        stop = in_blocks // TOKENS
        block = tl.load(table + first_block, mask=first_block < stop, other=0)
        for b in tl.range(first_block, stop, num_stages=STAGES):
            record = pool + (block.to(tl.int64) * kv_heads + kv_head) * NBYTES
            block = tl.load(table + b + 1, mask=b + 1 < stop, other=0)
            k_low, k_high, v_low, v_high = load_packed_tile(
                record, HEAD_DIM, PAD, K_BITS, V_BITS, PARTS, K_SCALE, V_CODES, V_SCALE, ASM
            )
            key = b * TOKENS + tl.arange(0, TOKENS)
            seen = key[None, :] >= first_seen(position, window, WINDOW)[:, None]
            low, high, top, total = attend(
                q_low, q_high, k_low, k_high, v_low, v_high, seen, scale, soft_cap,
                low, high, top, total, SOFT_CAP, WINDOW, ASM,
            )  # fmt: skip

    # Read again, as kept queries would spill; 0 is added so that the compiler does not see that.
    q_row = place * (q_stride + tl.minimum(begin, 0)) + head * HEAD_DIM
    q_low, q_high = load_halves(q, q_row, inside, HALF, PAD, True)
    row_size = kv_heads * HEAD_DIM
    ring_base = s.to(tl.int64) * ring * row_size + kv_head * HEAD_DIM
    low, high, top, total = attend_rows(
        q_low, q_high, recent_k + ring_base, recent_v + ring_base, row_size, row_size,
        tl.maximum(in_blocks, first_key), begin, begin, ring, 0,
        position, window, scale, soft_cap, low, high, top, total,
        HALF, PAD, SOFT_CAP, WINDOW, False, True, 1, ASM,
    )  # fmt: skip
    k_base = k + first_row.to(tl.int64) * k_stride + kv_head * HEAD_DIM
    v_base = v + first_row.to(tl.int64) * v_stride + kv_head * HEAD_DIM
    fresh = tl.maximum(begin, first_key)
    # Tiles of keys that all queries of the tile see need no mask.
    plain = fresh + tl.maximum(lowest + 1 - fresh, 0) // TOKENS * TOKENS
    low, high, top, total = attend_rows(
        q_low, q_high, k_base, v_base, k_stride, v_stride, fresh, plain, plain, 1, begin,
        position, window, scale, soft_cap, low, high, top, total,
        HALF, PAD, SOFT_CAP, WINDOW, False, False, STAGES, ASM,
    )  # fmt: skip
    end = tl.minimum(begin + rows, begin + (tile * ROWS + ROWS - 1) // GROUP + 1)
    low, high, top, total = attend_rows(
        q_low, q_high, k_base, v_base, k_stride, v_stride, plain, end, end, 1, begin,
        position, window, scale, soft_cap, low, high, top, total,
        HALF, PAD, SOFT_CAP, WINDOW, True, False, 1, ASM,
    )  # fmt: skip
    if SINKS:
        top, total, fade = add_sink(sinks, head, inside, top, total)
        low = low * fade[:, None]
        high = high * fade[:, None]
    # A query sees itself, so that no total is 0.
    heads = kv_heads * GROUP
    tl.store(lse + place * heads + head, (top + tl.log2(total)) * LN2, mask=inside)
    inverse = (1.0 / total)[:, None]
    channel = tl.arange(0, PAD)
    mask = inside[:, None] & (channel < HALF)[None, :]
    target = out + ((place * heads + head) * HEAD_DIM)[:, None] + channel[None, :]
    tl.store(target, (low * inverse).to(out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (high * inverse).to(out.dtype.element_ty), mask=mask)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: DeviceLayerCache,
    shape: HeadShape,
    sinks: Tensor | None = None,
    config: PrefillConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] in q's type and log-sum-exp float32 [T, Hq] of new tokens.

    Meaning and arguments are those of `reference.attention.prefill_attention`. q, k, v: in the
    dtype of the ring; their rows may lie apart. Raises OpError.
    """
    cache.check_queries(q, shape, sinks)
    cache.check_fresh(k, v)
    if len(q) != len(k):
        raise OpError(f"{len(q)} rows of queries, but {len(k)} of keys")
    tokens, heads, dim = q.shape
    step, form, (window, windowed) = cache.step, cache.form, window_constants(shape)
    sequences, kv_heads = len(step.start), shape.kv_heads
    group = heads // kv_heads
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if not tokens:
        return out, lse
    config = config or _configured(q.device, q.dtype, form)
    blocks = step.max_packed // BLOCK_TOKENS
    tiles = cdiv(step.max_rows * group, config.rows)
    piece = 0
    if tiles >= config.scratch_tiles:
        values = sequences * blocks * BLOCK_TOKENS * dim
        piece = scratch_heads(values, kv_heads, config.scratch_mib)
    room = (2, sequences, piece, blocks * BLOCK_TOKENS, dim)
    scratch = torch.empty(room, dtype=torch.float16, device=q.device)
    for first in range(0, kv_heads, piece or kv_heads):
        count = min(piece or kv_heads, kv_heads - first)
        if piece:
            dequantize_blocks(cache, shape, scratch, first, count)
        prefill_attention_kernel[(tiles, count, sequences)](
            q, k, v, step.row_start, step.start, cache.pool, step.table, step.packed,
            cache.recent_k, cache.recent_v, scratch[0], scratch[1], sinks, step.resident_from,
            out, lse, shape.scale * LOG2E.value, shape.soft_cap * LOG2E.value, window,
            step.table.stride(0), cache.recent_k.shape[1], kv_heads, first, room[3], q.stride(0),
            k.stride(0), v.stride(0), **form_constants(form),
            PAD=next_power_of_2(form.half),
            GROUP=group,
            ROWS=config.rows,
            SOFT_CAP=shape.soft_cap != 0,
            WINDOW=windowed,
            SINKS=sinks is not None,
            RESIDENT_FROM=step.resident_from is not None,
            SCRATCH=bool(piece),
            STAGES=config.num_stages,
            ASM=use_asm(),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **LAUNCH,
        )  # fmt: skip
    return out, lse


def prefill_bytes(
    tokens: int,
    heads: int,
    kv_heads: int,
    sequences: int,
    blocks: int,
    form: KVFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """The most bytes `prefill_attention` allocates for up to `blocks` blocks of each sequence.

    Its results, and a scratch in which blocks are dequantized.
    """
    values = sequences * blocks * BLOCK_TOKENS * form.head_dim
    config = _configured(device, dtype, form)
    scratch = min(4 * values * kv_heads, config.scratch_mib << 20)
    return tokens * heads * (form.head_dim * dtype.itemsize + 4) + scratch


@cache
def _configured(device: torch.device, dtype: torch.dtype, form: KVFormat) -> PrefillConfig:
    key = f"{str(dtype)[6:]}-{form.head_dim}-k{form.k_bits}-v{form.v_bits}"
    entry = tuned.lookup("prefill_attention", device, key)
    return PrefillConfig(**entry) if entry else _heuristic(Gpu.of(device).capability, form.head_dim)


def _heuristic(capability: int, head_dim: int) -> PrefillConfig:
    """As large a tile as registers and shared memory of the architecture hold."""
    if capability < 80:  # no tensor cores in Triton there: products take many registers
        return PrefillConfig(16, num_warps=8, num_stages=1, scratch_tiles=0, scratch_mib=1 << 14)
    if head_dim > 128:
        rows = 32 if capability in (89, 120) else 64
        # There older Tritons run out of registers when blocks are dequantized on the way.
        tiles = 8 if capability != 80 or WARPS_OVER_ROWS else 0
        return PrefillConfig(rows, num_warps=8, num_stages=1, scratch_tiles=tiles)
    if capability == 100:
        return PrefillConfig(rows=64, num_warps=4, num_stages=2 if head_dim <= 64 else 3)
    if capability == 120:
        return PrefillConfig(rows=64, num_warps=4 if head_dim <= 64 else 8, num_stages=2)
    if capability == 90:  # on an H200 faster by a quarter than 128 rows by 8 warps in 2 stages
        return PrefillConfig(rows=64, num_warps=4, num_stages=3)
    # Before Hopper every warp dequantizes for itself, so that the scratch pays earlier.
    rows = 64 if capability == 89 or head_dim == 96 else 128
    return PrefillConfig(rows, num_warps=8, num_stages=2, scratch_tiles=3)
