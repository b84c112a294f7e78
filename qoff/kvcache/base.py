"""What a decoder needs of a cache, whatever its form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from qoff.errors import ArgumentError
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged


class CachePass(ABC):
    """One forward pass on a cache: what its attention reads, and where its new tokens go.

    Each layer is opened, attended to and closed; then the pass ends, or is abandoned.
    """

    def prefetch(self, layer: int) -> None:  # noqa: B027 - most caches have everything at hand
        """Start to bring what `open` will want, if there is room for it."""

    @abstractmethod
    def open(self, layer: int) -> LayerCache | DeviceLayerCache:
        """Return what the attention of a layer reads and appends to."""

    def close(self, layer: int) -> None:  # noqa: B027 - most caches have nothing to do
        """The layer's attention is done."""

    @abstractmethod
    def end(self) -> None:
        """All layers are done: the new tokens are remembered."""

    def abandon(self) -> None:  # noqa: B027 - most caches hold nothing until the end
        """Give back what was taken, unless the pass has ended.

        What the cache holds is worthless if layers are done.
        """


class KVCache(ABC):
    """Keys and values of every layer for a number of sequences, in slots 0, 1, ...

    `lengths[i]` is how many tokens of sequence i are remembered.
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
    def bytes_for(self, tokens: int) -> int:
        """The most bytes allocated while room is made for `tokens` tokens of each sequence."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens of each sequence, and not for more."""

    @abstractmethod
    def begin(self, ragged: Ragged) -> CachePass:
        """Make room for the new tokens of a forward pass."""

    def lengthen(self, ragged: Ragged) -> None:
        """Count the new tokens of a pass that ends."""
        for span in ragged.spans:
            self.lengths[span.slot] += span.count

    @abstractmethod
    def select(self, sequences: Sequence[int]) -> None:
        """Keep the given sequences, in this order; one may be named more than once."""

    @abstractmethod
    def forget(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens of each sequence, or all it has."""

    def forget_each(self, tokens: Sequence[int]) -> None:
        """Forget the newest `tokens[i]` tokens of sequence i, or all it has.

        Raises ArgumentError where a cache can only forget as many of every sequence.
        """
        most = max(tokens)
        if any(n != min(most, length) for n, length in zip(tokens, self.lengths, strict=True)):
            raise ArgumentError(
                f"a {type(self).__name__} forgets as many tokens of every sequence, "
                f"not {list(tokens)}"
            )
        self.forget(most)
