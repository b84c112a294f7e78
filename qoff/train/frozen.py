"""Packed weights that stream from a qoff checkpoint while adapters beside them learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from qoff.hf.plugin.offloaded import OffloadedLayer


class FrozenWeights:
    """The layers of a model that `from_pretrained` streams; others have nothing to wait for."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers: dict[int, OffloadedLayer] = {}
        for i, layer in enumerate(layers):
            if isinstance(layer.forward, OffloadedLayer):
                self._layers[i] = layer.forward
        self._held: set[int] = set()

    @property
    def bytes_read(self) -> int:
        """From disk, since the model was loaded."""
        stores = {id(layer.store): layer.store for layer in self._layers.values()}
        return sum(store.stats.bytes_read for store in stores.values())

    def forward_of(self, i: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """What computes a layer that is held."""
        layer = self._layers.get(i)
        return own if layer is None else layer.own

    def has(self, i: int) -> bool:
        """Whether a layer streams."""
        return i in self._layers

    def order(self) -> None:
        """Have all layers read ahead forward and then in reverse."""
        for layer in list(self._layers.values())[:1]:
            units = [one.unit for one in self._layers.values()]
            layer.store.follow([*units, *reversed(units)])

    def hold(self, i: int) -> None:
        """Wait for a layer's weights, until `release`."""
        if i in self._layers:
            self._layers[i].hold()
            self._held.add(i)

    def release(self, i: int) -> None:
        """Give a layer's weights back, if it has any."""
        if i in self._held:
            self._held.remove(i)
            self._layers[i].give_back()

    def end(self) -> None:
        """Give all back."""
        for i in list(self._held):
            self.release(i)
