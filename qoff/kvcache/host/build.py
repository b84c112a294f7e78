"""The cache in host memory that a `KVQuant` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qoff.kernels.layout.heads import HeadShape
from qoff.kvcache.base import KVCache
from qoff.kvcache.quant import KVQuant

from .mixed import MixedCache
from .packed import PackedCache
from .plain import PlainCache


def host_cache(
    shapes: Sequence[HeadShape], sequences: int, kv: KVQuant | None, capacity: int = 0
) -> KVCache:
    """An empty cache of layers of these shapes: float32 without `kv`, else packed as it says.

    One in float32 has room for `capacity` tokens of each sequence at once. Raises OpError for a
    head size that cannot be packed, ArgumentError for bits of a layer there is not.
    """
    if kv is None:
        return PlainCache(shapes, sequences, capacity)
    forms = kv.forms([shape.head_dim for shape in shapes])
    packed = [form for form in forms if form is not None]
    if not packed:
        return PlainCache(shapes, sequences, capacity)
    options: dict[str, Any] = {
        "window": kv.window,
        "sinks": kv.sinks,
        "attention_top": kv.attention_top,
        "values_rotated": kv.values_rotated,
    }
    if len(packed) < len(forms):
        return MixedCache(shapes, forms, sequences, **options)
    return PackedCache(shapes, packed, sequences, **options)
