"""Solving the matrices of a model on a text that goes through it, layer after layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qoff.models.names import Weight
from qoff.quant import QTensor

from .builder import Builder, with_uniform_experts
from .layerwise import Layerwise, check_ids
from .solving import Moments, Unsolved, results
from .unconverted import Unconverted


class Calibration:
    """Solves the matrices of a native model on what goes into them, one after another.

    The texts are there twice. The first half of all rows goes through matrices that were solved,
    the second through the source's, at whose outputs each matrix is aimed: so it makes up for what
    those before it lost. What is not solved is the same in both. ids: int64 [texts, tokens]. Memory
    holds one layer as it is written, what `compensated` takes for one matrix and one more [K, K],
    and what the tokens take in a layer, twice. Raises as `Layerwise` does.
    """

    def __init__(self, model: Unconverted, builder: Builder, ids: Tensor) -> None:
        self._builder, self._units = builder, model.units
        check_ids(ids, model.spec.vocab_size)
        self._run = Layerwise(model.spec, torch.cat((ids, ids)))
        tables = {w.name: w for w in model.units[-1][1]}
        self._hidden = self._run.embedded(lambda name, ids: builder.rows(tables[name], ids))

    @torch.no_grad()
    def layer(self, index: int) -> dict[str, QTensor | Tensor]:
        """Return a layer's weights by their full names, as they are written. Layers go in order."""
        prefix, weights = self._units[index]
        builder, moments = self._builder, Moments()
        given: dict[str, QTensor | Tensor | Unsolved] = {
            w.name: self._unsolved(prefix, w, moments)
            if builder.calibrates(prefix, w)
            else builder.build(prefix, w)
            for w in weights
        }
        self._hidden = self._run.run(index, given, self._hidden)
        found = results(given, builder.quant.packing)
        return with_uniform_experts({f"{prefix}{name}": x for name, x in found.items()})

    def _unsolved(self, prefix: str, weight: Weight, moments: Moments) -> Unsolved:
        builder = self._builder
        assert weight.columns is not None
        return Unsolved(
            f"{prefix}{weight.name}",
            (weight.rows, weight.columns),
            builder.note(prefix, weight),
            builder.quant.scale_dtype,
            moments,
            partial(builder.floats, weight),
            twice=True,
        )
