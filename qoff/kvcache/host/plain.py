"""An uncompressed float32 KV cache in host memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from weakref import proxy

import torch
from torch import Tensor

from qoff.kernels.layout.heads import KEYS_PER_VECTOR, HeadShape, cache_shapes
from qoff.kernels.layout.layer_cache import RUN_TOKENS, LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.steady import SteadyMemory
from qoff.kvcache.base import CachePass, KVCache

from .recent import RecentTokens

_GROWTH_TOKENS = 256


class PlainCache(KVCache):
    """K and V of every layer for a fixed number of sequences; grows as they do.

    `keys[layer]` and `values[layer]` are laid out as `qoff.kernels.layout.heads` says.
    """

    def __init__(self, shapes: Sequence[HeadShape], sequences: int, capacity: int = 0) -> None:
        self._shapes = tuple(shapes)
        self.steady = SteadyMemory()
        self.lengths = [0] * sequences
        self.capacity = 0
        self.keys = [torch.empty(cache_shapes(sequences, s, 0)[0]) for s in self._shapes]
        self.values = [torch.empty(cache_shapes(sequences, s, 0)[1]) for s in self._shapes]
        self._rebuild(range(sequences), max(capacity, KEYS_PER_VECTOR))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def bytes_for(self, tokens: int) -> int:
        # A layer is copied where sequences move to other rows, and where there is more room.
        sizes = [
            RecentTokens.bytes_for([shape], self.sequences, max(tokens, self.capacity))
            for shape in self._shapes
        ]
        return sum(sizes) + max(sizes)

    def reserve(self, tokens: int) -> None:
        if tokens > self.capacity:
            self._rebuild(range(self.sequences), tokens)

    def begin(self, ragged: Ragged) -> CachePass:
        self.ended = None
        tokens = ragged.longest + 1
        if tokens > self.capacity:
            self.reserve(max(tokens, self.capacity + max(_GROWTH_TOKENS, self.capacity // 2)))
        return _PlainPass(self, ragged)

    def select(self, sequences: Sequence[int]) -> None:
        self._rebuild(sequences, self.capacity)

    def forget_each(self, tokens: Sequence[int]) -> None:
        self.ended = None
        self.lengths = [max(0, n - t) for n, t in zip(self.lengths, tokens, strict=True)]

    def _rebuild(self, sequences: Sequence[int], capacity: int) -> None:
        """Keep the given sequences, with room for `capacity` tokens; a layer at a time."""
        self.ended = None
        kept = list(sequences)
        self.lengths = [self.lengths[i] for i in kept]
        self.capacity = -(-capacity // KEYS_PER_VECTOR) * KEYS_PER_VECTOR
        longest = max(self.lengths, default=0)
        blocks = -(-longest // KEYS_PER_VECTOR)
        for layer, shape in enumerate(self._shapes):
            keys, values = map(torch.empty, cache_shapes(len(kept), shape, self.capacity))
            keys[:, :, :blocks] = self.keys[layer][kept, :, :blocks]
            values[:, :, :longest] = self.values[layer][kept, :, :longest]
            self.keys[layer], self.values[layer] = keys, values


class _PlainPass(CachePass):
    def __init__(self, cache: PlainCache, ragged: Ragged) -> None:
        self._cache: PlainCache = proxy(cache)  # which keeps the pass when it has ended
        self.ragged = ragged.kept_in(cache.steady) if ragged.is_decode else ragged

    in_place = True

    def open(self, layer: int) -> LayerCache:
        cache, ragged = self._cache, self.ragged
        return LayerCache(cache.keys[layer], cache.values[layer], ragged.positions, ragged.longest)

    def replay_key(self) -> Hashable | None:
        cache, ragged = self._cache, self.ragged
        if not ragged.is_decode:
            return None
        memory = (ragged.positions, *cache.keys, *cache.values)
        sizes = (ragged.tokens, ragged.longest // RUN_TOKENS, cache.capacity)
        return (*sizes, *(part.data_ptr() for part in memory))

    def end(self) -> None:
        self._cache.lengthen(self.ragged)
        self._cache.ended = self if self.ragged.is_decode else None

    def steps_ahead(self, ragged: Ragged) -> int:
        cache, longest = self._cache, ragged.longest
        if not ragged.goes_on(self.ragged, cache.lengths):
            return 0
        return min(cache.capacity - longest, -longest % RUN_TOKENS)

    def counters(self) -> list[Tensor]:
        return [self.ragged.positions]

    def advance(self, steps: int) -> None:
        self._cache.lengthen(self.ragged, steps)
