"""An uncompressed float32 KV cache in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.kernels.layout.heads import KEYS_PER_VECTOR, HeadShape, cache_shapes
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache.base import CachePass, KVCache

_GROWTH_TOKENS = 256


class PlainCache(KVCache):
    """K and V of every layer for a fixed number of sequences; grows as they do.

    `keys[layer]` and `values[layer]` are laid out as `qoff.kernels.layout.heads` says.
    """

    def __init__(self, shapes: Sequence[HeadShape], sequences: int, capacity: int = 0) -> None:
        self._shapes = tuple(shapes)
        self.lengths = [0] * sequences
        self.capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._allocate(sequences, max(capacity, KEYS_PER_VECTOR))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def begin(self, ragged: Ragged) -> CachePass:
        self.reserve(ragged.longest + 1)
        return _PlainPass(self, ragged)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in every sequence; what is remembered stays."""
        if tokens <= self.capacity:
            return
        grown = self.capacity + max(_GROWTH_TOKENS, self.capacity // 2)
        self._rebuild(range(self.sequences), max(tokens, grown))

    def select(self, sequences: Sequence[int]) -> None:
        self._rebuild(sequences, self.capacity)

    def forget(self, tokens: int) -> None:
        self.forget_each([tokens] * self.sequences)

    def forget_each(self, tokens: Sequence[int]) -> None:
        self.lengths = [max(0, n - t) for n, t in zip(self.lengths, tokens, strict=True)]

    def _allocate(self, sequences: int, capacity: int) -> None:
        self.capacity = -(-capacity // KEYS_PER_VECTOR) * KEYS_PER_VECTOR
        both = [cache_shapes(sequences, shape, self.capacity) for shape in self._shapes]
        self.keys = [torch.empty(keys) for keys, _ in both]
        self.values = [torch.empty(values) for _, values in both]

    def _rebuild(self, sequences: Sequence[int], capacity: int) -> None:
        old_keys, old_values, old_lengths = self.keys, self.values, self.lengths
        kept = list(sequences)
        self.lengths = [old_lengths[i] for i in kept]
        longest = max(self.lengths, default=0)
        blocks = -(-longest // KEYS_PER_VECTOR)
        self._allocate(len(kept), capacity)
        for layer in range(len(self._shapes)):
            self.keys[layer][:, :, :blocks] = old_keys[layer][kept, :, :blocks]
            self.values[layer][:, :, :longest] = old_values[layer][kept, :, :longest]
            old_keys[layer] = old_values[layer] = torch.empty(0)


class _PlainPass(CachePass):
    def __init__(self, cache: PlainCache, ragged: Ragged) -> None:
        self._cache, self._ragged = cache, ragged

    def open(self, layer: int) -> LayerCache:
        cache, ragged = self._cache, self._ragged
        return LayerCache(cache.keys[layer], cache.values[layer], ragged.positions, ragged.longest)

    def end(self) -> None:
        self._cache.lengthen(self._ragged)
