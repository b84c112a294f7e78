"""Several streams of hidden states (Gemma 3n): AltUp (arXiv 2301.13310), and LAuReL (2411.07501).

Between layers a row is S streams of `hidden_size` numbers, one after the other. A layer begins by
mixing them (`begin`); attention and MLP then compute from a copy of the first one, which is
`ForwardPass.active`, and what they found is spread over all of them (`correct`, `end`).
"""

from __future__ import annotations

from torch import Tensor

from qoff.kernels.layout.ending import Ending, Norm
from qoff.kernels.layout.streams import StreamRouter
from qoff.kernels.ops import Ops
from qoff.memory import Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass
from qoff.models.spec import DecoderSpec

from .linear import Linear, Steps, norm_of, vector

HALVED = 2**-0.5  # attention and LAuReL both begin from the active stream


class Streams:
    """Computes in place of the hidden states of a pass, [M, spec.hidden_width]."""

    def __init__(self, spec: DecoderSpec, ops: Ops) -> None:
        self._spec, self._ops, self._linear = spec, ops, Linear(ops)

    def split(self, run: ForwardPass, weights: Weights) -> Steps:
        """Before the first layer: make other streams of the first one, which is active then.

        They are projections of it that are as large.
        """
        run.active = self._ops.matched(self._stream(run.hidden, 0))
        for i in range(1, self._spec.stream_count):
            found = yield from self._linear(run, weights, names.SPLIT.format(i))
            self._ops.matched(found, run.active, out=self._stream(run.hidden, i))
        return run.active

    def begin(self, run: ForwardPass, weights: Weights, norm: Norm) -> Steps:
        """Mix the streams, and add LAuReL to the active one: attention's output is added to that.

        norm: of what LAuReL and attention are given.
        """
        hidden, ops = run.hidden, self._ops
        assert hidden is not None
        if run.active is None:
            run.active = hidden.new_empty(len(hidden), self._spec.hidden_size)
        mixing = _given(weights, f"{names.PREDICTION}.weight")
        ops.predict(hidden, self._router(weights), mixing, run.active)
        run.base = ops.norm(run.active, norm, residual=run.active)
        inner = yield from self._linear(run, weights, names.LAUREL_LEFT, norm=norm)
        end = Ending(post_norm=norm_of(self._spec, weights, names.LAUREL_NORM))
        return (
            yield from self._linear(
                run, weights, names.LAUREL_RIGHT, inner, residual=run.base, out=run.base, end=end
            )
        )

    def attended(self, run: ForwardPass) -> Tensor:
        """After attention: go on with what its output was added to."""
        assert run.base is not None
        run.active, run.base = run.base, None
        return run.active

    def correct(self, run: ForwardPass, weights: Weights) -> None:
        """Spread what the layer found over all streams; active is the first one, scaled."""
        assert run.hidden is not None
        mixing = _given(weights, f"{names.CORRECTION_OF_STREAMS}.weight")
        scale = _given(weights, f"{names.STREAM_SCALE}.weight")
        self._ops.correct(run.hidden, run.input, self._router(weights), mixing, scale)

    def end(self, layer: int, run: ForwardPass, weights: Weights) -> Steps:
        """Add what is active to all streams but the first; after the last layer join them."""
        for i in range(1, self._spec.stream_count):
            stream = self._stream(run.hidden, i)
            self._ops.matched(run.input, residual=stream, out=stream)
        if layer == self._spec.num_layers - 1:
            yield from self._join(run, weights)
        run.active = None
        return run.input

    def joined(self, hidden: Tensor) -> Tensor:
        """What the head is given of hidden states after the last layer, [M, hidden_size]."""
        return self._ops.matched(self._stream(hidden, 0))

    def _join(self, run: ForwardPass, weights: Weights) -> Steps:
        """The first stream becomes the mean of itself and what the others become, as large."""
        ops, count = self._ops, self._spec.stream_count
        total = run.input
        for i in range(1, count):
            x = ops.matched(self._stream(run.hidden, i))
            found = yield from self._linear(run, weights, names.JOINED.format(i), x)
            first, last = self._stream(run.hidden, 0), i == count - 1
            ops.matched(
                found,
                first,
                residual=first if i == 1 else total,
                sum_scale=1 / count if last else 1.0,
                out=first if last else total,
            )
        return total

    def _stream(self, hidden: Tensor | None, number: int) -> Tensor:
        assert hidden is not None
        size = self._spec.hidden_size
        return hidden[:, number * size : (number + 1) * size]

    def _router(self, weights: Weights) -> StreamRouter:
        norm, rows = (
            _given(weights, f"{name}.weight") for name in (names.STREAM_NORM, names.STREAM_ROUTER)
        )
        return StreamRouter(norm, self._spec.norm_eps, rows)


def _given(weights: Weights, name: str) -> Tensor:
    found = vector(weights, name)
    assert found is not None
    return found
