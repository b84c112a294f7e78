"""What attention means, in plain torch, and the GPU's ops over the packed KV cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape, first_seen, latent_values
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.ragged import Ragged, Span

from .kv_blocks import dequantize_blocks
from .select_blocks import select_blocks


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    first_key: int,
    shape: HeadShape,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of one sequence: output [T, Hq, D] and log-sum-exp [Hq, T] of its scores.

    q: [T, Hq, D], at positions `first` on, in whose dtype all is computed. k, v: [kv_heads, n, D],
    at positions `first_key` on. A key p counts for a query at i when `first_seen` of it <= p
    <= i, and where chosen, bool [kv_heads, n] or [kv_heads, T, n], is true. A score is scale * q.k,
    then soft_cap * tanh(score / soft_cap) where that is not 0. sinks: [Hq], further scores without
    values. Without any score the output is 0. The log-sum-exp is of natural base.
    """
    keys, repeat = k.shape[1], shape.heads // shape.kv_heads
    k, v = (x.to(q.dtype).repeat_interleave(repeat, 0) for x in (k, v))
    scores = torch.einsum("thd,hkd->htk", q, k) * shape.scale
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    key = torch.arange(first_key, first_key + keys, device=q.device)
    query = torch.arange(first, first + len(q), device=q.device)[:, None]
    seen = (key <= query) & (key >= first_seen(query, shape.reach))
    if chosen is not None:
        by_row = chosen if chosen.dim() == 3 else chosen[:, None]
        seen = seen & by_row.repeat_interleave(repeat, 0)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sunk = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat((scores, sunk), -1)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0)
    return torch.einsum("htk,hkd->thd", weights[..., :keys], v), lse


def decode_attention(
    q: Tensor, cache: DeviceLayerCache, shape: HeadShape, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One query per sequence, at its last cached token: output [S, Hq, D] and log-sum-exp [S, Hq].

    q: [S, Hq, D]; float64 is computed in float64, all else in float32. Of the pass of the cache,
    `length` counts, with each query's own token, whose key is in the ring already; blocks are those
    up to `packed`, or with a `top` of the cache below 1 those that `chosen_blocks` says. Tokens
    before `resident_from` are not attended. The log-sum-exp is float32; the rest is as in `attend`.
    """
    if cache.top < 1 and cache.step.resident_from is not None:
        raise OpError("attention to a part of the blocks needs all of them on the device")
    found = []
    for s, end in enumerate(cache.step.length.tolist()):
        first, k, v = _cached(s, end, cache)
        chosen = None
        if cache.top < 1 and end:
            chosen = chosen_blocks(q[s], s, cache, shape.reach).repeat_interleave(BLOCK_TOKENS, 1)
            unpacked = chosen.new_ones(len(chosen), k.shape[1] - chosen.shape[1])
            chosen = torch.cat((chosen, unpacked), 1)
        found.append(_attend(q[s : s + 1], end - 1, first, k, v, shape, sinks, chosen))
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses)


def chosen_blocks(query: Tensor, s: int, cache: DeviceLayerCache, reach: int) -> Tensor:
    """`select_blocks` for the new token of a sequence: bool [kv_heads, blocks].

    query: [heads, D], in at least whose dtype and float32 bounds are computed.
    """
    step = cache.step
    past, packed = int(step.length[s]) - 1, int(step.packed[s])
    blocks = step.table[s : s + 1, : packed // BLOCK_TOKENS].contiguous()
    table = BlockTable(blocks, [packed], Ragged.of([1], [past]))
    part = PackedTokens(cache.form, cache.pool, table)
    wide = query.to(torch.promote_types(query.dtype, torch.float32))
    return select_blocks(wide, (part,), Span(0, 0, 1, past), cache.top, reach)[0]


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: DeviceLayerCache,
    shape: HeadShape,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of new tokens: output [T, Hq, D] and log-sum-exp float32 [T, Hq].

    q [T, Hq, D], k [T, kv_heads, D] (both turned by RoPE) and v [T, kv_heads, value_dim]: rows
    row_start[s]..row_start[s+1]-1 of the pass are the tokens of sequence s at positions start[s]
    on. Older tokens are in blocks (positions below packed[s]) or in the ring
    (packed[s]..start[s]-1). The rest is as in `decode_attention`.
    """
    outs = q.new_zeros(*q.shape[:2], cache.form.value_dim)
    lses = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    row_start = cache.step.row_start.tolist()
    for s, first in enumerate(cache.step.start.tolist()):
        rows = slice(row_start[s], row_start[s + 1])
        first_key, *old = _cached(s, first, cache)
        new_k, new_v = (
            torch.cat((x, y[rows].transpose(0, 1).to(x.dtype)), 1)
            for x, y in zip(old, (k, v), strict=True)
        )
        outs[rows], lses[rows] = _attend(q[rows], first, first_key, new_k, new_v, shape, sinks)
    return outs, lses


def chosen_attention(
    q: Tensor, k: Tensor, cache: DeviceLayerCache, shape: HeadShape, chosen: Tensor
) -> Tensor:
    """Attention of the rows of a pass to the latents that they chose: [T, Hq, latent].

    q, k: as for `prefill_attention`; in a pass of at most one token a sequence keys are in the ring
    already. chosen: int32 [T, top], positions, of a row at one below `top` all up to its own.
    """
    outs = q.new_zeros(*q.shape[:2], cache.form.value_dim)
    for rows, first, keys in device_keys(k, cache):
        seen = torch.zeros(rows.stop - rows.start, len(keys), dtype=torch.bool, device=q.device)
        for own, listed, end in zip(
            seen, chosen[rows], range(first + 1, len(keys) + 1), strict=True
        ):
            own[listed[:end].long()] = True
        values = latent_values(keys, cache.form.latent)
        args = q[rows], keys[None], values[None], first, 0, shape, None, seen[None]
        outs[rows] = attend(*args)[0]
    return outs


def device_keys(k: Tensor, cache: DeviceLayerCache) -> Iterator[tuple[slice, int, Tensor]]:
    """Of each sequence with new tokens their rows, the first one's position, and all its keys.

    k: [T, 1, D], the new ones, which in a pass of at most one a sequence are in the ring already.
    Keys are float32 [n, D] and begin at position 0.
    """
    step = cache.step
    decodes = step.max_rows <= 1
    ends = (step.length if decodes else step.start).tolist()
    row_start = step.row_start.tolist()
    for s, end in enumerate(ends):
        rows = slice(row_start[s], row_start[s + 1])
        if rows.start == rows.stop:
            continue
        keys = _cached(s, end, cache)[1][0]
        if not decodes:
            keys = torch.cat((keys, k[rows, 0].to(keys.dtype)))
        yield rows, end - decodes, keys


def _cached(s: int, end: int, cache: DeviceLayerCache) -> tuple[int, Tensor, Tensor]:
    """Where a sequence's resident tokens begin; their K and V [kv_heads, n, D], up to end - 1."""
    step = cache.step
    compressed = int(step.packed[s])
    first = 0 if step.resident_from is None else int(step.resident_from[s])
    blocks = step.table[s, first // BLOCK_TOKENS : compressed // BLOCK_TOKENS].long()
    packed = dequantize_blocks(cache.pool[blocks], cache.form)  # [blocks, kv_heads, 64, D] each
    slots = torch.arange(compressed, end, device=cache.pool.device) % cache.recent_k.shape[1]
    recent_k = cache.recent_k[s, slots]
    latent = cache.form.latent
    recent_v = latent_values(recent_k, latent) if latent else cache.recent_v[s, slots]
    k, v = (
        torch.cat((x.transpose(0, 1).flatten(1, 2), recent.transpose(0, 1).to(x.dtype)), 1)
        for x, recent in zip(packed, (recent_k, recent_v), strict=True)
    )
    return first, k, v


def _attend(
    q: Tensor,
    first: int,
    first_key: int,
    k: Tensor,
    v: Tensor,
    shape: HeadShape,
    sinks: Tensor | None,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` in at least float32, its log-sum-exp float32 [T, Hq]."""
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    out, lse = attend(wide, k, v, first, first_key, shape, sinks, chosen)
    return out.to(q.dtype), lse.T.float()
