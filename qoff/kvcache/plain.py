"""An uncompressed float32 KV cache in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.kernels.heads import KEYS_PER_VECTOR, HeadShape, cache_shapes

_GROWTH_TOKENS = 256


class PlainCache:
    """K and V of every layer for a fixed number of sequences; grows as they do.

    `lengths[i]` is how many tokens of sequence i are remembered. `keys[layer]` and `values[layer]`
    are laid out as `qoff.kernels.heads` says.
    """

    def __init__(self, shapes: Sequence[HeadShape], sequences: int, capacity: int = 0) -> None:
        self._shapes = tuple(shapes)
        self.lengths = [0] * sequences
        self.capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._allocate(sequences, max(capacity, KEYS_PER_VECTOR))

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in every sequence; what is remembered stays."""
        if tokens <= self.capacity:
            return
        grown = self.capacity + max(_GROWTH_TOKENS, self.capacity // 2)
        self._rebuild(range(self.sequences), max(tokens, grown))

    def select(self, sequences: Sequence[int]) -> None:
        """Keep the given sequences, in this order; one may be named more than once."""
        self._rebuild(sequences, self.capacity)

    def forget(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens of each sequence, or all it has."""
        self.lengths = [max(0, n - tokens) for n in self.lengths]

    def advance(self, counts: Sequence[int]) -> None:
        """Count tokens that a forward pass has appended to each sequence."""
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

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
