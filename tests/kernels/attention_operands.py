"""Random packed caches of ragged batches for the attention tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from qoff.kernels.layout.device_cache import DeviceLayerCache, PassTables
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.reference.kv_blocks import quantize_blocks


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@contextmanager
def decoding_in_runs(blocks: int) -> Iterator[Any]:
    """Have Triton's decode attention cut in runs of this many blocks, with this configuration."""
    from qoff.kernels.triton.attention import runs  # needs Triton
    from qoff.kernels.triton.attention.decode import DecodeConfig

    with patch.object(runs, "blocks_per_run", lambda split, most: blocks):
        yield DecodeConfig(num_warps=1, resident=10**4)


def random_cache(
    form: KVFormat,
    kv_heads: int,
    sizes: list[tuple[int, int]],
    dtype: torch.dtype = torch.float16,
    ring: int = 64,
    rows: list[int] | None = None,
) -> DeviceLayerCache:
    """A cache of sequences with (blocks, recent tokens); K has channels of very different sizes.

    Physical blocks are in random order, and the ring is NaN where unused. rows: new tokens of each
    sequence, after these; None: one, the last of these.
    """
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
    old = [b * BLOCK_TOKENS + t for b, t in sizes]
    step = random_pass(old, [b * BLOCK_TOKENS for b in blocks], table, rows)
    values = recent[1, ..., : form.own_value_dim].contiguous()
    return DeviceLayerCache(form, pool, recent[0], values, step)


def random_pass(
    old: list[int], packed: list[int], table: torch.Tensor, rows: list[int] | None = None
) -> PassTables:
    """A pass of `rows` tokens after the `old` ones; None: of the last of these."""
    counts = [min(n, 1) for n in old] if rows is None else rows
    start = [n - min(n, 1) for n in old] if rows is None else old
    return PassTables(
        start=ints(start),
        row_start=ints([sum(counts[:s]) for s in range(len(counts) + 1)]),
        length=ints([n + c for n, c in zip(start, counts, strict=True)]),
        packed=ints(packed),
        after=ints(packed),
        table=table,
        positions=ints([n + i for n, c in zip(start, counts, strict=True) for i in range(c)]),
        max_rows=max(counts),
        max_packed=max(packed),
    )


def without_oldest(
    cache: DeviceLayerCache, blocks: list[int]
) -> tuple[DeviceLayerCache, DeviceLayerCache]:
    """A cache whose table leads nowhere for so many blocks of each sequence, and one without them.

    The second counts positions from its first block on, which a ring of 64 tokens does not notice.
    """
    step = cache.step
    holes, table = step.table.clone(), torch.full_like(step.table, 2**30)
    for s, count in enumerate(blocks):
        holes[s, :count] = 2**30
        table[s, : table.shape[1] - count] = step.table[s, count:]
    older = ints(blocks) * BLOCK_TOKENS
    without = {name: getattr(step, name) - older for name in ("start", "length", "packed", "after")}
    most = int((step.packed - older).max())
    return (
        replace(cache, step=replace(step, table=holes, resident_from=older, max_packed=most)),
        replace(cache, step=replace(step, table=table, max_packed=most, **without)),
    )
