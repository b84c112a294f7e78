"""Which parameters of a transformers model the weights of a checkpoint for qoff's decoder are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from qoff.errors import UnsupportedModelError
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.models.layer_weights import layer_weights, outer_weights
from qoff.models.names import Weight, layer_prefix
from qoff.models.spec import DecoderSpec
from qoff.quant.rows import concat_rows, merge_rows, reordered, split_rows, whole_blocks

from .install import Packed, parameters_of

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")  # a matrix of one, in the names of a layer


@dataclass(frozen=True)
class Stored:
    """A weight of a checkpoint, by its full name there, and the parameters that its parts are.

    expert: it is the matrix of this one of the experts that its only parameter has.
    """

    name: str
    weight: Weight
    targets: tuple[str, ...]
    expert: int | None = None

    @property
    def packed(self) -> bool:
        """Whether it is a matrix, with codes; else a vector."""
        return self.weight.columns is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """As the checkpoint has it."""
        rows, columns = self.weight.rows, self.weight.columns
        return (rows,) if columns is None else (rows, columns)

    @property
    def of_experts(self) -> str:
        """A regular expression for the names of the matrices like this one, of all experts."""
        before, after = (re.escape(x) for x in self.name.split(f".experts.{self.expert}."))
        return rf"{before}\.experts\.\d+\.{after}"

    @property
    def orders(self) -> list[Tensor]:
        """For each part the rows of the weight that it has, int64."""
        parts = enumerate(self.weight.parts)
        return [self.weight.destination(i, 0, part.rows) for i, part in parts]

    def split(self, whole: QTensor | Tensor) -> dict[str, QTensor | Tensor]:
        """Return the parameters: rows of a quantized matrix, in its packing, or of a vector."""
        parts: dict[str, QTensor | Tensor] = {}
        orders = self.orders
        if isinstance(whole, QTensor) and any(whole_blocks(whole, o) is None for o in orders):
            whole = whole.to_packing("split32")  # once for all parts
        for part, target, order in zip(self.weight.parts, self.targets, orders, strict=True):
            if isinstance(whole, QTensor):
                own = reordered(whole, order)
                parts[target] = own if part.rows_each == 1 else merge_rows(own, part.rows_each)
            else:
                vector = reordered(whole, order) - part.plus
                parts[target] = vector if part.stored is None else vector.view(part.stored)
        return parts

    def join(self, parts: Mapping[str, Packed | Tensor]) -> QTensor | Tensor:
        """The other way round: the weight; a vector in float32."""
        found = [parts[target] for target in self.targets]
        if (each := self.weight.parts[0].rows_each) > 1:
            assert isinstance(found[0], QTensor)
            return split_rows(found[0], each)
        if self.expert is not None:
            assert isinstance(found[0], QExperts)
            return found[0].expert(self.expert)
        order = torch.cat(self.orders).argsort()
        matrices = [x for x in found if isinstance(x, QTensor)]
        if matrices:
            return reordered(concat_rows(matrices), order)
        plus = [part.plus for part in self.weight.parts]
        floats = [x.float().flatten() for x in found if isinstance(x, Tensor)]
        vectors = [x + p for x, p in zip(floats, plus, strict=True)]
        return torch.cat(vectors)[order.to(vectors[0].device)]


def stored_weights(spec: DecoderSpec, model: PreTrainedModel) -> list[list[Stored]]:
    """The weights of each layer, and at the end those outside, with the model's own names.

    Raises UnsupportedModelError for a parameter that the model does not have.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [x for x in mapping if isinstance(x, WeightRenaming)]
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    there = dict.fromkeys(parameters_of(model), True)

    def parameter(source: str, joining: list[WeightConverter]) -> str:
        """The parameter that a tensor is, or that it is joined to others for."""
        prefix = model.base_model_prefix
        name, _ = rename_source_key(source, renamings, joining, prefix, there)
        if name not in there:
            raise UnsupportedModelError(
                f"{source}: {type(model).__name__} has no such parameter; use qoff.load"
            )
        return str(name)

    def stored(prefix: str, weight: Weight) -> Stored:
        expert = _EXPERT.match(weight.name)
        if expert is None:
            targets = tuple(parameter(part.source, []) for part in weight.parts)
            return Stored(prefix + weight.name, weight, targets)
        target = parameter(weight.parts[0].source, converters)
        return Stored(prefix + weight.name, weight, (target,), int(expert[1]))

    units = [(layer_prefix(i), layer_weights(spec, i)) for i in range(spec.num_layers)]
    units.append(("", outer_weights(spec)))
    return [[stored(prefix, weight) for weight in weights] for prefix, weights in units]
