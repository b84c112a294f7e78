"""Embeddings of layers (Gemma 3n and 4): numbers of a token that each layer is given on its own.

A table has `width` numbers of each token for every layer; the first layer adds a projection of its
own input to them, for all layers (`begin`). A layer ends with a projection of its hidden states to
so many numbers, an activation, their product with these, and a projection back (`end`).
"""

from __future__ import annotations

from collections.abc import Callable

from qoff.kernels.layout.ending import Ending, Norm
from qoff.kernels.ops import Ops
from qoff.memory import Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass
from qoff.models.spec import DecoderSpec
from qoff.models.spec_parts import PerLayerSpec

from .linear import Linear, Rows, Steps, norm_of, vector

HALVED = 2**-0.5  # both parts of what a layer is given have a variance of 1


def table_scale(spec: PerLayerSpec) -> float:
    """What rows of the table are multiplied by before the rest is added."""
    return HALVED * spec.width**0.5


class PerLayer:
    """Computes with `ForwardPass.per_layer`: rows of the table at first, times `table_scale`."""

    def __init__(
        self,
        spec: DecoderSpec,
        of: PerLayerSpec,
        ops: Ops,
        together: Callable[[int, Weights], int],
    ) -> None:
        """together: how many of some tokens go through a matrix at once."""
        self._spec, self._width, self._ops = spec, of.width, ops
        self._linear, self._together = Linear(ops), together

    def begin(self, run: ForwardPass, weights: Weights) -> Steps:
        """Add norm(projection of the embedded tokens) to the table's rows, for all layers."""
        assert run.per_layer is not None
        weight = vector(weights, f"{names.CONTEXT_NORM}.weight")
        assert weight is not None
        # The projection is divided by the root of the hidden size, which only eps would see.
        norm = Norm(weight, self._spec.norm_eps * self._spec.hidden_size)
        rows, count = run.per_layer, len(run.input)
        step = self._together(count, weights)
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            found = yield from self._linear(run, weights, names.CONTEXT, part=part)
            heads, table = (x.view(-1, self._width) for x in (found, rows[part]))
            self._ops.norm(heads, norm, scale=HALVED, residual=table, out=table)
        return rows

    def end(
        self,
        layer: int,
        run: ForwardPass,
        weights: Weights,
        scale: float,
        residual: Rows | None = "hidden",
    ) -> Steps:
        """hidden = scale * (hidden + norm(projection(act(gate(hidden)) * the layer's numbers))).

        residual: what is in place of hidden in the sum; None: nothing.
        """
        assert run.per_layer is not None
        own = run.per_layer[:, layer * self._width : (layer + 1) * self._width]
        activation = Ending(self._spec.activation)
        gates = yield from self._linear(run, weights, names.LAYER_GATE, end=activation)
        inner = self._ops.gate(gates, own, activation="", out=gates)
        norm = norm_of(self._spec, weights, names.LAYER_NORM)
        end = Ending(post_norm=norm, sum_scale=scale)
        return (
            yield from self._linear(
                run, weights, names.LAYER_PROJECTION, inner,
                residual=residual, out="hidden", end=end,
            )
        )  # fmt: skip
