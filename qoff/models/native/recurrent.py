"""What layers with states compute in place of attention, or beside it: between projections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, ClassVar, cast

from torch import Tensor

from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import StateShape
from qoff.kernels.ops import Ops, exact
from qoff.memory import Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass, columns
from qoff.models.spec import DecoderSpec

from .attention import by_parts
from .linear import Linear, Steps, vector

Op = Callable[..., Tensor]  # of rows that matrices gave, states and a batch


class Recurrent(ABC):
    """From hidden states to what the output projection is given.

    MATRICES: that hidden states are multiplied by, and whether exactly.
    """

    MATRICES: ClassVar[Mapping[str, bool]]

    def __init__(self, shape: Any, spec: DecoderSpec, ops: Ops) -> None:
        """shape: of a layer."""
        self._shape, self._ops, self._places = shape, ops, spec.cache_places
        self._behind = spec.q_rows if spec.has_both else 0  # where attention's outputs are
        self._linear = {False: Linear(ops), True: Linear(exact(ops))}

    @abstractmethod
    def _op(self, weights: Weights) -> Op:
        """The op of a layer with these weights; called with rows, shape, states and a batch."""

    def steps(
        self,
        layer: int,
        run: ForwardPass,
        weights: Weights,
        norm: Norm | None,
        keep: Sequence[int] | None,
    ) -> Steps:
        """What the op gives, [M, values]; the states are those after the new tokens.

        keep: see `Attention.steps`.
        """
        shape, workspace = self._shape, run.workspace
        assert workspace is not None
        rows = list[Tensor]()
        ends = accumulate(shape.projections)
        for (name, exactly), width, end in zip(
            self.MATRICES.items(), shape.projections, ends, strict=True
        ):
            into = None if workspace.qkv is None else workspace.qkv[:, end - width : end]
            linear = self._linear[exactly]
            rows.append((yield from linear(run, weights, name, out=into, norm=norm)))
        out = columns(workspace.attended, shape.values, self._behind)
        op = self._op(weights)

        def mix(part: ForwardPass, states: Any, out: Tensor | None, *rows: Tensor) -> Tensor:
            return op(*rows, shape=shape, states=states, ragged=part.ragged, out=out)

        return run.kept(keep, by_parts(run, self._places[layer][0], mix, out, *rows))


class LinearAttention(Recurrent):
    """See `kernels.layout.delta`."""

    MATRICES = MappingProxyType({names.QKVZ: False, names.BA: True})

    def _op(self, weights: Weights) -> Op:
        small = (names.CONV, names.DECAY, names.DT_BIAS, names.DELTA_NORM)
        vectors = DeltaWeights(*_vectors(weights, small))
        return lambda qkvz, ba, **rest: self._ops.delta(qkvz, ba, vectors, **rest)


class ShortConv(Recurrent):
    """See `kernels.layout.short_conv`."""

    MATRICES = MappingProxyType({names.SHORT_IN: False})

    def _op(self, weights: Weights) -> Op:
        (conv,) = _vectors(weights, (names.SHORT_CONV,))
        return lambda bcx, **rest: self._ops.short_conv(bcx, conv, **rest)


class Mamba(Recurrent):
    """See `kernels.layout.mamba`."""

    MATRICES = MappingProxyType({names.MAMBA_IN: False})

    def _op(self, weights: Weights) -> Op:
        conv, decay, dt_bias, skip = _vectors(
            weights, (names.MAMBA_CONV, names.MAMBA_DECAY, names.MAMBA_DT_BIAS, names.MAMBA_SKIP)
        )
        bias, norm = (vector(weights, x) for x in (names.MAMBA_CONV_BIAS, names.MAMBA_NORM))
        vectors = MambaWeights(conv, bias, decay, dt_bias, skip, norm)
        return lambda x, **rest: self._ops.mamba(x, vectors, **rest)


_KINDS: Mapping[type[StateShape], type[Recurrent]] = MappingProxyType(
    {DeltaShape: LinearAttention, ShortConvShape: ShortConv, MambaShape: Mamba}
)


def recurrent_of(spec: DecoderSpec, ops: Ops) -> Recurrent | None:
    """What a model's layers with states compute; None: it has none."""
    shape = spec.state_shape
    return None if shape is None else _KINDS[type(shape)](shape, spec, ops)


def _vectors(weights: Weights, of: Sequence[str]) -> list[Tensor]:
    return [cast(Tensor, weights[name]) for name in of]
