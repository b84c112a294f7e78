"""Puts a layer's weights into its modules while the layer is computed."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qoff.memory import EXPERTS, Weights
from qoff.memory.plan import local_names

from .linear import Multiply, QuantizedExperts, QuantizedGroups, QuantizedLinear
from .structure import Structure, groups_of, is_conv1d, is_float, matrices_of


class WeightBinder:
    """Puts the weights of one layer into its modules, and takes them back.

    quantized: the names in the layer's file that are. Modules whose matrices are quantized are
    replaced; parameters become plain attributes that are set while they are bound.
    """

    def __init__(
        self, structure: Structure, index: int, quantized: Container[str], multiply: Multiply
    ) -> None:
        self.index = index
        # Where each goes, and what the store calls it; of experts, the matrices of all.
        self._places: list[tuple[dict[str, Any], str, str | list[str]]] = []
        self._dtype = multiply.dtype
        self._dtypes: dict[str, torch.dtype] = {}  # that modules want what is not quantized in
        linears: dict[int, QuantizedLinear] = {}  # by the module that they replace
        experts: dict[int, QuantizedExperts] = {}
        attributes: list[tuple[nn.Module, str]] = []
        for place in structure.layer(index):
            module, attribute, parts = place.module, place.attribute, matrices_of(place)
            if is_float(parts, quantized):
                module = linears.get(id(module), module)
                attributes.append((module, attribute))
                key = self._key(place.name)
                self._dtypes[key] = place.tensor.dtype
                self._places.append((module.__dict__, attribute, key))
            elif parts[0].expert is None:
                groups = groups_of(module)
                linear = (
                    QuantizedGroups(module, multiply, groups)
                    if groups
                    else QuantizedLinear(module, multiply, is_conv1d(module))
                )
                structure.model.set_submodule(place.name.removesuffix(f".{attribute}"), linear)
                linears[id(module)] = linear
                self._places.append((linear.__dict__, "bound", self._key(place.name)))
            else:
                if id(module) not in experts:
                    module.forward = experts[id(module)] = QuantizedExperts(module, multiply, index)
                attributes.append((module, attribute))
                keys = [self._key(part.name) for part in parts]
                self._places.append((experts[id(module)].bound, attribute, keys))
        for module, attribute in attributes:
            _as_attribute(module, attribute)

    def values(self, weights: Weights) -> list[Any]:
        """What `bind` sets, floats as the modules want them; valid as long as those weights."""
        found: list[Any] = []
        for _, _, key in self._places:
            if isinstance(key, list):
                streamed = weights.get(EXPERTS)
                found.append([weights[one] for one in key] if streamed is None else streamed)
                continue
            value = weights[key]
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value.to(self._dtypes.get(key, self._dtype))
            found.append(value)
        return found

    def bind(self, values: Sequence[Any]) -> None:
        """Set all weights."""
        for (into, attribute, _), value in zip(self._places, values, strict=True):
            into[attribute] = value

    def unbind(self) -> None:
        """Let go of them."""
        for into, attribute, _ in self._places:
            into[attribute] = None

    def _key(self, name: str) -> str:
        """What the store calls a weight of this layer."""
        return local_names(self.index, [name])[name]


def bind_embedding(module: nn.Embedding, rows: Callable[[Tensor], Tensor]) -> None:
    """Let an embedding find its rows by `rows`, from ids int64 [U] to float32 [U, K].

    Its own code still runs, as some scale what they looked up: on a table of these rows alone.
    """
    dtype = module.weight.dtype
    _as_attribute(module, "weight")
    own = module.forward
    module.padding_idx = None  # a row of the whole table

    def forward(ids: Tensor) -> Tensor:
        unique, inverse = torch.unique(ids, return_inverse=True)
        module.__dict__["weight"] = rows(unique.cpu()).to(dtype)
        try:
            return own(inverse)
        finally:
            module.__dict__["weight"] = None

    module.__dict__["forward"] = forward


def _as_attribute(module: nn.Module, name: str) -> None:
    """Turn a parameter or buffer into a plain attribute without a value."""
    for kind in (module._parameters, module._buffers):
        kind.pop(name, None)
    module.__dict__[name] = None
