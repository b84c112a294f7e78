"""A KV cache of which some layers are packed and others are not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache.base import CachePass, KVCache

from .packed import PackedCache
from .plain import PlainCache


class MixedCache(KVCache):
    """A `PackedCache` of the layers that have a form, a `PlainCache` of those that have none."""

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        forms: Sequence[KVFormat | None],
        sequences: int,
        *,
        window: int = 64,
        sinks: int = 0,
        attention_top: float = 1.0,
        values_rotated: bool = False,
    ) -> None:
        packed = [form is not None for form in forms]
        self.packed = PackedCache(
            list(compress(shapes, packed)),
            [form for form in forms if form is not None],
            sequences,
            window=window,
            sinks=sinks,
            attention_top=attention_top,
            values_rotated=values_rotated,
        )
        self.plain = PlainCache(list(compress(shapes, [not p for p in packed])), sequences)
        self._parts: tuple[KVCache, KVCache] = (self.packed, self.plain)
        # Which part each layer is in, and its number there.
        self._where = [
            (0 if form is not None else 1, packed[:layer].count(form is not None))
            for layer, form in enumerate(forms)
        ]
        self.lengths = [0] * sequences

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def bytes_for(self, tokens: int) -> int:
        return sum(part.bytes_for(tokens) for part in self._parts)

    def reserve(self, tokens: int) -> None:
        for part in self._parts:
            part.reserve(tokens)

    def begin(self, ragged: Ragged) -> CachePass:
        passes = [part.begin(ragged) for part in self._parts]
        layers = [(passes[part], layer) for part, layer in self._where]
        return _MixedPass(self, ragged, passes, layers)

    def select(self, sequences: Sequence[int]) -> None:
        for part in self._parts:
            part.select(sequences)
        self.lengths = [self.lengths[i] for i in sequences]

    def forget(self, tokens: int) -> None:
        self.forget_each([tokens] * self.sequences)

    def forget_each(self, tokens: Sequence[int]) -> None:
        for part in self._parts:
            part.forget_each(tokens)
        self.lengths = list(self.plain.lengths)


class _MixedPass(CachePass):
    """layers: of each layer, the pass on its part and its number there."""

    def __init__(
        self,
        cache: MixedCache,
        ragged: Ragged,
        passes: Sequence[CachePass],
        layers: Sequence[tuple[CachePass, int]],
    ) -> None:
        self._cache, self._ragged = cache, ragged
        self._passes, self._layers = passes, layers

    def prefetch(self, layer: int) -> None:
        part, index = self._layers[layer]
        part.prefetch(index)

    def open(self, layer: int) -> LayerCache | DeviceLayerCache:
        part, index = self._layers[layer]
        return part.open(index)

    def close(self, layer: int) -> None:
        part, index = self._layers[layer]
        part.close(index)

    def end(self) -> None:
        for part in self._passes:
            part.end()
        self._cache.lengthen(self._ragged)

    def abandon(self) -> None:
        for part in self._passes:
            part.abandon()
