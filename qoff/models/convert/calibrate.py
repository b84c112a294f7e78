"""Solving the matrices of a model on what goes into them, layer after layer.

The inputs of a layer are those behind layers that are quantized already, so that each layer makes
up for what those before it lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.memory.plan import EMBEDDING
from qoff.quant import QTensor
from qoff.quant.compensated import compensated

from .builder import Builder
from .layerwise import Layerwise
from .unconverted import Unconverted


class Calibration:
    """Texts on their way through a model that is being converted.

    ids: int64 [texts, tokens]. Besides one layer in float32 and as it is written, memory holds the
    hidden states of all tokens twice, and the second moments of the inputs of each matrix of a
    layer, [K, K] float32; of one of them a few times over. Raises as `Layerwise` does.
    """

    def __init__(self, model: Unconverted, builder: Builder, ids: Tensor) -> None:
        self._builder, self._units = builder, model.units
        self._run = Layerwise(model.spec, ids)
        _, outer = model.units[-1]
        table = next(w for w in outer if w.name == EMBEDDING)
        self._hidden = self._run.embedded(builder.floats(table))

    @torch.no_grad()
    def layer(self, index: int) -> dict[str, QTensor | Tensor]:
        """Return a layer's weights by their full names, as they are written. Layers go in order."""
        prefix, weights = self._units[index]
        builder = self._builder
        solved = [w for w in weights if builder.calibrates(prefix, w)]
        built: dict[str, QTensor | Tensor] = {
            w.name: builder.floats(w) if w in solved else builder.build(prefix, w) for w in weights
        }
        moments = self._moments(index, built, [w.name for w in solved])
        for weight in solved:
            values = built[weight.name]
            assert isinstance(values, Tensor)
            built[weight.name] = compensated(
                values,
                moments.pop(weight.name),
                builder.note(prefix, weight),
                scale_dtype=builder.quant.scale_dtype,
                name=f"{prefix}{weight.name}",
            )
        self._hidden = self._run.run(index, built, self._hidden)
        packing = builder.quant.packing
        return {
            f"{prefix}{name}": x.to_packing(packing) if isinstance(x, QTensor) else x
            for name, x in built.items()
        }

    def _moments(
        self, index: int, weights: dict[str, QTensor | Tensor], matrices: list[str]
    ) -> dict[str, Tensor]:
        """The mean of x x^T over the inputs of each of some matrices, float32 [K, K]."""
        called = {id(weights[name]): name for name in matrices}
        total: dict[str, Tensor] = {}

        def seen(found: object, x: Tensor, _: Tensor) -> None:
            name = called.get(id(found))
            if name is not None:
                into = total.setdefault(name, x.new_zeros(x.shape[1], x.shape[1]))
                into.addmm_(x.T, x)

        self._run.run(index, weights, self._hidden, seen)
        return {name: sums.div_(len(self._hidden)) for name, sums in total.items()}
