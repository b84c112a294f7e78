"""Latents of new tokens: turned by RoPE in place, written to the ring, packed to blocks."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.triton.attention.append import NewBlocks, new_blocks
from qoff.kernels.triton.attention.pack import pack_channels
from qoff.kernels.triton.elementwise.rope import check_tables, turned
from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .tiles import load_part

_CHANNELS = 32  # of either half that a program packs
_HEADS = 16  # that a program turns


@triton.jit
def latent_turn_kernel(
    x,  # [M, vectors, D]: heads' queries, then a key
    cos, sin, positions, vectors, stride, row_start, length, recent, ring,
    HALF: tl.constexpr, EACH: tl.constexpr, EACH_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    VECTORS: tl.constexpr, TURN: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Turn VECTORS vectors of a row; RING: of a sequence's one row, whose key goes to the ring."""
    ROPE: tl.constexpr = HALF - EACH
    if RING:
        s = tl.program_id(0).to(tl.int64)
        end = tl.load(length + s)
        if end == 0:
            return
        row = tl.load(row_start + s).to(tl.int64)
        position = (end - 1).to(tl.int64)
    else:
        row = tl.program_id(0).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
    vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    there = vector < vectors
    own = x + row * stride + vector * (2 * HALF)
    pair = tl.arange(0, ROPE_PAD)
    a, b = load_part(own, there, EACH, HALF, ROPE_PAD, HALF)
    if TURN:
        c = tl.load(cos + position * ROPE + pair, mask=pair < ROPE, other=0.0)[None, :]
        d = tl.load(sin + position * ROPE + pair, mask=pair < ROPE, other=0.0)[None, :]
        a, b = turned(a, b, c, d, x.dtype.element_ty)
        mask = there[:, None] & (pair < ROPE)[None, :]
        at = own[:, None] + EACH + pair[None, :]
        tl.store(at, a, mask=mask)
        tl.store(at + HALF, b, mask=mask)
    if RING and tl.program_id(1) == tl.num_programs(1) - 1:
        slot = recent + (s * ring + position % ring) * (2 * HALF)
        kept = (vector == vectors - 1)[:, None] & (pair < ROPE)[None, :]
        at = slot + EACH + pair[None, :] + tl.zeros_like(vector)[:, None]
        tl.store(at, a, mask=kept)
        tl.store(at + HALF, b, mask=kept)
        channel = tl.arange(0, EACH_PAD)
        key = x + row * stride + (vectors - 1) * (2 * HALF) + channel
        tl.store(slot + channel, tl.load(key, mask=channel < EACH), mask=channel < EACH)
        key += HALF
        tl.store(slot + HALF + channel, tl.load(key, mask=channel < EACH), mask=channel < EACH)


@triton.jit
def latent_write_kernel(
    k, start, row_start, recent, k_stride, ring, after, D: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Write one token that is in no block to its slot of the ring."""
    s = tl.program_id(1).to(tl.int64)
    first = tl.load(start + s)
    first_row = tl.load(row_start + s)
    position = tl.maximum(first, tl.load(after + s)) + tl.program_id(0)
    row = (first_row + position - first).to(tl.int64)
    if row >= tl.load(row_start + s + 1):
        return
    channel = tl.arange(0, PADDED)
    key = tl.load(k + row * k_stride + channel, mask=channel < D, other=0.0)
    tl.store(recent + (s * ring + position % ring) * D + channel, key, mask=channel < D)


@triton.jit
def latent_pack_kernel(
    k, start, row_start, recent, k_stride, ring, pool, block_table, before, after, table_stride,
    HALF: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr, NBYTES: tl.constexpr,
):  # fmt: skip
    """Pack CHANNELS channels of both halves of one block, from the ring up to position start - 1
    and from k after."""
    s = tl.program_id(2).to(tl.int64)
    block = tl.load(before + s) // 64 + tl.program_id(1)
    if block * 64 >= tl.load(after + s):
        return
    position = block * 64 + tl.arange(0, 64)
    first = tl.load(start + s)
    fresh = position >= first
    row = tl.load(row_start + s) + tl.where(fresh, position - first, 0)
    channel = tl.program_id(0) * CHANNELS
    low, high = load_part(k + row.to(tl.int64) * k_stride, fresh, channel, HALF, CHANNELS, HALF)
    if block * 64 < first:
        slot = (s * ring + position % ring) * (2 * HALF)
        old_low, old_high = load_part(recent + slot, ~fresh, channel, HALF, CHANNELS, HALF)
        low = tl.where(fresh[:, None], low, old_low)
        high = tl.where(fresh[:, None], high, old_high)
    physical = tl.load(block_table + s * table_stride + block).to(tl.int64)
    pack_channels(pool + physical * NBYTES, low, high, block == 0, channel, HALF, CHANNELS, BITS)


def turn(
    vectors: Tensor, cache: DeviceLayerCache, tables: tuple[Tensor, Tensor] | None, to_ring: bool
) -> None:
    """Turn queries and keys [M, heads + 1, D] of the pass in place, each at its position.

    tables: cos and sin, float32 [P, R / 2]; None: nothing is turned. to_ring: of a pass of at most
    one token a sequence; its key goes to the ring. Raises OpError.
    """
    step, form = cache.step, cache.form
    each, rope = form.latent // 2, form.half - form.latent // 2
    if tables is not None:
        check_tables(*tables, 2 * rope, vectors.device)
    if not len(vectors) or not (to_ring or tables is not None):
        return
    count = len(step.start) if to_ring else len(vectors)
    cos, sin = tables or (vectors, vectors)  # those are not read
    latent_turn_kernel[(count, cdiv(vectors.shape[1], _HEADS))](
        vectors, cos, sin, step.positions, vectors.shape[1], vectors.stride(0), step.row_start,
        step.length, cache.recent_k, cache.recent_k.shape[1],
        HALF=form.half,
        EACH=each,
        EACH_PAD=next_power_of_2(each),
        ROPE_PAD=next_power_of_2(rope),
        VECTORS=_HEADS,
        TURN=tables is not None,
        RING=to_ring,
        num_warps=1,
        num_stages=1,
        **LAUNCH,
    )  # fmt: skip


def write_latents(k: Tensor, cache: DeviceLayerCache) -> None:
    """Keep keys [T, 1, D] of tokens that the pass leaves unpacked in the ring. Raises OpError."""
    cache.check_keys(k)
    step, ring = cache.step, cache.recent_k
    sequences, window, _, dim = ring.shape
    if not step.max_rows or not sequences:
        return
    latent_write_kernel[(min(step.max_rows, window), sequences)](
        k, step.start, step.row_start, ring, k.stride(0), window, step.after,
        D=dim, PADDED=next_power_of_2(dim), num_warps=1, num_stages=1, **LAUNCH,
    )  # fmt: skip


def pack_latents(k: Tensor, cache: DeviceLayerCache, blocks: NewBlocks) -> None:
    """Pack blocks of keys: older ones than blocks.start are in the ring, others in k [T, 1, D].

    Raises OpError.
    """
    cache.check_keys(k)
    form, table = cache.form, cache.step.table
    if not blocks.most or not len(table):
        return
    latent_pack_kernel[(cdiv(form.half, _CHANNELS), blocks.most, len(table))](
        k, blocks.start, cache.step.row_start, cache.recent_k, k.stride(0), cache.recent_k.shape[1],
        blocks.pool, table, blocks.before, blocks.after, table.stride(0),
        HALF=form.half, CHANNELS=_CHANNELS, BITS=form.k_bits, NBYTES=form.nbytes,
        num_warps=4, num_stages=1, **LAUNCH,
    )  # fmt: skip


def keep_latents(k: Tensor, cache: DeviceLayerCache) -> None:
    """Pack what a pass completes, then write what it leaves to the ring. Raises OpError.

    k: [T, 1, D], of the pass; in one of at most one token a sequence they are in the ring already.
    """
    step = cache.step
    decodes = step.max_rows <= 1
    for blocks in new_blocks(cache, step.length if decodes else step.start):
        pack_latents(k, cache, blocks)
    if not decodes:
        write_latents(k, cache)
