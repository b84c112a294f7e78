"""Which packed blocks a new token attends to, on the CPU: the best by a bound of their scores."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import fail
from qoff.kernels.layout.layer_cache import PackedTokens, kept_blocks

from .operands import SelectedBlocks, check_packed
from .scratch import FOLDED_BYTES, select_bytes
from .select_job import SelectArguments, SelectPart, select_job

_OP = "select_blocks"


def select_blocks(
    queries: Tensor,
    heads: int,
    packed: Sequence[PackedTokens],
    top: float,
    *,
    window: int = 0,
    threads: Pool | None = None,
) -> tuple[SelectedBlocks, ...]:
    """Choose `layer_cache.kept_blocks` of each row's blocks, of all parts together, per KV head.

    What is chosen is what `reference.select_blocks` says: the sequence's first block if two
    are kept, and those whose largest possible scores, summed over the query heads of the KV head,
    are the largest. queries: float32 [M, at least heads * D], rotated, one row a sequence. window:
    as for `packed_attention`; blocks that it hides from a row do not count. Reads 4 D bytes of a
    record, or of `PackedTokens.bounds`. Returns a list per part. Raises OpError for operands of
    another form.
    """
    first = packed[0].table
    tokens, kv_heads, dim = first.ragged.tokens, packed[0].pool.shape[1], packed[0].form.head_dim
    if not first.ragged.is_decode:
        fail(_OP, f"one new token a sequence is needed, not {tokens} in {len(first.items)} items")
    if not 0 < top <= 1:
        fail(_OP, f"a fraction of the blocks is in (0, 1], not {top}")
    for part in packed:
        check_packed(_OP, queries, heads, part)
        other = part.table.ragged
        if (part.pool.shape[1], part.form.head_dim, other.spans) != (
            kv_heads, dim, first.ragged.spans,
        ):  # fmt: skip
            fail(_OP, "the parts differ in KV heads, in head size or in their pass")
    total = sum(part.table.longest for part in packed)
    width = min(kept_blocks(top, total), max(part.table.longest for part in packed))
    blocks = torch.empty(len(packed), tokens, kv_heads, width, dtype=torch.int32)
    counts = torch.empty(len(packed), tokens, kv_heads, dtype=torch.int32)
    descriptions = (SelectPart * len(packed))(*map(_described, packed))
    longest = -(-total // 16) * 16
    workers = threads or default_pool()
    with workers.lock:
        scratch = workers.threads * FOLDED_BYTES
        base = workers.workspace(select_bytes(workers.threads, tokens, kv_heads, total))
        args = SelectArguments(
            queries.data_ptr(), 4 * queries.stride(0), tokens, heads, kv_heads, dim,
            ctypes.addressof(descriptions), len(packed), first.ragged.positions.data_ptr(),
            window, longest, base, base + scratch, blocks.data_ptr(), width,
            counts.data_ptr(), top,
        )  # fmt: skip
        workers.run(select_job.address, args, keep=descriptions)
    return tuple(SelectedBlocks(*lists) for lists in zip(blocks, counts, strict=True))


def _described(part: PackedTokens) -> SelectPart:
    """Where the job finds what it chooses by."""
    pool, table, record, k_scale = part.pool, part.table, part.form.nbytes, part.form.k_scale
    if part.bounds is not None:
        pool, table, record, k_scale = part.bounds.pool, part.bounds.table, part.form.bound_bytes, 0
    return SelectPart(
        pool.data_ptr(), record, pool.stride(0), table.blocks.data_ptr(), table.blocks.shape[1],
        table.items.data_ptr(), k_scale, 2**part.form.k_bits - 1,
    )  # fmt: skip
