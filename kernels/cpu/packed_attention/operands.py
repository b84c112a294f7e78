"""Operands of the ops over packed blocks, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.kernels.cpu.operands import check_rows, fail
from qoff.kernels.layout.layer_cache import PackedTokens


@dataclass(frozen=True, eq=False)
class SelectedBlocks:
    """Blocks of one part that each KV head of each row attends to."""

    blocks: Tensor  # int32 [M, kv_heads, n]: places in the row's block table, ascending
    counts: Tensor  # int32 [M, kv_heads]: how many of the n there are


def check_packed(op: str, queries: Tensor, heads: int, packed: PackedTokens) -> None:
    """Raise OpError for what would be read out of bounds."""
    form, pool, table = packed.form, packed.pool, packed.table
    check_rows(op, "queries", queries, table.ragged.tokens, queries.shape[-1])
    if queries.shape[-1] < heads * form.head_dim:
        fail(op, f"{queries.shape[-1]} columns are less than {heads} heads of {form.head_dim}")
    dense = pool.dim() == 3 and pool.stride()[1:] == (form.nbytes, 1)
    if pool.dtype != torch.uint8 or pool.shape[2:] != (form.nbytes,) or not dense:
        fail(
            op,
            f"pool must be uint8 [blocks, kv_heads, {form.nbytes}], each block contiguous, "
            f"not {pool.dtype} {list(pool.shape)}",
        )
    if heads % pool.shape[1]:
        fail(op, f"{heads} heads are no multiple of {pool.shape[1]} KV heads")
    if table.last >= len(pool):
        fail(op, f"the table names block {table.last} of a pool of {len(pool)}")
    bounds = packed.bounds
    if bounds is not None:
        dense = bounds.pool.dtype == torch.uint8 and bounds.pool.is_contiguous()
        if not dense or bounds.pool.shape[1:] != (pool.shape[1], form.bound_bytes):
            fail(op, f"bounds are contiguous uint8 [blocks, {pool.shape[1]}, {form.bound_bytes}]")
        if bounds.table.last >= len(bounds.pool) or [*bounds.table.counts] != [*table.counts]:
            fail(op, f"the bounds of {len(bounds.pool)} blocks do not go with the table")


def check_selected(op: str, chosen: SelectedBlocks, packed: PackedTokens) -> None:
    """Raise OpError unless the lists are of the right form; what they name is not looked at."""
    ragged, blocks, counts = packed.table.ragged, chosen.blocks, chosen.counts
    lists = (ragged.tokens, packed.pool.shape[1])
    if not ragged.is_decode:
        fail(op, f"blocks are chosen for one new token a sequence, not for {ragged.tokens}")
    for name, value, shape in (
        ("chosen blocks", blocks, (*lists, blocks.shape[-1])),
        ("their counts", counts, lists),
    ):
        if value.dtype != torch.int32 or value.shape != shape or not value.is_contiguous():
            fail(
                op,
                f"{name} must be contiguous int32 {list(shape)}, "
                f"not {value.dtype} {list(value.shape)}",
            )
