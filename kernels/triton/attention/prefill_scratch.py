"""Packed blocks to float16, once for all queries of a prefill that has many."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.triton.launch.options import LAUNCH, use_asm
from qoff.kernels.triton.launch.sizes import next_power_of_2

from .kv_tiles import TOKENS, first_seen, form_constants, window_constants
from .prefill_tiles import load_packed_tile


@triton.jit(do_not_specialize=["first_head"])
def scratch_kernel(
    pool, block_table, compressed, start, resident_from,
    scratch_k,  # [S, heads of the launch, scratch_tokens, D]
    scratch_v, window, max_blocks, kv_heads, first_head, scratch_tokens,
    HEAD_DIM: tl.constexpr, PAD: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    PARTS: tl.constexpr, K_SCALE: tl.constexpr, V_CODES: tl.constexpr, V_SCALE: tl.constexpr,
    NBYTES: tl.constexpr, WINDOW: tl.constexpr, RESIDENT_FROM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Dequantize one block of one KV head, if any query can see it."""
    HALF: tl.constexpr = HEAD_DIM // 2
    b = tl.program_id(0)
    s = tl.program_id(2)
    token = b * TOKENS + tl.arange(0, TOKENS)
    if RESIDENT_FROM:
        b += tl.load(resident_from + s) // TOKENS
    if b * TOKENS >= tl.load(compressed + s):
        return
    if WINDOW and (b + 1) * TOKENS <= first_seen(tl.load(start + s), window, WINDOW):
        return
    block = tl.load(block_table + s.to(tl.int64) * max_blocks + b).to(tl.int64)
    record = pool + (block * kv_heads + first_head + tl.program_id(1)) * NBYTES
    k_low, k_high, v_low, v_high = load_packed_tile(
        record, HEAD_DIM, PAD, K_BITS, V_BITS, PARTS, K_SCALE, V_CODES, V_SCALE, ASM
    )
    channel = tl.arange(0, PAD)
    base = (s.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * scratch_tokens * HEAD_DIM
    at = base + token[:, None] * HEAD_DIM + channel[None, :]
    mask = (token >= 0)[:, None] & (channel < HALF)[None, :]
    tl.store(scratch_k + at, k_low, mask=mask)
    tl.store(scratch_k + HALF + at, k_high, mask=mask)
    tl.store(scratch_v + at, v_low, mask=mask)
    tl.store(scratch_v + HALF + at, v_high, mask=mask)


def dequantize_blocks(
    cache: DeviceLayerCache, shape: HeadShape, scratch: Tensor, first_head: int, heads: int
) -> None:
    """Dequantize the KV heads first_head.. of all blocks that any query can see.

    scratch: float16 [2, S, >= heads, tokens, D], written as K and V [S, heads, tokens, D] from
    the start of either half, without tokens before `cache.step.resident_from`.
    """
    step, tokens, (window, windowed) = cache.step, scratch.shape[3], window_constants(shape)
    if not tokens:
        return
    scratch_kernel[(tokens // TOKENS.value, heads, scratch.shape[1])](
        cache.pool, step.table, step.packed, step.start, step.resident_from, scratch[0],
        scratch[1], window, step.table.stride(0), cache.pool.shape[1], first_head, tokens,
        **form_constants(cache.form),
        PAD=next_power_of_2(cache.form.half),
        WINDOW=windowed,
        RESIDENT_FROM=step.resident_from is not None,
        ASM=use_asm(),
        num_warps=4,
        num_stages=1,
        **LAUNCH,
    )  # fmt: skip


def scratch_heads(values: int, kv_heads: int, scratch_mib: int) -> int:
    """KV heads whose K and V fit the scratch together; 0 if not even one does.

    values: of K of one head of all sequences.
    """
    return min(kv_heads, (scratch_mib << 20) // (2 * 2 * max(1, values)))
