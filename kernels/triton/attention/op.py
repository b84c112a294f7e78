"""Attention of a layer whose keys and values have heads: all that is done to the rows of a pass."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import WIDEST, HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.rotation import rotate_values
from qoff.kernels.triton.elementwise.rms_norm import rms_norm
from qoff.kernels.triton.elementwise.rope import rope
from qoff.kernels.triton.latent.attention import latent_attention, latent_attention_bytes

from .append import kv_append, new_blocks, pack_blocks, write_recent
from .decode import decode_attention, decode_bytes
from .new_token import NewTokens
from .offloaded import OffloadedAttention
from .prefill import prefill_attention, prefill_bytes
from .select_blocks import ChosenBlocks, select_blocks


def attend_to_heads(
    rows: Tensor,
    shape: HeadShape,
    cache: DeviceLayerCache,
    rotary: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor | None, Tensor | None],
    sinks: Tensor | None,
) -> Tensor:
    """What `ops.attention` does with the rows of a pass, [M, shape.qkv_width].

    norms: of queries and of keys. Returns [M, heads, head_dim]. Raises OpError.
    """
    step, wide = cache.step, shape.head_dim > WIDEST
    heads = rows.unflatten(1, (-1, shape.head_dim))
    query, key, value = _operands(heads, shape, cache)
    if shape.value_norm and shape.appends:
        value = _normed(value, _ones(shape.head_dim, value.device), shape.norm_eps)
    # Mostly all else is done where a decode step attends.
    if step.max_rows == 1 and not (cache.offloaded or wide):
        new = NewTokens(key, value, rotary, *norms, cache.values_rotated, not shape.appends)
        return _decode(query, new, shape, cache, sinks)[0]
    query = _prepared(query, norms[0], shape, step.positions, rotary)
    if shape.appends:
        key = _prepared(key, norms[1], shape, step.positions, rotary)
        value = rotate_values(value) if cache.values_rotated else value
    if shape.query_scale is not None:
        query = query * shape.query_scale.of(step.positions)[:, None, None].to(query.dtype)
        shape = replace(shape, query_scale=None)
    new = NewTokens(key, value, kept=not shape.appends)
    offloaded, chosen = None, None
    if cache.offloaded:
        if cache.top < 1 and step.max_rows == 1 and not wide:
            chosen = select_blocks(query, cache, shape, new)
        offloaded = OffloadedAttention(query, cache.offloaded, shape, chosen)
    if step.max_rows == 1 and not wide:
        attended, lse = _decode(query, new, shape, cache, sinks, chosen)
    else:
        attend = _attend_wide if wide else _prefill
        attended, lse = attend(query, new, shape, cache, sinks)
    attended = attended if offloaded is None else offloaded.join(attended, lse)
    return rotate_values(attended, back=True) if cache.values_rotated else attended


def heads_bytes(
    tokens: int,
    sequences: int,
    blocks: int,
    shape: HeadShape,
    form: KVFormat,
    dtype: torch.dtype,
    device: torch.device,
    values_rotated: bool,
    top: float = 1.0,
    offloaded: bool = False,
) -> int:
    """The most bytes `attend_to_heads` allocates, with what rows in another order take.

    For up to `tokens` tokens of `sequences` sequences that have up to `blocks` packed blocks each.
    values_rotated: the cache's V are. top: see `DeviceLayerCache`. offloaded: some blocks are in
    host memory.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Rows in the order of the slots; queries and keys for their norm, normed and rotated.
    values = tokens * (queries + 2 * keys + 3 * (queries + keys))
    values += tokens * queries * (shape.query_scale is not None)
    values += tokens * queries * 2  # results in the order of the slots, and of the batch
    values += sequences * queries  # of decode, with those of sequences that wait
    if values_rotated:
        values += 2 * tokens * (keys + queries)
    values += 2 * tokens * keys * shape.value_norm
    both = (shape.heads, shape.kv_heads)
    if shape.head_dim > WIDEST:
        work = latent_attention_bytes(tokens, shape.heads, blocks, form, dtype, device)
    else:
        work = max(
            decode_bytes(sequences, *both, blocks, form, dtype, device, top, offloaded),
            prefill_bytes(tokens, *both, sequences, blocks, form, dtype, device),
        )
    return values * dtype.itemsize + work


def _operands(
    heads: Tensor, shape: HeadShape, cache: DeviceLayerCache
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: of a layer that appends none, those that the one before it left."""
    if shape.appends:
        query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        return query, key, value
    if cache.step.max_rows <= 1:  # they are in the ring
        unread = heads[:, : shape.kv_heads]
        return heads, unread, unread
    lent = cache.lent
    if lent is None or lent.key is None or lent.value is None:
        raise OpError("a layer without keys of its own comes after the one whose keys it reads")
    return heads, lent.key, lent.value


def _decode(
    query: Tensor,
    new: NewTokens,
    shape: HeadShape,
    cache: DeviceLayerCache,
    sinks: Tensor | None,
    chosen: ChosenBlocks | None = None,
) -> tuple[Tensor, Tensor]:
    """One query a sequence: its key goes to the ring first, complete blocks are packed last."""
    attended, lse = decode_attention(query, cache, shape, sinks, new=new, chosen=chosen)
    if not new.kept:
        _pack(new, cache, cache.step.length)
    return attended, lse


def _prefill(
    query: Tensor,
    new: NewTokens,
    shape: HeadShape,
    cache: DeviceLayerCache,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Many queries: they attend to the cache as it was and to each other, then it is written."""
    attended, lse = prefill_attention(query, new.key, new.value, cache, shape, sinks)
    _append(new, cache)
    return attended, lse


def _attend_wide(
    query: Tensor,
    new: NewTokens,
    shape: HeadShape,
    cache: DeviceLayerCache,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `_decode` or `_prefill`, of heads that these have no tiles for."""
    if sinks is not None:
        raise OpError(f"attention with heads of over {WIDEST} channels has no sinks on a GPU")
    step = cache.step
    decodes = step.max_rows <= 1
    if decodes and cache.top < 1:
        raise OpError(f"attention with heads of over {WIDEST} channels is to all blocks on a GPU")
    if decodes and not new.kept:
        write_recent(new.key, new.value, cache, step.packed)
    attended, lse = latent_attention(query, new.key, cache, shape, value=new.value)
    if not decodes:
        _append(new, cache)
    elif not new.kept:
        _pack(new, cache, step.length)
    return attended, lse


def _append(new: NewTokens, cache: DeviceLayerCache) -> None:
    """Append new tokens, or leave them to the layers behind, which attend to all as it was."""
    if cache.lent is None:
        kv_append(new.key, new.value, cache)
    else:
        cache.lent.key, cache.lent.value = new.key.contiguous(), new.value.contiguous()


def _pack(new: NewTokens, cache: DeviceLayerCache, start: Tensor) -> None:
    """Pack the blocks that become complete; start: see `new_blocks`."""
    for blocks in new_blocks(cache, start):
        pack_blocks(new.key, new.value, cache, blocks)


def _prepared(
    heads: Tensor,
    norm: Tensor | None,
    shape: HeadShape,
    positions: Tensor,
    tables: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Queries or keys, normed and turned."""
    if shape.norm_last:
        return _normed(_turned(heads, positions, tables), norm, shape.norm_eps)
    return _turned(_normed(heads, norm, shape.norm_eps), positions, tables)


@cache
def _ones(dim: int, device: torch.device) -> Tensor:
    """Weights of a norm without weights."""
    return torch.ones(dim, device=device)


def _normed(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm of each head of [M, H, D]."""
    if weight is None:
        return heads
    rows = heads.contiguous().view(-1, heads.shape[2])
    return rms_norm(rows, weight, eps).view(heads.shape)


def _turned(heads: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    return heads if tables is None else rope(heads, positions, *tables)
