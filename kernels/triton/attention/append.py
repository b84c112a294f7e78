"""Appending K and V to the cache on a GPU: rotation, packing of complete blocks, recent window."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.triton.elementwise.rope import check_tables
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.options import LAUNCH

from .pack import load_half, load_turned, pack_channels, pack_tokens


@dataclass(frozen=True)
class KvAppendConfig:
    """Warps of a program that packs a block; `heads` of a token in a program that writes it."""

    pack_warps: int
    heads: int
    write_warps: int


@triton.jit
def pack_kernel(
    k,
    v,
    cos,
    sin,
    start,
    row_start,
    recent_k,
    recent_v,
    pool,
    block_table,
    before,
    after,
    k_stride,  # from token to token
    v_stride,
    kv_heads,
    window,  # slots of a ring
    table_stride,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    PARTS: tl.constexpr,
    V_CODES: tl.constexpr,
    NBYTES: tl.constexpr,
    PAIRS: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Pack one block of one KV head, from the ring up to position start - 1 and from k, v after."""
    head = tl.program_id(0)
    sequence = tl.program_id(2).to(tl.int64)
    block = tl.load(before + sequence) // 64 + tl.program_id(1)
    if block * 64 >= tl.load(after + sequence):
        return
    position = block * 64 + tl.arange(0, 64)
    first = tl.load(start + sequence)
    fresh = position >= first
    row = tl.load(row_start + sequence) + tl.where(fresh, position - first, 0)
    slot = sequence * window + position % window
    old = ~fresh
    at = (slot * kv_heads + head) * (2 * HALF)
    new_v = v + row.to(tl.int64) * v_stride + head * (2 * HALF)
    new_k = k + row.to(tl.int64) * k_stride + head * (2 * HALF)
    v_low = load_half(new_v, fresh, 0, HALF, PADDED)
    v_high = load_half(new_v, fresh, HALF, HALF, PADDED)
    turn = tl.where(fresh, position, 0)
    k_low, k_high = load_turned(new_k, fresh, turn, cos, sin, HALF, PADDED, PAIRS, ROPE)
    if block * 64 < first:
        keep = fresh[:, None]
        v_low = tl.where(keep, v_low, load_half(recent_v + at, old, 0, HALF, PADDED))
        v_high = tl.where(keep, v_high, load_half(recent_v + at, old, HALF, HALF, PADDED))
        k_low = tl.where(keep, k_low, load_half(recent_k + at, old, 0, HALF, PADDED))
        k_high = tl.where(keep, k_high, load_half(recent_k + at, old, HALF, HALF, PADDED))
    physical = tl.load(block_table + sequence * table_stride + block).to(tl.int64)
    record = pool + (physical * kv_heads + head) * NBYTES
    pack_channels(record, k_low, k_high, block == 0, HALF, PADDED, K_BITS)
    pack_tokens(record + V_CODES, v_low, v_high, HALF, PADDED, V_BITS, PARTS)


@triton.jit
def write_kernel(
    k,
    v,
    cos,
    sin,
    start,
    row_start,
    recent_k,
    recent_v,
    after,
    k_stride,
    v_stride,
    kv_heads,
    window,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write HEADS heads of one token that is in no block to its slot of the ring."""
    sequence = tl.program_id(2).to(tl.int64)
    first = tl.load(start + sequence)
    first_row = tl.load(row_start + sequence)
    position = tl.maximum(first, tl.load(after + sequence)) + tl.program_id(1)
    row = (first_row + position - first).to(tl.int64)
    if row >= tl.load(row_start + sequence + 1):
        return
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    inside = head < kv_heads
    new_v = v + row * v_stride + head * (2 * HALF)
    new_k = k + row * k_stride + head * (2 * HALF)
    v_low = load_half(new_v, inside, 0, HALF, PADDED)
    v_high = load_half(new_v, inside, HALF, HALF, PADDED)
    turn = position + tl.zeros((1,), tl.int32)
    k_low, k_high = load_turned(new_k, inside, turn, cos, sin, HALF, PADDED, PAIRS, ROPE)
    slot = (sequence * window + position % window) * kv_heads * (2 * HALF)
    channel = tl.arange(0, PADDED)[None, :]
    at = slot + head[:, None] * (2 * HALF) + channel
    mask = inside[:, None] & (channel < HALF)
    tl.store(recent_v + at, v_low, mask=mask)
    tl.store(recent_v + at + HALF, v_high, mask=mask)
    tl.store(recent_k + at, k_low, mask=mask)
    tl.store(recent_k + at + HALF, k_high, mask=mask)


Tables = tuple[Tensor, Tensor]


def kv_append(
    k: Tensor,
    v: Tensor,
    cache: DeviceLayerCache,
    tables: Tables | None = None,
    interleaved: bool = False,
    config: KvAppendConfig | None = None,
) -> None:
    """Turn new keys, pack the blocks that become complete, and keep the rest in the ring.

    k, v: [T, kv_heads, D], rows row_start[s]..row_start[s+1]-1 of `cache.step` belong to sequence
    s, at positions start[s] on; tokens may lie apart, a token's heads may not. tables: cos and sin,
    float32 [P, R/2], for keys that RoPE is to turn (see `rope`). Tokens packed[s]..after[s]-1,
    whole blocks, go into the pool where the table says, those from start[s] on from k and v, older
    ones from the ring; tokens from after[s] on, at most W, go into the ring. Blocks are read before
    the ring is written. One launch without new blocks, otherwise two. Raises OpError.

    Values are those of `reference.kv_blocks.append`: K is turned in float32 and rounded to its
    dtype before it is packed. A code may be the neighbour where the quotient is within float32
    rounding of a half.
    """
    step = cache.step
    blocks = NewBlocks(cache.pool, step.packed, step.after, step.max_new_blocks)
    pack_blocks(k, v, cache, blocks, tables, interleaved, config)
    write_recent(k, v, cache, step.after, tables, interleaved, config)


class NewBlocks(NamedTuple):
    """Blocks to pack: tokens before[s]..after[s]-1 of each sequence, no more than `most` blocks."""

    pool: Tensor  # uint8 [blocks, kv_heads, form.nbytes]
    before: Tensor  # int32 [S]
    after: Tensor  # int32 [S]
    most: int


def pack_blocks(
    k: Tensor,
    v: Tensor,
    cache: DeviceLayerCache,
    blocks: NewBlocks,
    tables: Tables | None = None,
    interleaved: bool = False,
    config: KvAppendConfig | None = None,
) -> None:
    """The part of `kv_append` that packs. Raises OpError."""
    cache.check_fresh(k, v)
    kv_heads, window, form = k.shape[1], cache.recent_k.shape[1], cache.form
    step, sequences = cache.step, len(blocks.before)
    if not blocks.most or not sequences:
        return
    config = config or _configured(k.device, kv_heads, form.head_dim)
    cos, sin, pairs = _tables(k, v, tables)
    pack_kernel[(kv_heads, blocks.most, sequences)](
        k,
        v,
        cos,
        sin,
        step.start,
        step.row_start,
        cache.recent_k,
        cache.recent_v,
        blocks.pool,
        step.table,
        blocks.before,
        blocks.after,
        k.stride(0),
        v.stride(0),
        kv_heads,
        window,
        step.table.stride(0),
        **_row_constants(form, pairs, interleaved),
        **_pack_constants(form),
        num_warps=config.pack_warps,
        num_stages=1,
        **LAUNCH,
    )


def write_recent(
    k: Tensor,
    v: Tensor,
    cache: DeviceLayerCache,
    after: Tensor,
    tables: Tables | None = None,
    interleaved: bool = False,
    config: KvAppendConfig | None = None,
) -> None:
    """The part of `kv_append` that writes tokens from after[s] (int32 [S]) on to the ring."""
    cache.check_fresh(k, v)
    step, (sequences, window, kv_heads, head_dim) = cache.step, cache.recent_k.shape
    if not step.max_rows or not sequences:
        return
    config = config or _configured(k.device, kv_heads, head_dim)
    cos, sin, pairs = _tables(k, v, tables)
    grid = (triton.cdiv(kv_heads, config.heads), min(step.max_rows, window), sequences)
    write_kernel[grid](
        k,
        v,
        cos,
        sin,
        step.start,
        step.row_start,
        cache.recent_k,
        cache.recent_v,
        after,
        k.stride(0),
        v.stride(0),
        kv_heads,
        window,
        **_row_constants(cache.form, pairs, interleaved),
        HEADS=config.heads,
        num_warps=config.write_warps,
        num_stages=1,
        **LAUNCH,
    )


def _tables(k: Tensor, v: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, int]:
    """cos, sin and the pairs they turn; without any, k and v stand in, which are not read."""
    if tables is None:
        return k, v, 0
    check_tables(*tables, k.shape[2], k.device)
    return *tables, tables[0].shape[1]


@cache
def _configured(device: torch.device, kv_heads: int, head_dim: int) -> KvAppendConfig:
    entry = tuned.lookup("kv_append", device, f"{kv_heads}-{head_dim}")
    return KvAppendConfig(**entry) if entry else _heuristic(kv_heads, head_dim)


def _heuristic(kv_heads: int, head_dim: int) -> KvAppendConfig:
    """A block: 64 values of K a thread at most. A token: up to 1024 values of K, 8 a thread."""
    padded = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(kv_heads), max(1, 1024 // padded))
    return KvAppendConfig(
        pack_warps=8 if head_dim > 128 else 4,
        heads=heads,
        write_warps=max(1, heads * padded // 512),
    )


@cache
def _row_constants(form: KVFormat, pairs: int, interleaved: bool) -> dict[str, Any]:
    if pairs == 0:
        rope = "none"
    elif interleaved:
        rope = "interleaved"
    else:
        rope = "halves" if pairs == form.half else "split"
    padded = triton.next_power_of_2(form.half)
    return {"HALF": form.half, "PADDED": padded, "PAIRS": pairs, "ROPE": rope}


@cache
def _pack_constants(form: KVFormat) -> dict[str, Any]:
    return {
        "K_BITS": form.k_bits,
        "V_BITS": form.v_bits,
        "PARTS": form.parts,
        "V_CODES": form.v_codes,
        "NBYTES": form.nbytes,
    }
