"""Solving the matrices of a model that runs through transformers' modules, on a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from qoff.kernels.ops import ops_for
from qoff.memory import Weights
from qoff.memory.plan import local_names
from qoff.models.modules.binding import WeightBinder, bind_embedding
from qoff.models.modules.current import current
from qoff.models.modules.decoder import wait_for_weights
from qoff.models.modules.linear import Bound, Multiply
from qoff.models.modules.structure import Structure, buffers_from_config
from qoff.quant import QTensor

from .solving import Unsolved


class ModuleCalibration:
    """Takes a text through a model's own code, which stops before each layer for its weights.

    structure: of the model without weights, which this replaces modules of. outer: what is outside
    of layers, embedding and head, by its names in the model. rows: of the embedding, and of those
    of layers where there are any, from ids. quantized: of each layer, the names of the matrices
    that are. ids: int64 [texts, tokens], cut to the model's positions. Memory holds what the tokens
    take in a layer.
    """

    def __init__(
        self,
        structure: Structure,
        outer: Mapping[str, Tensor],
        rows: Sequence[Callable[[Tensor], Tensor]],
        quantized: list[set[str]],
        ids: Tensor,
    ) -> None:
        from qoff.models.modules.passes import ModulePass

        model, count = structure.model, len(structure.layers)
        config = model.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None)
        ids = ids[:, :limit]
        buffers_from_config(model)
        for place in structure.outer():
            place.put(outer[place.name])
        bind_embedding(model.get_input_embeddings(), rows[0])
        if structure.layer_table is not None:
            bind_embedding(cast(nn.Embedding, structure.layer_table.module), rows[1])
        multiply = _Solver(ops_for(torch.device("cpu")))
        for i, layer in enumerate(structure.layers):
            wait_for_weights(layer, WeightBinder(structure, i, quantized[i], multiply))
        _stop_behind(structure.layers[-1], count)
        known = signature(model.forward).parameters.keys() & {"use_cache", "return_dict"}
        options = {name: name == "return_dict" for name in known}
        work = ModulePass(lambda: model(input_ids=ids, **options), torch.empty(2, 0))
        self._steps = work.steps()
        self._wanted: object = None  # a unit

    @torch.no_grad()
    def layer(self, index: int, given: Mapping[str, QTensor | Tensor | Unsolved]) -> None:
        """Solve what is unsolved of a layer's weights, by their full names. Layers go in order."""
        if not index:
            self._wanted = next(self._steps)
        assert self._wanted == index
        local = local_names(index, list(given))
        weights = {local[name]: x for name, x in given.items()}
        self._wanted = self._steps.send(cast(Weights, weights))

    def close(self) -> None:
        """Leave the model's code."""
        self._steps.close()


class _Solver(Multiply):
    """Solves the matrices that it multiplies by."""

    def __call__(self, x: Tensor, matrix: Bound | Unsolved, bias: Tensor | None) -> Tensor:
        if isinstance(matrix, Unsolved):
            matrix = matrix.solved(x.reshape(-1, x.shape[-1]).contiguous())
        return super().__call__(x, matrix, bias)


def _stop_behind(layer: Any, unit: int) -> None:
    """Let the pass wait once more when a layer is done, for a unit that never comes."""
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        current().fetch(unit)
        return found

    layer.forward = forward
