"""What layers with states compute in place of attention, or beside it: between projections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
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
from qoff.kvcache.drafted_states import DraftedLayerStates
from qoff.memory import Unit, Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass, LayerWorkspace, columns
from qoff.models.spec import DecoderSpec

from .attention import by_parts
from .linear import Linear, Steps, vector

Op = Callable[..., Tensor]  # of rows that matrices gave, states and a batch
Products = Generator[Unit, Weights, list[Tensor]]


class Recurrent(ABC):
    """From hidden states to what the output projection is given.

    MATRICES: that hidden states are multiplied by, and whether exactly; the first of its shape's
    projections.
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
        rows = yield from self._rows(run, weights, norm)
        out = columns(workspace.attended, shape.values, self._behind)
        op = self._op(weights)

        def mix(part: ForwardPass, states: Any, out: Tensor | None, *rows: Tensor) -> Tensor:
            if isinstance(states, DraftedLayerStates):
                return states.compute(partial(op, shape=shape), rows, out)
            return op(*rows, shape=shape, states=states, ragged=part.ragged, out=out)

        return run.kept(keep, by_parts(run, self._places[layer][0], mix, out, *rows))

    def _rows(self, run: ForwardPass, weights: Weights, norm: Norm | None) -> Products:
        """What the op is given of the new tokens."""
        found = list[Tensor]()
        for (name, exactly), into in zip(self.MATRICES.items(), self._places_of(run), strict=False):
            linear = self._linear[exactly]
            found.append((yield from linear(run, weights, name, out=into, norm=norm)))
        return found

    def _places_of(self, run: ForwardPass) -> list[Tensor | None]:
        """Where each projection goes."""
        widths, memory = self._shape.projections, cast(LayerWorkspace, run.workspace).qkv
        if memory is None:
            return [None] * len(widths)
        ends = accumulate(widths)
        return [memory[:, end - width : end] for width, end in zip(widths, ends, strict=True)]


class LinearAttention(Recurrent):
    """See `kernels.layout.delta`."""

    MATRICES = MappingProxyType({names.QKVZ: False, names.BA: True})

    def _op(self, weights: Weights) -> Op:
        small = (names.CONV, names.DECAY, names.DT_BIAS, names.DELTA_NORM)
        vectors = DeltaWeights(*_vectors(weights, small))
        return lambda qkv, z, b, a, **rest: self._ops.delta(qkv, z, b, a, vectors, **rest)

    def _rows(self, run: ForwardPass, weights: Weights, norm: Norm | None) -> Products:
        qkvz, ba = yield from super()._rows(run, weights, norm)
        shape = self._shape
        qkv, z = qkvz.split([shape.channels, shape.values], 1)
        return [qkv, z, *self._gates(ba)]

    def _gates(self, ba: Tensor) -> tuple[Tensor, Tensor]:
        """B, and a."""
        b, a = ba.split(self._shape.value_heads, 1)
        return b, a


class LinearAttentionApart(LinearAttention):
    """The same where b and a have a matrix each."""

    MATRICES = MappingProxyType({names.QKVZ: False, names.DELTA_B: True, names.DELTA_A: True})

    def _rows(self, run: ForwardPass, weights: Weights, norm: Norm | None) -> Products:
        qkvz, b, a = yield from Recurrent._rows(self, run, weights, norm)
        qkv, z = qkvz.split([self._shape.channels, self._shape.values], 1)
        return [qkv, z, b, a]


class KimiDelta(LinearAttention):
    """The same where each channel of keys forgets by itself."""

    MATRICES = MappingProxyType({names.QKVZ: False, names.KDA_FB: True})

    def _gates(self, ba: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ba.split([self._shape.decays, self._shape.value_heads], 1)
        return b, a


class KimiDeltaOfRank(LinearAttention):
    """The same where a and z are products of what hidden states become first."""

    MATRICES = MappingProxyType({names.KDA_QKV: False, names.KDA_FGB: True})

    def _rows(self, run: ForwardPass, weights: Weights, norm: Norm | None) -> Products:
        qkv, low = yield from Recurrent._rows(self, run, weights, norm)
        shape, found = self._shape, list[Tensor]()
        f, g, b = low.split([shape.rank, shape.rank, shape.value_heads], 1)
        for name, x, into in zip(
            (names.KDA_FORGET, names.KDA_GATE), (f, g), self._places_of(run)[2:], strict=True
        ):
            linear = self._linear[name == names.KDA_FORGET]
            x = x if self._ops.USES_OUT else x.contiguous()
            found.append((yield from linear(run, weights, name, x, out=into)))
        a, z = found
        return [qkv, z, b, a]


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
    if isinstance(shape, DeltaShape) and shape.apart:
        return LinearAttentionApart(shape, spec, ops)
    if isinstance(shape, DeltaShape) and shape.by_channel:
        return (KimiDeltaOfRank if shape.rank else KimiDelta)(shape, spec, ops)
    return None if shape is None else _KINDS[type(shape)](shape, spec, ops)


def _vectors(weights: Weights, of: Sequence[str]) -> list[Tensor]:
    return [cast(Tensor, weights[name]) for name in of]
