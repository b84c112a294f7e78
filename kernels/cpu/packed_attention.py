"""Attention over the packed KV cache on the CPU, where the cache is."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..kv_format import BLOCK_TOKENS, KVFormat
from ..ragged import Ragged
from .operands import check_dense, check_rows, fail
from .packed_block import ROWS
from .packed_job import THREAD_BYTES, PackedArguments, packed_job, partial_floats
from .pool import Pool, default_pool

_OP = "packed_attention"
_RUN = 16  # blocks whose partial result is one item; fixed, so that threads change no bit
_ITEM_TOKENS = 16  # new tokens of a sequence that are one item


def packed_attention(
    queries: Tensor,
    heads: int,
    pool: Tensor,
    block_table: Tensor,
    packed: list[int],
    ragged: Ragged,
    form: KVFormat,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    threads: Pool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the new tokens of each sequence to its packed tokens, all of which are older.

    queries: float32 [M, at least heads * D], rotated, rows as `ragged` says. pool: uint8
    [blocks, kv_heads, form.nbytes]. block_table: int32 [slots, n]: the block of tokens 64 i and on.
    packed: of each slot, how many tokens are packed, a multiple of 64. window: a query sees this
    many of the newest tokens, itself included.
    Returns float32 [M, heads * D] and the natural log-sum-exp [M, heads] (0 and -inf for a query
    that sees no packed token). If `out` and `lse` are given, they hold attention to other tokens,
    and what is found here is merged into them. Raises OpError for operands of another form.
    """
    _check(queries, heads, pool, block_table, packed, ragged, form)
    tokens, kv_heads = ragged.tokens, pool.shape[1]
    merge = out is not None and lse is not None
    if out is None:
        out = torch.empty(tokens, heads * form.head_dim)
    if lse is None:
        lse = torch.empty(tokens, heads)
    check_rows(_OP, "out", out, tokens, heads * form.head_dim)
    check_dense(_OP, "lse", lse, (tokens, heads))
    items = _items(ragged, packed)
    longest = max((packed[span.slot] for span in ragged.spans), default=0) // BLOCK_TOKENS
    # Only few queries need their blocks split between threads, and can afford partial results.
    run = _RUN if ragged.is_decode else max(1, longest)
    runs = max(1, -(-longest // run))
    workers = threads or default_pool()
    with workers.lock:
        floats = partial_floats(form.half)
        scratch = workers.threads * (THREAD_BYTES + 4 * ROWS * floats)
        base = workers.workspace(scratch + 4 * tokens * runs * heads * floats)
        args = PackedArguments(
            queries.data_ptr(), 4 * queries.stride(0), tokens, heads, kv_heads, form.half,
            form.k_bits, form.v_bits, pool.data_ptr(), form.nbytes, block_table.data_ptr(),
            block_table.shape[1], items.data_ptr(), len(items), window or 0, runs, run,
            base + scratch, base, out.data_ptr(), 4 * out.stride(0), lse.data_ptr(), merge, scale,
        )  # fmt: skip
        workers.run(packed_job.address, ctypes.addressof(args))
    return out, lse


def _items(ragged: Ragged, packed: list[int]) -> Tensor:
    """int64 [items, ITEM_FIELDS]: some tokens of one sequence each."""
    return torch.tensor(
        [
            (
                span.start + first,
                min(_ITEM_TOKENS, span.count - first),
                span.slot,
                span.past + first,
                packed[span.slot],
            )
            for span in ragged.spans
            for first in range(0, span.count, _ITEM_TOKENS)
        ]
    )


def _check(
    queries: Tensor,
    heads: int,
    pool: Tensor,
    block_table: Tensor,
    packed: list[int],
    ragged: Ragged,
    form: KVFormat,
) -> None:
    """Refuse what would be read out of bounds."""
    check_rows(_OP, "queries", queries, ragged.tokens, queries.shape[-1])
    if queries.shape[-1] < heads * form.head_dim:
        fail(_OP, f"{queries.shape[-1]} columns are less than {heads} heads of {form.head_dim}")
    if form.k_form != "channel":
        fail(_OP, "K must be quantized per channel")
    if pool.dtype != torch.uint8 or not pool.is_contiguous() or pool.shape[2:] != (form.nbytes,):
        fail(
            _OP,
            f"pool must be contiguous uint8 [blocks, kv_heads, {form.nbytes}], "
            f"not {pool.dtype} {list(pool.shape)}",
        )
    if heads % pool.shape[1]:
        fail(_OP, f"{heads} heads are no multiple of {pool.shape[1]} KV heads")
    whole = block_table.dtype == torch.int32 and block_table.is_contiguous()
    if not whole or block_table.dim() != 2:
        fail(
            _OP,
            "block_table must be contiguous int32 [slots, blocks], "
            f"not {block_table.dtype} {list(block_table.shape)}",
        )
    if ragged.sequences > min(len(packed), len(block_table)):
        fail(_OP, f"no packed tokens or no block table for slot {ragged.sequences - 1}")
    for span in ragged.spans:
        length, row = packed[span.slot], block_table[span.slot]
        if length % BLOCK_TOKENS or not 0 <= length <= span.past:
            fail(_OP, f"slot {span.slot}: {length} of {span.past} tokens cannot be packed blocks")
        blocks = length // BLOCK_TOKENS
        if blocks > len(row):
            fail(_OP, f"{length} packed tokens, but the table has {len(row)} blocks")
        if blocks:
            low, high = (int(x) for x in torch.aminmax(row[:blocks]))
            if low < 0 or high >= len(pool):
                outside = low if low < 0 else high
                fail(_OP, f"the table names block {outside} of a pool of {len(pool)}")
