"""What Mamba 2 computes in place of attention: see `kernels.layout.mamba`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.ops import Ops
from qoff.memory import Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass
from qoff.models.spec import DecoderSpec

from .attention import by_parts
from .linear import Linear, Steps, vector


class Mamba:
    """From hidden states to what the output projection is given."""

    OUT = names.MAMBA_OUT

    def __init__(self, spec: DecoderSpec, ops: Ops) -> None:
        assert isinstance(spec.state_shape, MambaShape)
        self._places = spec.cache_places
        self._shape, self._ops, self._linear = spec.state_shape, ops, Linear(ops)

    def steps(
        self,
        layer: int,
        run: ForwardPass,
        weights: Weights,
        norm: Norm | None,
        keep: Sequence[int] | None,
    ) -> Steps:
        """Outputs of all heads, normalized, [M, values]; the states are those after the new tokens.

        keep: see `Attention.steps`.
        """
        shape, workspace = self._shape, run.workspace
        assert workspace is not None
        x = out = None
        if workspace.qkv is not None:
            x = workspace.qkv[:, : shape.width]
        if workspace.attended is not None:
            out = workspace.attended[:, : shape.values]
        x = yield from self._linear(run, weights, names.MAMBA_IN, out=x, norm=norm)
        small = (names.MAMBA_DECAY, names.MAMBA_DT_BIAS, names.MAMBA_SKIP, names.MAMBA_NORM)
        conv = cast(Tensor, weights[names.MAMBA_CONV])
        bias = vector(weights, names.MAMBA_CONV_BIAS)
        vectors = MambaWeights(conv, bias, *(cast(Tensor, weights[name]) for name in small))

        def mix(part: ForwardPass, states: Any, out: Tensor | None, x: Tensor) -> Tensor:
            return self._ops.mamba(x, vectors, shape, states, part.ragged, out=out)

        return run.kept(keep, by_parts(run, self._places[layer][-1], mix, out, x))
