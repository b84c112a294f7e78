"""What short convolutions compute in place of attention: see `kernels.layout.short_conv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.ops import Ops
from qoff.memory import Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass
from qoff.models.spec import DecoderSpec

from .attention import by_parts
from .linear import Linear, Steps


class ShortConv:
    """From hidden states to what the output projection is given."""

    OUT = names.SHORT_OUT

    def __init__(self, spec: DecoderSpec, ops: Ops) -> None:
        assert isinstance(spec.state_shape, ShortConvShape)
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
        """The convolution times c, [M, channels]; the states are those after the new tokens.

        keep: see `Attention.steps`.
        """
        shape, workspace = self._shape, run.workspace
        assert workspace is not None
        bcx = out = None
        if workspace.qkv is not None:
            bcx = workspace.qkv[:, : shape.width]
        if workspace.attended is not None:
            out = workspace.attended[:, : shape.channels]
        bcx = yield from self._linear(run, weights, names.SHORT_IN, out=bcx, norm=norm)
        conv = cast(Tensor, weights[names.SHORT_CONV])

        def convolve(part: ForwardPass, states: Any, out: Tensor | None, bcx: Tensor) -> Tensor:
            return self._ops.short_conv(bcx, conv, shape, states, part.ragged, out=out)

        return run.kept(keep, by_parts(run, self._places[layer][-1], convolve, out, bcx))
