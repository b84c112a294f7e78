"""The weights of a checkpoint for transformers' modules: parameters under names of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import QuantEntry, WeightFile
from qoff.errors import UnsupportedModelError
from qoff.hf.packed.own_experts import QoffOwnExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.models.modules.structure import Matrix, Structure, UnitWeight, matrices_of

from .experts_form import activation_of, experts_form


@dataclass(frozen=True)
class OwnWeight:
    """A parameter, or the matrix of one of its experts; see `stored.Stored`."""

    name: str
    target: str
    shape: tuple[int, ...]
    packed: bool
    expert: int | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    @property
    def of_experts(self) -> str:
        return rf"{re.escape(self.target)}\.\d+"

    @property
    def orders(self) -> list[Tensor]:
        return [torch.arange(self.shape[0])]

    def split(self, whole: QTensor | Tensor) -> Mapping[str, QTensor | Tensor]:
        return {self.target: whole}


def own_weights(checkpoint: Checkpoint, model: PreTrainedModel) -> list[list[OwnWeight]]:
    """The weights of each layer, and at the end those outside.

    Raises UnsupportedModelError as `Structure.of` does, and for experts in an order of rows that
    qoff no longer gives a family.
    """
    structure = Structure.of(model)
    units = [
        [weight for place in structure.layer(i) for weight in _weights(place, place.name, file)]
        for i, file in enumerate(checkpoint.layers)
    ]
    outer = [*structure.outer(), *structure.tables]
    of_outer = (_weights(place, structure.stored_as(place), checkpoint.outer) for place in outer)
    units.append([weight for found in of_outer for weight in found])
    experts = (weight.target for unit in units for weight in unit if weight.expert is not None)
    if (first := next(experts, None)) is not None:
        module = model.get_submodule(first.rpartition(".")[0])
        form = experts_form(module, activation_of(model))
        if form is None or form.kind is not QoffOwnExperts:
            raise UnsupportedModelError(
                f"{checkpoint.path}: was made before qoff had a decoder for "
                f"{type(model).__name__}; convert the model again, or use qoff.load"
            )
    return units


def _weights(place: UnitWeight, name: str, file: WeightFile) -> Iterator[OwnWeight]:
    shape = tuple(place.tensor.shape)
    table = name != place.name
    parts = [Matrix(name, (shape[0], shape[1]))] if table else matrices_of(place)
    if parts and isinstance(file.weights.get(parts[0].name), QuantEntry):
        for part in parts:
            yield OwnWeight(part.name, place.name, part.shape, True, part.expert)
    else:
        yield OwnWeight(name, place.name, shape, False)
