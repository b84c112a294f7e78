"""Appending K and V to the cache on a GPU: packing of complete blocks, recent window."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .pack import load_half, pack_channels, pack_tokens


@triton.jit
def pack_kernel(
    k, v, start, row_start, recent_k, recent_v,
    k_stride,  # from token to token
    v_stride,
    kv_heads,
    window,  # slots of a ring
    pool, block_table, before, after, table_stride,
    HALF: tl.constexpr, PADDED: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, PARTS: tl.constexpr, V_CODES: tl.constexpr,
    NBYTES: tl.constexpr,
):  # fmt: skip
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
    k_low = load_half(new_k, fresh, 0, HALF, PADDED)
    k_high = load_half(new_k, fresh, HALF, HALF, PADDED)
    if block * 64 < first:
        keep = fresh[:, None]
        v_low = tl.where(keep, v_low, load_half(recent_v + at, old, 0, HALF, PADDED))
        v_high = tl.where(keep, v_high, load_half(recent_v + at, old, HALF, HALF, PADDED))
        k_low = tl.where(keep, k_low, load_half(recent_k + at, old, 0, HALF, PADDED))
        k_high = tl.where(keep, k_high, load_half(recent_k + at, old, HALF, HALF, PADDED))
    physical = tl.load(block_table + sequence * table_stride + block).to(tl.int64)
    record = pool + (physical * kv_heads + head) * NBYTES
    pack_channels(record, k_low, k_high, block == 0, 0, HALF, PADDED, K_BITS)
    pack_tokens(record + V_CODES, v_low, v_high, HALF, PADDED, V_BITS, PARTS)


@triton.jit
def write_kernel(
    k, v, start, row_start, recent_k, recent_v, k_stride, v_stride, kv_heads, window, after,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write HEADS heads of one token that is in no block to its slot of the ring."""
    sequence = tl.program_id(2).to(tl.int64)
    first = tl.load(start + sequence)
    first_row = tl.load(row_start + sequence)
    position = tl.maximum(first, tl.load(after + sequence)) + tl.program_id(0)
    row = (first_row + position - first).to(tl.int64)
    if row >= tl.load(row_start + sequence + 1):
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = head < kv_heads
    new_v = v + row * v_stride + head * (2 * HALF)
    new_k = k + row * k_stride + head * (2 * HALF)
    v_low = load_half(new_v, inside, 0, HALF, PADDED)
    v_high = load_half(new_v, inside, HALF, HALF, PADDED)
    k_low = load_half(new_k, inside, 0, HALF, PADDED)
    k_high = load_half(new_k, inside, HALF, HALF, PADDED)
    slot = (sequence * window + position % window) * kv_heads * (2 * HALF)
    channel = tl.arange(0, PADDED)[None, :]
    at = slot + head[:, None] * (2 * HALF) + channel
    mask = inside[:, None] & (channel < HALF)
    tl.store(recent_v + at, v_low, mask=mask)
    tl.store(recent_v + at + HALF, v_high, mask=mask)
    tl.store(recent_k + at, k_low, mask=mask)
    tl.store(recent_k + at + HALF, k_high, mask=mask)


def kv_append(k: Tensor, v: Tensor, cache: DeviceLayerCache) -> None:
    """Pack the blocks that become complete, and keep the rest in the ring.

    k, v: [T, kv_heads, D], rows row_start[s]..row_start[s+1]-1 of `cache.step` belong to sequence
    s, at positions start[s] on; tokens may lie apart, a token's heads may not. Keys are turned
    already. Tokens packed[s]..after[s]-1, whole blocks, go into the pool where the table says,
    those from start[s] on from k and v, older ones from the ring; tokens from after[s] on, at most
    W, go into the ring. Blocks are read before the ring is written, those up to `offloaded_until`
    into the write-back buffer. One launch without new blocks, otherwise two or three. Raises
    OpError.

    Values are those of `reference.kv_blocks.append`. A code may be the neighbour where the quotient
    is within float32 rounding of a half.
    """
    for blocks in new_blocks(cache, cache.step.start):
        pack_blocks(k, v, cache, blocks)
    write_recent(k, v, cache, cache.step.after)


class NewBlocks(NamedTuple):
    """Blocks to pack: tokens before[s]..after[s]-1 of each sequence, no more than `most` blocks."""

    pool: Tensor  # uint8 [blocks, kv_heads, form.nbytes]
    before: Tensor  # int32 [S]
    after: Tensor  # int32 [S]
    most: int
    start: Tensor  # int32 [S], where the tokens begin that are not in the ring


def new_blocks(cache: DeviceLayerCache, start: Tensor) -> Iterator[NewBlocks]:
    """The blocks that a pass completes: first those for host memory, then those for the GPU.

    start: int32 [S], where the tokens begin that are not in the ring.
    """
    step, before = cache.step, cache.step.packed
    if cache.write_back is not None and step.offloaded_until is not None:
        until = step.offloaded_until
        yield NewBlocks(cache.write_back, before, until, step.max_offloaded_blocks, start)
        before = until
    if step.max_new_blocks:
        yield NewBlocks(cache.pool, before, step.after, step.max_new_blocks, start)


def pack_blocks(k: Tensor, v: Tensor, cache: DeviceLayerCache, blocks: NewBlocks) -> None:
    """The part of `kv_append` that packs. Raises OpError."""
    operands, rows = _operands(k, v, cache, blocks.start), _row_constants(cache.form.half)
    form, table = cache.form, cache.step.table
    if not blocks.most or not len(table):
        return
    pack_kernel[(k.shape[1], blocks.most, len(table))](
        *operands, blocks.pool, table, blocks.before, blocks.after, table.stride(0), **rows,
        K_BITS=form.k_bits,
        V_BITS=form.v_bits,
        PARTS=form.parts,
        V_CODES=form.v_codes,
        NBYTES=form.nbytes,
        num_warps=8 if form.head_dim > 128 else 4,  # 64 to 128 values of K each
        num_stages=1,
        **LAUNCH,
    )  # fmt: skip


def write_recent(k: Tensor, v: Tensor, cache: DeviceLayerCache, after: Tensor) -> None:
    """The part of `kv_append` that writes tokens from after[s] (int32 [S]) on to the ring."""
    operands = _operands(k, v, cache, cache.step.start)
    sequences, window, kv_heads, head_dim = cache.recent_k.shape
    rows = cache.step.max_rows
    if not rows or not sequences:
        return
    # Up to 1024 values of K in a program, 8 a thread.
    padded = next_power_of_2(head_dim)
    heads = min(next_power_of_2(kv_heads), max(1, 1024 // padded))
    # Tokens come first: a grid has 65,535 programs at most in the other directions.
    write_kernel[(min(rows, window), cdiv(kv_heads, heads), sequences)](
        *operands,
        after,
        **_row_constants(cache.form.half),
        HEADS=heads,
        num_warps=max(1, heads * padded // 512),
        num_stages=1,
        **LAUNCH,
    )


def _operands(
    k: Tensor, v: Tensor, cache: DeviceLayerCache, start: Tensor
) -> tuple[Tensor | int, ...]:
    """What both kernels take first. Raises OpError."""
    cache.check_fresh(k, v)
    sizes = (k.stride(0), v.stride(0), k.shape[1], cache.recent_k.shape[1])
    return (k, v, start, cache.step.row_start, cache.recent_k, cache.recent_v, *sizes)


@cache
def _row_constants(half: int) -> dict[str, int]:
    return {"HALF": half, "PADDED": next_power_of_2(half)}
