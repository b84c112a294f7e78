"""What choosing tokens by an index means, in plain torch: see `layout.index`."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.heads import latent_values
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged

from .kv_blocks import rope_keys
from .remembered import append_heads, remembered


def choose(
    qk: Tensor,
    weights: Tensor,
    shape: IndexShape,
    cache: LayerCache,
    ragged: Ragged,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Append keys of an index to its cache; the tokens that rows from position `top` on attend to.

    qk: [M, shape.width], queries of all heads, then the key, channels that RoPE turns where a
    latent shape has them. weights: [M, heads]. cache: of `shape.keys`. Returns int32 [M, top],
    positions in their order; of equal scores the first. Those of rows at positions below `top`,
    which attend to all, mean nothing.
    """
    heads = qk.view(len(qk), -1, shape.dim)
    if rotary is not None:
        heads = rope_keys(heads, ragged.positions, shape.keys.latent, *rotary)
    query, key = heads.split([shape.heads, 1], dim=1)
    chosen = torch.empty(len(qk), shape.top, dtype=torch.int32) if out is None else out
    for span in ragged.spans:
        rows = slice(span.start, span.start + span.count)
        append_heads(cache, span, key[rows], latent_values(key[rows], shape.keys.latent))
        if span.past + span.count <= shape.top:
            continue
        keys = remembered(cache, span)[0][0].to(qk.dtype)
        scores = index_scores(query[rows], keys, weights[rows])
        positions = torch.arange(span.past, span.past + span.count)
        scores.masked_fill_(torch.arange(len(keys)) > positions[:, None], -torch.inf)
        late = positions >= shape.top
        best = scores[late].sort(dim=-1, descending=True, stable=True).indices[:, : shape.top]
        chosen[rows][late] = best.sort(-1).values.int()
    return chosen


def index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Scores of keys [n, D] by queries [T, heads, D] and weights [T, heads] of an index: [T, n]."""
    products = torch.einsum("thd,kd->thk", query, keys).relu()
    return torch.einsum("thk,th->tk", products, weights)
