"""What the decoder's ops mean, in plain torch: signatures of `ops.Ops`, any packing or dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.ending import PLAIN, Ending, Norm
from qoff.kernels.layout.heads import (
    HeadShape,
    latent_values,
)
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged, Span

from .attention import attend
from .delta import delta, gate
from .elementwise import resize_heads, rms_norm
from .experts import add_experts, experts, route
from .index import choose
from .kv_blocks import rope_keys
from .latent import absorb, expand
from .linear import ended, normalized
from .low_rank import low_rank
from .mamba import mamba
from .remembered import append_heads, packed_tokens, remembered
from .select_blocks import select_blocks
from .short_conv import short_conv
from .streams import correct, matched, predict, sparse_gate

PACKING = "split32"
CACHE, USES_OUT, RECORDER = "host", True, None
ACTIVATION_BITS: tuple[int, ...] = (16,)

__all__ = [
    "ACTIVATION_BITS",
    "CACHE",
    "PACKING",
    "RECORDER",
    "USES_OUT",
    "absorb",
    "add_experts",
    "attention",
    "choose",
    "correct",
    "delta",
    "expand",
    "experts",
    "gate",
    "low_rank",
    "mamba",
    "matched",
    "norm",
    "predict",
    "resize_heads",
    "route",
    "short_conv",
    "sparse_gate",
    "w4_linear",
]


def w4_linear(
    x: Tensor,
    weight: QTensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    end: Ending = PLAIN,
    out: Tensor | None = None,
) -> Tensor:
    """Return norm(x) @ W.T + bias with what `end` says of it, and of the residual. x: [M, K]."""
    y = x if norm is None else normalized(x, norm)
    y = y @ weight.dequantize(x.dtype).T
    if bias is not None:
        y = y + bias.to(x.dtype)
    y = ended(y, end, residual)
    return y if out is None else out.copy_(y)


def norm(
    x: Tensor,
    by: Norm,
    *,
    scale: float = 1.0,
    residual: Tensor | None = None,
    sum_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return sum_scale * (scale * norm(x) + residual) for rows of x [M, K]."""
    y = ended(x, Ending(post_norm=by, scale=scale, sum_scale=sum_scale), residual)
    return y if out is None else out.copy_(y)


def attention(
    qkv: Tensor,
    shape: HeadShape,
    cache: LayerCache,
    ragged: Ragged,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, append keys and values to the cache, attend causally.

    qkv: [M, (heads + 2 kv_heads) * head_dim], of a latent shape without columns of values, and
    queries alone where it does not append; cache: the layer's keys and values, and which part of
    its packed blocks is attended in a pass of one new token a sequence. sinks: [heads], scores of a
    key without a value. q_norm, k_norm: [head_dim], RMSNorm over each head, or [heads * head_dim]
    and [kv_heads * head_dim], over all. chosen: int32 [M, top], the tokens that rows at position
    `top` or later attend to: see `index.choose`. Returns [M, heads * value_dim].
    """
    if shape.norms_all(q_norm, k_norm):
        qkv, q_norm, k_norm = norm_all_heads(qkv, shape, q_norm, k_norm), None, None
    heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
    query, key, value = _split(heads, shape) if shape.appends else (heads, heads[:, :0], heads)
    if not shape.norm_last:
        query, key = _normed(query, q_norm, shape), _normed(key, k_norm, shape)
    if rotary is not None:
        query, key = (rope_keys(x, ragged.positions, shape.latent, *rotary) for x in (query, key))
        value = latent_values(key, shape.latent) if shape.latent else value
    if shape.norm_last:
        query, key = _normed(query, q_norm, shape), _normed(key, k_norm, shape)
    if shape.value_norm and shape.appends:
        value = _normed(value, value.new_ones(shape.head_dim), shape)
    if shape.query_scale is not None:
        query = query * shape.query_scale.of(ragged.positions)[:, None, None].to(query.dtype)
    if out is None:
        out = qkv.new_empty(qkv.shape[0], shape.out_width)
    for span in ragged.spans:
        rows = slice(span.start, span.start + span.count)
        if shape.appends:
            append_heads(cache, span, key[rows], value[rows])
        keys, values = remembered(cache, span)
        seen = None
        if cache.packed and cache.top < 1 and ragged.is_decode:
            seen = _selected(cache, span, query[span.start], shape.reach)
        elif chosen is not None:
            seen = _among(chosen[rows], span, keys.shape[1])
        found, _ = attend(query[rows], keys, values, span.past, 0, shape, sinks, seen)
        out[rows] = found.flatten(1)
    return out


def _normed(x: Tensor, weight: Tensor | None, shape: HeadShape) -> Tensor:
    return x if weight is None else rms_norm(x, weight, shape.norm_eps)


def _split(heads: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each [M, heads, channels]."""
    if shape.latent:
        query, key = heads.split([shape.heads, shape.kv_heads], dim=1)
        return query, key, latent_values(key, shape.latent)
    query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    return query, key, value


def norm_all_heads(
    qkv: Tensor, shape: HeadShape, q_norm: Tensor | None, k_norm: Tensor | None
) -> Tensor:
    """qkv with an RMSNorm over all queries, and one over all keys, of each token."""
    widths = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    query, key, value = qkv.split(widths, dim=1)
    assert q_norm is not None
    assert k_norm is not None
    normed = (rms_norm(x, by, shape.norm_eps) for x, by in ((query, q_norm), (key, k_norm)))
    return torch.cat((*normed, value), dim=1)


def _selected(cache: LayerCache, span: Span, query: Tensor, reach: int) -> Tensor:
    """Which tokens each KV head attends to, bool [kv_heads, tokens]: all that are not packed."""
    recent = span.past + 1 - packed_tokens(cache, span)
    seen = torch.ones(cache.values.shape[1], recent, dtype=torch.bool)
    chosen = select_blocks(query, cache.packed, span, cache.top, reach)
    for part, blocks in zip(cache.packed, chosen, strict=True):
        first = part.table.first[span.slot] if part.table.first else 0
        tokens = blocks.repeat_interleave(BLOCK_TOKENS, 1)
        seen = torch.cat((seen[:, :first], tokens, seen[:, first:]), 1)
    return seen


def _among(chosen: Tensor, span: Span, tokens: int) -> Tensor:
    """Which tokens the rows of a sequence attend to, bool [1, T, tokens]."""
    positions = torch.arange(span.past, span.past + span.count)
    seen = torch.zeros(len(chosen), tokens, dtype=torch.bool)
    late = positions >= chosen.shape[1]
    seen[late] = seen[late].scatter(1, chosen[late].long(), True)
    seen[~late] = True
    return seen[None]
