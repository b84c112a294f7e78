"""Random packed caches of ragged batches for the attention tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.reference.kv_blocks import quantize_blocks


@dataclass(frozen=True)
class Cache:
    """A pool whose physical blocks are in random order, and a ring that is NaN where unused."""

    pool: Tensor
    block_table: Tensor
    compressed: Tensor
    length: Tensor
    recent_k: Tensor
    recent_v: Tensor
    form: KVFormat = field(repr=False)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All up to `compressed`."""
        return self.pool, self.block_table, self.compressed

    @property
    def ring(self) -> tuple[Tensor, Tensor]:
        return self.recent_k, self.recent_v


def random_cache(
    form: KVFormat,
    kv_heads: int,
    sizes: list[tuple[int, int]],
    dtype: torch.dtype = torch.float16,
    ring: int = 64,
) -> Cache:
    """A cache of sequences with (blocks, recent tokens); K has channels of very different sizes."""
    blocks = [b for b, _ in sizes]
    total = sum(blocks)
    spread = torch.linspace(-1, 1, form.head_dim).exp2()
    shift = torch.linspace(-2, 2, form.head_dim)
    k = torch.randn(total + 1, kv_heads, BLOCK_TOKENS, form.head_dim) * spread + shift
    pool = quantize_blocks(k, torch.randn_like(k) + 0.3, form)
    # Entries of the table that no sequence uses lead nowhere.
    table = torch.full((len(sizes), max([*blocks, 1]) + 1), 2**30, dtype=torch.int32)
    order = torch.randperm(total + 1, dtype=torch.int32)
    first = 0
    for s, count in enumerate(blocks):
        table[s, :count] = order[first : first + count]
        first += count
    recent = torch.full((2, len(sizes), ring, kv_heads, form.head_dim), torch.nan, dtype=dtype)
    for s, (count, tokens) in enumerate(sizes):
        slots = torch.arange(count * BLOCK_TOKENS, count * BLOCK_TOKENS + tokens) % ring
        recent[0, s, slots] = torch.randn(tokens, kv_heads, form.head_dim).to(dtype) * 2
        recent[1, s, slots] = torch.randn(tokens, kv_heads, form.head_dim).to(dtype)
    return Cache(
        pool,
        table,
        torch.tensor([b * BLOCK_TOKENS for b in blocks], dtype=torch.int32),
        torch.tensor([b * BLOCK_TOKENS + t for b, t in sizes], dtype=torch.int32),
        recent[0],
        recent[1],
        form,
    )


def without_oldest(cache: Cache, blocks: list[int]) -> tuple[Cache, Cache]:
    """A cache whose table leads nowhere for so many blocks of each sequence, and one without them.

    The second counts positions from its first block on, which a ring of 64 tokens does not notice.
    """
    holes, table = cache.block_table.clone(), torch.full_like(cache.block_table, 2**30)
    for s, count in enumerate(blocks):
        holes[s, :count] = 2**30
        table[s, : table.shape[1] - count] = cache.block_table[s, count:]
    older = torch.tensor(blocks, dtype=torch.int32) * BLOCK_TOKENS
    compressed, length = cache.compressed - older, cache.length - older
    return (
        replace(cache, block_table=holes),
        replace(cache, block_table=table, compressed=compressed, length=length),
    )
