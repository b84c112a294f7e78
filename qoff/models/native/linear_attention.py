"""What layers with linear attention compute in place of attention: see `kernels.layout.delta`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.ending import Norm
from qoff.kernels.ops import Ops, exact
from qoff.memory import Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass
from qoff.models.spec import DecoderSpec

from .attention import by_parts
from .linear import Linear, Steps


class LinearAttention:
    """From hidden states to what the output projection is given."""

    OUT = names.OUT

    def __init__(self, spec: DecoderSpec, ops: Ops) -> None:
        assert isinstance(spec.state_shape, DeltaShape)
        self._places = spec.cache_places
        self._shape, self._ops = spec.state_shape, ops
        self._linear, self._exact_linear = Linear(ops), Linear(exact(ops))

    def steps(
        self,
        layer: int,
        run: ForwardPass,
        weights: Weights,
        norm: Norm | None,
        keep: Sequence[int] | None,
    ) -> Steps:
        """Outputs of all heads, [M, values]; the states are those after the new tokens.

        keep: see `Attention.steps`.
        """
        shape, workspace = self._shape, run.workspace
        assert workspace is not None
        heads = 2 * shape.value_heads
        qkvz = ba = out = None
        if workspace.qkv is not None:
            qkvz = workspace.qkv[:, : shape.width]
            ba = workspace.qkv[:, shape.width : shape.width + heads]
        if workspace.attended is not None:
            out = workspace.attended[:, : shape.values]
        qkvz = yield from self._linear(run, weights, names.QKVZ, out=qkvz, norm=norm)
        ba = yield from self._exact_linear(run, weights, names.BA, out=ba, norm=norm)
        small = (names.CONV, names.DECAY, names.DT_BIAS, names.DELTA_NORM)
        vectors = DeltaWeights(*(cast(Tensor, weights[name]) for name in small))

        def attend(
            part: ForwardPass, states: Any, out: Tensor | None, qkvz: Tensor, ba: Tensor
        ) -> Tensor:
            return self._ops.delta(qkvz, ba, vectors, shape, states, part.ragged, out=out)

        return run.kept(keep, by_parts(run, self._places[layer][-1], attend, out, qkvz, ba))
