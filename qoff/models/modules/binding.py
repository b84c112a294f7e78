"""Puts a layer's weights into its modules while the layer is computed."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from qoff.memory import Weights
from qoff.memory.plan import local_names

from .configs import DTYPE
from .experts import QuantizedExperts
from .linear import Multiply, QuantizedLinear
from .quantizable import Matrix, is_conv1d
from .structure import Structure, UnitWeight


class WeightBinder:
    """Puts the weights of one layer into its modules, and takes them back.

    quantized: the names in the layer's file that are. Modules whose matrices are quantized are
    replaced; parameters become plain attributes that are set while they are bound.
    """

    def __init__(
        self,
        structure: Structure,
        index: int,
        quantized: Container[str],
        matrices: Mapping[str, list[Matrix]],
        multiply: Multiply,
    ) -> None:
        self.index = index
        self._structure, self._multiply = structure, multiply
        self._floats: list[tuple[str, nn.Module, str]] = []  # key, module, attribute
        self._linears: list[tuple[str, QuantizedLinear]] = []
        self._experts: list[tuple[list[str], QuantizedExperts, str]] = []
        self._forwards: dict[int, QuantizedExperts] = {}  # by module
        replaced: dict[int, nn.Module] = {}
        for place in structure.layer(index):
            parts = matrices.get(place.name, [])
            keys = [self._key(part.name) for part in parts]
            if not parts or parts[0].name not in quantized:
                module = replaced.get(id(place.module), place.module)
                self._floats.append((self._key(place.name), module, place.attribute))
            elif parts[0].expert is None:
                linear = self._replace(place)
                replaced[id(place.module)] = linear
                self._linears.append((keys[0], linear))
            else:
                self._experts.append((keys, self._forward_of(place.module), place.attribute))
        for _, module, attribute in self._floats:
            _as_attribute(module, attribute)
        for _, forward, attribute in self._experts:
            _as_attribute(forward.module, attribute)

    def bind(self, weights: Weights) -> None:
        """Set all weights; valid as long as those are."""
        for key, module, attribute in self._floats:
            value = cast(Tensor, weights[key])
            module.__dict__[attribute] = value.to(DTYPE) if value.is_floating_point() else value
        for key, linear in self._linears:
            linear.bound = weights[key]
        for keys, forward, attribute in self._experts:
            forward.bound[attribute] = [weights[key] for key in keys]

    def unbind(self) -> None:
        """Let go of them."""
        for _, module, attribute in self._floats:
            module.__dict__[attribute] = None
        for _, linear in self._linears:
            linear.bound = None
        for _, forward, _ in self._experts:
            forward.bound.clear()

    def _key(self, name: str) -> str:
        """What the store calls a weight of this layer."""
        return local_names(self.index, [name])[name]

    def _replace(self, place: UnitWeight) -> QuantizedLinear:
        path = place.name.rpartition(".")[0]
        parent, _, child = path.rpartition(".")
        linear = QuantizedLinear(place.module, self._multiply, is_conv1d(place.module))
        setattr(self._structure.model.get_submodule(parent), child, linear)
        return linear

    def _forward_of(self, module: nn.Module) -> QuantizedExperts:
        forward = self._forwards.get(id(module))
        if forward is None:
            forward = self._forwards[id(module)] = QuantizedExperts(module, self._multiply)
            module.forward = forward
        return forward


def bind_embedding(module: nn.Embedding, rows: Callable[[Tensor], Tensor]) -> None:
    """Let an embedding find its rows by `rows`, from ids int64 [U] to float32 [U, K].

    Its own code still runs, as some scale what they looked up: on a table of these rows alone.
    """
    _as_attribute(module, "weight")
    own = module.forward
    module.padding_idx = None  # a row of the whole table

    def forward(ids: Tensor) -> Tensor:
        unique, inverse = torch.unique(ids, return_inverse=True)
        module.__dict__["weight"] = rows(unique).to(DTYPE)
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
