"""Which parameters of a transformers model the weights of a qoff checkpoint are, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import QuantEntry, TensorEntry
from qoff.errors import FormatError, UnsupportedModelError
from qoff.kernels.qtensor import QTensor
from qoff.models.names import Weight, layer_prefix, layer_weights, outer_weights
from qoff.models.spec import DecoderSpec
from qoff.quant.rows import concat_rows, reordered, whole_blocks

from .install import packed_modules


@dataclass(frozen=True)
class Stored:
    """A weight of a checkpoint, by its full name there, and the parameters that its parts are."""

    name: str
    weight: Weight
    targets: tuple[str, ...]

    def split(self, whole: QTensor | Tensor) -> dict[str, QTensor | Tensor]:
        """Return the parameters: rows of a quantized matrix, in its packing, or of a vector."""
        parts: dict[str, QTensor | Tensor] = {}
        orders = [self.weight.destination(i, 0, p.rows) for i, p in enumerate(self.weight.parts)]
        if isinstance(whole, QTensor) and any(whole_blocks(whole, o) is None for o in orders):
            whole = whole.to_packing("half32")  # once for all parts
        for part, target, order in zip(self.weight.parts, self.targets, orders, strict=True):
            if isinstance(whole, QTensor):
                parts[target] = reordered(whole, order)
            else:
                parts[target] = reordered(whole, order) - part.plus
        return parts

    def join(self, parts: Mapping[str, QTensor | Tensor]) -> QTensor | Tensor:
        """The other way round: the weight; a vector in float32."""
        found = [parts[target] for target in self.targets]
        orders = [self.weight.destination(i, 0, p.rows) for i, p in enumerate(self.weight.parts)]
        order = torch.cat(orders).argsort()
        matrices = [x for x in found if isinstance(x, QTensor)]
        if matrices:
            return reordered(concat_rows(matrices), order)
        plus = [part.plus for part in self.weight.parts]
        vectors = [x.float() + p for x, p in zip(found, plus, strict=True) if isinstance(x, Tensor)]
        return torch.cat(vectors)[order.to(vectors[0].device)]


def stored_weights(spec: DecoderSpec, model: PreTrainedModel) -> list[list[Stored]]:
    """The weights of each layer, and at the end those outside, with the model's own names.

    Raises UnsupportedModelError for experts, and for a parameter that the model does not have.
    """
    if spec.experts is not None:
        raise UnsupportedModelError(
            "config.json: models with experts cannot be loaded by from_pretrained; use qoff.load"
        )
    called = _Names(model)
    units = [(layer_prefix(i), layer_weights(spec, i)) for i in range(spec.num_layers)]
    units.append(("", outer_weights(spec)))
    return [
        [
            Stored(prefix + w.name, w, tuple(called.parameter(p.source) for p in w.parts))
            for w in weights
        ]
        for prefix, weights in units
    ]


def check_stored(checkpoint: Checkpoint, units: list[list[Stored]]) -> None:
    """Raise FormatError unless a checkpoint holds these weights, of their shapes, and no others."""
    for file, unit in zip(checkpoint.files, units, strict=True):
        if {stored.name for stored in unit} != set(file.weights):
            name = min({stored.name for stored in unit} ^ set(file.weights))
            where = "is there, but not" if name in file.weights else "is not there, but"
            raise FormatError(
                f"{file.path}: {name!r} {where} asked for by config.json; convert the model again"
            )
        for stored in unit:
            entry, weight = file.weights[stored.name], stored.weight
            wanted = (weight.rows,) if weight.columns is None else (weight.rows, weight.columns)
            kind = TensorEntry if weight.columns is None else QuantEntry
            if not isinstance(entry, kind) or entry.shape != wanted:
                raise FormatError(
                    f"{file.path}: {stored.name!r} has shape {entry.shape}, but config.json wants "
                    f"{wanted}; convert the model again"
                )


class _Names:
    """What transformers' modules call the tensors of a family's checkpoints."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._renamings = [
            x for x in get_model_conversion_mapping(model) if isinstance(x, WeightRenaming)
        ]
        self._there = {name: True for name, _ in model.named_parameters(remove_duplicate=False)}
        self._there.update({f"{name}.weight": True for name in packed_modules(model)})

    def parameter(self, source: str) -> str:
        prefix = self._model.base_model_prefix
        name, _ = rename_source_key(source, self._renamings, [], prefix, self._there)
        if name not in self._there:
            raise UnsupportedModelError(
                f"{source}: {type(self._model).__name__} has no such parameter; use qoff.load"
            )
        return str(name)
