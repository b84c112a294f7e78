"""Attention to keys of more channels than registers hold, on a GPU: latents, and wide heads.

Queries that absorbed their head's keys attend to latents: all heads have the one KV head, and a
latent is key and value, and comes from memory once. Heads of 512 channels have values of their own.
A tile of queries is heads of a token that have a KV head, and of the next tokens: decode and
prefill are one kernel. Few tiles with many blocks are cut into runs of blocks, one program each,
and what is not packed, one more; `merge` joins them (flash-decoding).
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
from qoff.kernels.triton.attention.kv_tiles import LOG2E, TOKENS, form_constants
from qoff.kernels.triton.attention.merge import join, merge_bytes
from qoff.kernels.triton.attention.prefill_tiles import load_packed_values, weights
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import use_asm
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2
from qoff.kernels.triton.linear.nibbles import dot16

from .tiles import attend_dense, load_packed_part, packed_scores, store_found

KEYS = 32  # of a tile that is not packed
_ROWS_MAX = 64  # of a tile of queries


@dataclass(frozen=True)
class LatentConfig:
    """`rows` queries of a tile, heads times positions, and how blocks are cut into runs."""

    rows: int
    num_warps: int
    chunk: int = 64  # channels of either half whose products are summed at a time
    stages: int = 2  # 2: the next ones are copied to shared memory meanwhile
    programs: int = 1  # per processor, at most, of few tiles
    min_blocks: int = 4  # in a run


@triton.jit(do_not_specialize=["run", "max_blocks", "tokens"])
def latent_attention_kernel(
    q,  # [tokens, Hq, D], turned by RoPE
    k,  # [tokens, kv_heads, D]
    v,  # the same; where keys are latents, k
    row_start, start, pool, block_table, compressed,
    recent_k,
    recent_v,  # of latents recent_k
    resident_from,
    outs,  # [parts, tokens, Hq, VALUES]
    lses,
    scale,  # softmax scale * log2(e)
    ring,  # W
    q_stride, k_stride, v_stride,
    run,  # blocks in a run
    max_blocks,
    tokens,
    HEADS: tl.constexpr,  # that have a KV head
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUES: tl.constexpr,
    PAD: tl.constexpr, CHUNK: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    PARTS: tl.constexpr, K_SCALE: tl.constexpr, V_CODES: tl.constexpr, V_SCALE: tl.constexpr,
    NBYTES: tl.constexpr, KEYS: tl.constexpr, RING_HAS_NEW: tl.constexpr, SPLIT: tl.constexpr,
    RESIDENT_FROM: tl.constexpr, LATENT: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile of queries against a run of blocks, or (the first) what is not packed; or all.

    RING_HAS_NEW: `start` is the length of a sequence with its one new token, which is in the ring.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    EACH: tl.constexpr = VALUES // 2
    ROW: tl.constexpr = KV_HEADS * HEAD_DIM
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    part = tl.program_id(1)
    s = tl.program_id(2) // KV_HEADS
    kv_head = tl.program_id(2) % KV_HEADS
    first_row = tl.load(row_start + s)
    begin = tl.load(start + s)
    count = tl.minimum(begin, 1) if RING_HAS_NEW else tl.load(row_start + s + 1) - first_row
    if tile * ROWS >= count * HEADS:
        return
    in_blocks = tl.load(compressed + s)
    index = tile * ROWS + tl.arange(0, ROWS)
    row = index // HEADS
    head = kv_head * HEADS + index % HEADS
    inside = row < count
    place = (first_row + row).to(tl.int64)
    queries = q + place * q_stride + head * HEAD_DIM
    low = tl.zeros([ROWS, PAD], tl.float32)
    high = tl.zeros([ROWS, PAD], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    first_block = 0
    if RESIDENT_FROM:
        first_block = tl.load(resident_from + s) // TOKENS
    stop = in_blocks // TOKENS
    if SPLIT:
        first_block += (part - 1) * run
        stop = tl.minimum(first_block + run, stop)
        stop = tl.where(part == 0, first_block, stop)
    table = block_table + s.to(tl.int64) * max_blocks
    block = tl.load(table + first_block, mask=first_block < stop, other=0)
    for b in tl.range(first_block, stop, num_stages=1):
        record = pool + (block.to(tl.int64) * KV_HEADS + kv_head) * NBYTES
        block = tl.load(table + b + 1, mask=b + 1 < stop, other=0)
        score = packed_scores(queries, inside, record, HALF, CHUNK, K_BITS, K_SCALE, STAGES, ASM)
        if LATENT:
            v_low, v_high = load_packed_part(
                record, 0, EACH, PAD, HALF, K_BITS, K_SCALE, PAD == EACH, ASM
            )
        else:
            v_low, v_high = load_packed_values(
                record, HEAD_DIM, PAD, V_BITS, PARTS, V_CODES, V_SCALE, ASM
            )
        p, fade, top, total = weights(score, inside[:, None], scale, top, total, False)
        p = p.to(tl.float16)
        low = dot16(p, v_low, low * fade[:, None], ASM)
        high = dot16(p, v_high, high * fade[:, None], ASM)

    if not SPLIT or part == 0:
        base = s.to(tl.int64) * ring * ROW + kv_head * HEAD_DIM
        low, high, top, total = attend_dense(
            queries, inside, recent_k + base, ROW, recent_v + base, ROW,
            in_blocks, begin, ring, 0, begin + row, scale, low, high, top, total,
            EACH, PAD, HALF, CHUNK, KEYS, True, STAGES, ASM,
        )  # fmt: skip
        if not RING_HAS_NEW:
            end = tl.minimum(begin + count, begin + (tile * ROWS + ROWS - 1) // HEADS + 1)
            new_k = k + first_row.to(tl.int64) * k_stride + kv_head * HEAD_DIM
            new_v = v + first_row.to(tl.int64) * v_stride + kv_head * HEAD_DIM
            low, high, top, total = attend_dense(
                queries, inside, new_k, k_stride, new_v, v_stride,
                begin, end, 1, begin, begin + row, scale, low, high, top, total,
                EACH, PAD, HALF, CHUNK, KEYS, False, STAGES, ASM,
            )  # fmt: skip
    target = (part * tokens + place) * (KV_HEADS * HEADS) + head
    store_found(outs, lses, target, inside, low, high, top, total, EACH, PAD)


def latent_attention(
    q: Tensor,
    k: Tensor,
    cache: DeviceLayerCache,
    shape: HeadShape,
    config: LatentConfig | None = None,
    value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, value_dim] in q's type and log-sum-exp float32 [T, Hq] of new tokens.

    q: [T, Hq, D], k: [T, kv_heads, D], both turned by RoPE, in the dtype of the ring; their rows,
    which may lie apart, are those of the pass. value: like k, where keys are no latents. In a pass
    of one token a sequence at most its key and value are in the ring already, and these are not
    read. Otherwise meaning and arguments are those of `reference.attention.prefill_attention`,
    without sinks, windows and soft caps. Raises OpError.
    """
    cache.check_queries(q, shape, None)
    step, form, latent = cache.step, cache.form, value is None
    if value is None:
        cache.check_keys(k)
        value = k
    else:
        cache.check_fresh(k, value)
    if form.latent != shape.latent or latent != (form.latent > 0):
        raise OpError(f"latents, and they alone, have no values of their own: {shape}, {form}")
    if shape.reach or shape.soft_cap:
        raise OpError(f"attention to wide keys has neither window nor soft cap: {shape}")
    tokens, heads, kv_heads = len(step.positions), shape.heads, shape.kv_heads
    group = heads // kv_heads
    if len(q) != tokens or len(k) != tokens:
        raise OpError(f"{len(q)} queries and {len(k)} keys of a pass of {tokens} rows")
    decodes, sequences = step.max_rows <= 1, len(step.start)
    blocks = step.max_packed // BLOCK_TOKENS
    queries = max(1, step.max_rows) * group
    kernels, config, processors = _bound(
        *(q.device, q.dtype, form, group, kv_heads, min(queries, _ROWS_MAX)),
        *(decodes, step.resident_from is not None, config),
    )
    tiles = cdiv(queries, config.rows)
    programs, most = tiles * sequences * kv_heads, processors * config.programs
    parts, run = cut(programs, blocks, processors, config)
    outs = q.new_empty(parts, tokens, heads, form.value_dim)
    lses = q.new_empty(parts, tokens, heads, dtype=torch.float32)
    if tokens:
        kernels[programs < most](  # the same for any number of blocks
            (tiles, parts, sequences * kv_heads),
            q, k, value, step.row_start, step.length if decodes else step.start, cache.pool,
            step.table, step.packed, cache.recent_k, cache.recent_k if latent else cache.recent_v,
            step.resident_from, outs, lses, shape.scale * LOG2E.value, cache.recent_k.shape[1],
            q.stride(0), k.stride(0), value.stride(0), run, step.table.stride(0), tokens,
        )  # fmt: skip
    if parts == 1:
        return outs[0], lses[0]
    return join(outs, lses, 1 + most // max(1, programs))


def cut(programs: int, blocks: int, processors: int, config: LatentConfig) -> tuple[int, int]:
    """Into how many parts attention is cut, what is not packed being one, and blocks of a run.

    programs: without cutting. blocks: of the longest sequence.
    """
    most = processors * config.programs
    if not blocks or programs >= most:
        return 1, blocks
    run = max(config.min_blocks, cdiv(blocks, most // max(1, programs)))
    return 1 + cdiv(blocks, run), run


@cache
def _bound(
    device: torch.device,
    dtype: torch.dtype,
    form: KVFormat,
    group: int,
    kv_heads: int,
    queries: int,
    decodes: bool,
    resident_from: bool,
    config: LatentConfig | None,
) -> tuple[tuple[BoundKernel, BoundKernel], LatentConfig, int]:
    """The kernel that does all and the one that does a part, their tiles, and processors.

    group: heads that have a KV head. queries: so many times new tokens of a sequence, or
    `_ROWS_MAX` for more. decodes: one each.
    """
    gpu = Gpu.of(device)
    config = config or _configured(device, dtype, form, queries)
    kernels = [
        BoundKernel(
            latent_attention_kernel,
            **form_constants(form),
            HEADS=group,
            KV_HEADS=kv_heads,
            ROWS=config.rows,
            VALUES=form.value_dim,
            PAD=max(16, next_power_of_2(form.value_dim // 2)),
            CHUNK=config.chunk,
            KEYS=KEYS,
            RING_HAS_NEW=decodes,
            SPLIT=split,
            RESIDENT_FROM=resident_from,
            LATENT=form.latent > 0,
            STAGES=config.stages,
            ASM=use_asm(),
            num_warps=config.num_warps,
            num_stages=1,
        )
        for split in (False, True)
    ]
    return (kernels[0], kernels[1]), config, gpu.processors


@cache
def _configured(
    device: torch.device, dtype: torch.dtype, form: KVFormat, queries: int
) -> LatentConfig:
    config = heuristic(Gpu.of(device).capability, queries, form.k_bits, not form.latent)
    entry = tuned.lookup("latent_attention", device, tuned_key(dtype, form, config))
    return LatentConfig(**entry) if entry else config


def tuned_key(dtype: torch.dtype, form: KVFormat, config: LatentConfig) -> str:
    """What is measured in place of the heuristic `config`."""
    return f"{str(dtype)[6:]}-{form.head_dim}-{form.latent}-{form.k_bits}-{config.rows}"


def heuristic(capability: int, queries: int, bits: int, own_values: bool = False) -> LatentConfig:
    """As large a tile as registers and shared memory of the architecture hold.

    queries: heads times tokens of a sequence, at most. own_values: keys are no latents.
    """
    rows = max(16, min(_ROWS_MAX, next_power_of_2(queries)))
    if capability < 80:  # no tensor cores in Triton there: products take many registers
        return LatentConfig(16, num_warps=8)
    if capability == 90:
        return LatentConfig(rows, num_warps=8, chunk=64 if own_values else 32)
    # On 10.0 sums of 64 rows go to tensor memory, which is too small for them.
    rows = min(32 if bits == 4 and not own_values else 16, rows)
    wide = capability < 100 or own_values
    return LatentConfig(rows, num_warps=8, chunk=64 if wide else 32)


def latent_attention_bytes(
    tokens: int, heads: int, blocks: int, form: KVFormat, dtype: torch.dtype, device: torch.device
) -> int:
    """The most bytes `latent_attention` allocates for up to `blocks` blocks of each sequence.

    Its results, or those of each part of fewer queries than occupy all processors, and their merge.
    """
    partial = 0
    for queries in (16, 32, _ROWS_MAX):
        config = _configured(device, dtype, form, queries)
        most = Gpu.of(device).processors * config.programs
        parts = 1 + min(cdiv(blocks, config.min_blocks), most)
        # Cut in n parts besides the first, n times the tiles is `most` at most.
        partial = max(partial, min(parts * tokens * heads, 2 * most * config.rows))
    return (tokens * heads + partial) * merge_bytes(1, 1, form.value_dim, dtype.itemsize)
