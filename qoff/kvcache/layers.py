"""What all that is read of a cache layer by layer has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

_Opened = TypeVar("_Opened", covariant=True)


class LayerView(ABC, Generic[_Opened]):
    """What a forward pass takes of a cache: each layer is opened, attended to and closed."""

    def prefetch(self, layer: int) -> None:
        """Start to bring what `open` will want, if there is room for it."""

    @abstractmethod
    def open(self, layer: int) -> _Opened:
        """Return what the attention of a layer works with, until `close`."""

    def close(self, layer: int) -> None:
        """The layer's attention is done."""

    def abandon(self) -> None:
        """Give back what was taken: the pass will not go on.

        What the cache holds is worthless if layers are done.
        """
