"""What a layer's cache has of a sequence, packed or not."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.heads import KEYS_PER_VECTOR, read_keys
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Span
from qoff.kernels.layout.rotation import rotate_values

from .kv_blocks import dequantize_blocks


def packed_tokens(cache: LayerCache, span: Span) -> int:
    """How many tokens of a sequence are packed."""
    return sum(part.table.counts[span.slot] for part in cache.packed)


def append_heads(cache: LayerCache, span: Span, key: Tensor, value: Tensor) -> None:
    """Put new keys and values, [T, kv_heads, channels] each, behind those that are not packed."""
    keys, values = cache.keys, cache.values
    place = torch.arange(span.past, span.past + span.count) - packed_tokens(cache, span)
    block, lane = place // KEYS_PER_VECTOR, place % KEYS_PER_VECTOR
    keys[span.slot, :, block, :, lane] = key.to(keys.dtype)
    values[span.slot, :, place] = value.transpose(0, 1).to(values.dtype)


def remembered(cache: LayerCache, span: Span) -> tuple[Tensor, Tensor]:
    """All keys and values of a sequence, [kv_heads, tokens, channels] each."""
    packed = packed_tokens(cache, span)
    recent = span.past + span.count - packed
    key = read_keys(cache.keys, span.slot, recent)
    value = cache.values[span.slot, :, :recent]
    for part in cache.packed:
        table = part.table
        blocks = table.blocks[span.slot, : table.counts[span.slot] // BLOCK_TOKENS].long()
        first = table.first[span.slot] if table.first else 0
        # [blocks, kv_heads, 64, D] -> [kv_heads, tokens, D], between the older and the newer ones
        old_key, old_value = (
            x.transpose(0, 1).flatten(1, 2) for x in dequantize_blocks(part.pool[blocks], part.form)
        )
        if cache.values_rotated and not part.form.latent:
            old_value = rotate_values(old_value, back=True)
        key, value = (
            torch.cat((x[:, :first], old, x[:, first:]), 1)
            for x, old in ((key, old_key), (value, old_value))
        )
    return key, value
