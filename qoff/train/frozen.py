"""Packed weights that stream from a qoff checkpoint while adapters beside them learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from qoff.hf.packed.module import CodesModule
from qoff.hf.plugin.offloaded import OffloadedLayer
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor


class _Bound:
    """Has a module compute with the same matrix whenever its codes are there, wherever they lie.

    What autograd saves in the forward pass thus finds them in the backward, in another slot.
    """

    def __init__(self, module: CodesModule) -> None:
        self._module = module
        self._matrix: QTensor | QExperts | None = None

    def bind(self) -> None:
        """The module has its codes."""
        module = self._module
        here: QTensor | QExperts = module.__dict__["_packed"]
        if self._matrix is None:
            codes, scale_min = here.codes.detach(), here.scale_min.detach()
            self._matrix = replace(here, codes=codes, scale_min=scale_min)
        found = self._matrix
        found.codes.data, found.scale_min.data = here.codes, here.scale_min
        module._buffers["codes"], module._buffers["scale_min"] = found.codes, found.scale_min
        module.__dict__["_packed"] = found

    def leave(self) -> None:
        """The codes are given back."""
        if self._matrix is not None:
            for x in (self._matrix.codes, self._matrix.scale_min):
                x.data = x.new_empty(0)


class FrozenWeights:
    """The layers of a model that `from_pretrained` streams; others have nothing to wait for."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers: dict[int, OffloadedLayer] = {}
        self._bound: dict[int, list[_Bound]] = {}
        for i, layer in enumerate(layers):
            if isinstance(layer.forward, OffloadedLayer):
                self._layers[i] = layer.forward
                without = (m for m in layer.modules() if isinstance(m, CodesModule))
                self._bound[i] = [_Bound(m) for m in without if m.codes.is_meta]
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
            for matrix in self._bound[i]:
                matrix.bind()

    def release(self, i: int) -> None:
        """Give a layer's weights back, if it has any."""
        if i in self._held:
            self._held.remove(i)
            for matrix in self._bound[i]:
                matrix.leave()
            self._layers[i].give_back()

    def end(self) -> None:
        """Give all back."""
        for i in list(self._held):
            self.release(i)
