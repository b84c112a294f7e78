"""What the attention ops over the packed KV cache mean, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS

from .kv_blocks import dequantize_blocks


def decode_attention(
    q: Tensor,
    cache: DeviceLayerCache,
    shape: HeadShape,
    sinks: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """One query per sequence, at its last cached token: output [S, Hq, D] and log-sum-exp [S, Hq].

    q: [S, Hq, D]. Of the pass of the cache, `length` counts, with each query's own token, whose key
    is in the ring already; blocks are those up to `packed`. A key p counts when
    p > length - 1 - window, or always without a window. A score is scale * q.k, then
    soft_cap * tanh(score / soft_cap) where that is not 0. sinks: float32 [Hq], further scores
    without values. The log-sum-exp is float32, of natural base. Without any key the output is 0.
    Tokens before `resident_from` are not attended.
    """
    outs = torch.zeros_like(q)
    lses = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for s in range(q.shape[0]):
        end = int(cache.step.length[s])
        cached = _cached(s, end, cache)
        out, lse = _attend(q[s : s + 1], cached, end - 1, shape, sinks, compute_dtype)
        outs[s], lses[s] = out[0], lse[0]
    return outs, lses


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: DeviceLayerCache,
    shape: HeadShape,
    sinks: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Causal attention of new tokens: output [T, Hq, D] and log-sum-exp float32 [T, Hq].

    q [T, Hq, D], k and v [T, kv_heads, D] (turned by RoPE): rows row_start[s]..row_start[s+1]-1 of
    the pass are the tokens of sequence s at positions start[s] on. Older tokens are in blocks
    (positions below packed[s]) or in the ring (packed[s]..start[s]-1). The rest is as in
    `decode_attention`.
    """
    outs = torch.zeros_like(q)
    lses = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for s, (first, row, stop) in enumerate(
        zip(
            cache.step.start.tolist(),
            cache.step.row_start[:-1].tolist(),
            cache.step.row_start[1:].tolist(),
            strict=True,
        )
    ):
        old = _cached(s, first, cache)
        rows = slice(row, stop)
        pairs = ((old.k, k[rows]), (old.v, v[rows]))
        new = _Cached(old.first, *(torch.cat((x, y.to(x.dtype))) for x, y in pairs))
        outs[rows], lses[rows] = _attend(q[rows], new, first, shape, sinks, compute_dtype)
    return outs, lses


class _Cached(NamedTuple):
    """Keys and values [n, kv_heads, D] of positions `first` on."""

    first: int
    k: Tensor
    v: Tensor


def _cached(s: int, end: int, cache: DeviceLayerCache) -> _Cached:
    """Keys and values of positions up to end - 1 of a sequence, from where they are resident."""
    step, form = cache.step, cache.form
    compressed = int(step.packed[s])
    first = 0 if step.resident_from is None else int(step.resident_from[s])
    blocks = step.table[s, first // BLOCK_TOKENS : compressed // BLOCK_TOKENS].long()
    records = cache.pool[blocks]  # [B, kv_heads, nbytes]
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in dequantize_blocks(records, form))
    slots = torch.arange(compressed, end, device=cache.pool.device) % cache.recent_k.shape[1]
    ring_k, ring_v = cache.recent_k[s, slots], cache.recent_v[s, slots]
    return _Cached(first, torch.cat((k, ring_k.to(k.dtype))), torch.cat((v, ring_v.to(v.dtype))))


def _attend(
    q: Tensor,
    cached: _Cached,
    first: int,
    shape: HeadShape,
    sinks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Queries [n, Hq, D] at positions first.. over keys and values."""
    (n, heads), v = q.shape[:2], cached.v
    group = heads // v.shape[1]
    plain = q.to(dtype).unflatten(1, (-1, group))  # [n, kv_heads, group, D]
    scores = torch.einsum("nhgd,thd->nhgt", plain, cached.k.to(dtype)) * shape.scale
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    position = torch.arange(first, first + n, device=q.device)[:, None]
    key = torch.arange(cached.first, cached.first + v.shape[0], device=q.device)[None, :]
    seen = key <= position
    if shape.window:
        seen = seen & (key > position - shape.window)
    scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    if sinks is not None:
        sink = sinks.to(dtype).view(-1, group, 1).expand(n, -1, -1, 1)
        scores = torch.cat((scores, sink), -1)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - torch.where(lse == -torch.inf, 0, lse)[..., None])
    out = torch.einsum("nhgt,thd->nhgd", p[..., : v.shape[0]], v.to(dtype))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2).float()
