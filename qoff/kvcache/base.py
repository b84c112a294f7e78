"""What a decoder needs of a cache, whatever its form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from qoff.kernels.layer_cache import LayerCache
from qoff.kernels.ragged import Ragged


class KVCache(ABC):
    """Keys and values of every layer for a number of sequences, in slots 0, 1, ...

    A forward pass calls `begin`; then for each layer `open`, the attention op, and `close`; then
    `end`. `lengths[i]` is how many tokens of sequence i are remembered.
    """

    lengths: list[int]

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""

    @abstractmethod
    def begin(self, ragged: Ragged) -> None:
        """Make room for the new tokens of a forward pass."""

    @abstractmethod
    def open(self, layer: int) -> LayerCache:
        """Return what the attention of a layer reads and appends to."""

    def close(self, layer: int) -> None:  # noqa: B027 - most caches have nothing to do
        """The layer's attention is done."""

    def end(self, ragged: Ragged) -> None:
        """All layers are done: the new tokens are remembered."""
        for span in ragged.spans:
            self.lengths[span.slot] += span.count

    @abstractmethod
    def select(self, sequences: Sequence[int]) -> None:
        """Keep the given sequences, in this order; one may be named more than once."""

    @abstractmethod
    def forget(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens of each sequence, or all it has."""
