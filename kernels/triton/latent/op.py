"""Attention of a layer with latents: new keys turned and kept, queries attending."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.triton.attention.offloaded import OffloadedAttention
from qoff.kernels.triton.indexed.attend import chosen_attention, chosen_attention_bytes
from qoff.kernels.triton.indexed.choose import chooses

from .append import keep_latents, turn
from .attention import latent_attention, latent_attention_bytes


def attend_to_latents(
    rows: Tensor,
    shape: HeadShape,
    cache: DeviceLayerCache,
    rotary: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    chosen: Tensor | None = None,
) -> Tensor:
    """What `ops.attention` does with the rows of a pass, which are turned in place.

    rows: [M, (heads + 1) * head_dim]. chosen: see `indexed.attend.chosen_attention`. Returns
    [M, heads, latent]. Raises OpError.
    """
    if sinks is not None:
        raise OpError("attention to latents has no sinks on a GPU")
    step = cache.step
    if step.max_rows <= 1 and cache.top < 1:
        raise OpError("attention to latents is to all blocks on a GPU")
    vectors = rows.view(len(rows), -1, shape.head_dim)
    query, key = vectors.split([shape.heads, 1], dim=1)
    if shape.query_scale is not None:
        query.mul_(shape.query_scale.of(step.positions)[:, None, None].to(query.dtype))
    decodes = step.max_rows <= 1
    turn(vectors, cache, rotary, to_ring=decodes)
    if chosen is not None and chooses(cache, chosen.shape[1]):
        attended = chosen_attention(query, key, cache, shape, chosen)
        keep_latents(key, cache)
        return attended
    offloaded = OffloadedAttention(query, cache.offloaded, shape) if cache.offloaded else None
    attended, lse = latent_attention(query, key, cache, shape)
    keep_latents(key, cache)
    return attended if offloaded is None else offloaded.join(attended, lse)


def latents_bytes(
    tokens: int,
    blocks: int,
    shape: HeadShape,
    form: KVFormat,
    dtype: torch.dtype,
    device: torch.device,
    offloaded: bool,
    chosen: int = 0,
) -> int:
    """The most bytes that attention to latents allocates beside what the CPU finds.

    For up to `tokens` tokens of sequences of up to `blocks` blocks each. offloaded: some are
    attended on the CPU. chosen: tokens that an index chooses for each, 0 without one.
    """
    # Rows in the order of the slots, and results in that of the batch.
    values = tokens * (shape.qkv_width + shape.out_width)
    if offloaded:  # queries, contiguous, on the way to the CPU
        values += tokens * shape.heads * shape.head_dim
    work = latent_attention_bytes(tokens, shape.heads, blocks, form, dtype, device)
    if chosen:
        to_chosen = chosen_attention_bytes(tokens, shape.heads, chosen, form, dtype, device)
        work = max(work, to_chosen)
    return values * dtype.itemsize + work
