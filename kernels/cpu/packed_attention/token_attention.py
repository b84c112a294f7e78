"""Attention over packed blocks whose K is quantized per token: in torch, block by block unpacked.

For comparing forms, not for speed: the compiled kernel is for K per channel.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.layer_cache import PackedTokens
from qoff.kernels.layout.ragged import Span
from qoff.kernels.reference.kv_blocks import unpack_blocks
from qoff.kernels.triton.attention.rotation import rotate_values

logger = logging.getLogger(__name__)

_BLOCKS = 64  # unpacked at a time


def token_attention(
    queries: Tensor,
    heads: int,
    packed: PackedTokens,
    *,
    scale: float,
    soft_cap: float,
    window: int | None,
    rotated: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend as `packed_attention` does, and merge into out [M, heads * D] and lse [M, heads]."""
    _announce()
    dim = packed.form.head_dim
    rows = queries[:, : heads * dim].unflatten(1, (heads, dim))
    outs = out.unflatten(1, (heads, dim))
    for span in packed.table.ragged.spans:
        part = slice(span.start, span.start + span.count)
        blocks = packed.table.blocks[span.slot, : packed.table.counts[span.slot] // BLOCK_TOKENS]
        for first in range(0, len(blocks), _BLOCKS):
            some = blocks[first : first + _BLOCKS].long()
            output, some_lse = _attend(
                rows[part], packed, span, some, first * BLOCK_TOKENS, (scale, soft_cap), window
            )
            if rotated:
                output = rotate_values(output, back=True)
            _merge(outs[part], lse[part], output, some_lse)


def _attend(
    query: Tensor,
    packed: PackedTokens,
    span: Span,
    blocks: Tensor,
    first: int,
    score: tuple[float, float],  # scale and soft cap
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Attention of query [T, heads, D] to some blocks: [T, heads, D] and log-sum-exp [T, heads]."""
    # [blocks, kv_heads, 64, D] -> [heads, tokens, D]
    k, v = (
        x.transpose(0, 1).flatten(1, 2).repeat_interleave(query.shape[1] // x.shape[1], 0)
        for x in unpack_blocks(packed.pool[blocks], packed.form)
    )
    scale, soft_cap = score
    scores = torch.einsum("thd,hkd->thk", query, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if window is not None:
        begin = packed.table.first[span.slot] if packed.table.first else 0
        token = begin + first + torch.arange(k.shape[1])
        position = span.past + torch.arange(span.count)
        hidden = position[:, None] - token >= window
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a row may see nothing
    return torch.einsum("thk,hkd->thd", weights, v), lse


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Join two results by log-sum-exp, into the first."""
    total = torch.logaddexp(lse, other_lse)
    for mine, part in ((out, lse), (other, other_lse)):
        mine *= (part - total).exp().nan_to_num(0.0)[..., None]
    out += other
    lse.copy_(total)


@cache
def _announce() -> None:
    logger.warning("a KV cache with K per token is unpacked by torch: slower than K per channel")
