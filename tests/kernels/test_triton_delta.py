"""Triton's linear attention in the interpreter against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kernels.layout.states import LayerStates
from qoff.kernels.reference import delta as reference
from tests.kernels.recurrent_states import device_states, spans_of, states_of
from tests.kernels.test_delta import inputs, weights
from tests.tolerances import RELATIVE_RMS, assert_close
from tests.triton_module import triton_module

op = triton_module("recurrent.delta")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)
SHAPES = [
    *(DeltaShape(2, 4, 16, 16, 4), DeltaShape(1, 2, 48, 96, 5), DeltaShape(1, 1, 128, 128, 2)),
    DeltaShape(2, 2, 32, 32, 4, by_channel=True),
    DeltaShape(1, 2, 48, 64, 2, by_channel=True),
    DeltaShape(2, 2, 32, 32, 2, by_channel=True, floor=-5.0),
    DeltaShape(1, 2, 48, 96, 4, learns=2.0),
]


class Run:
    """A layer's passes by the reference and by Triton, each with states of its own."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, slots: list[int]) -> None:
        self.shape, self.dtype, self.slots = shape, dtype, slots
        self.weights = self._tame(weights(shape))
        self.lengths = dict.fromkeys(slots, 0)
        self.wanted, self.found = states_of(shape), states_of(shape)

    def _tame(self, given: DeltaWeights) -> DeltaWeights:
        """Some heads remember for long."""
        bias = given.dt_bias.clone()
        bias[::2] = -6
        return replace(given, dt_bias=bias)

    def forward(self, counts: list[int], chunked: bool | None, steady: bool = False) -> Tensor:
        """New tokens of the slots, in their order; returns what Triton made of them."""
        spans, start = [], 0
        for slot, count in zip(self.slots, counts, strict=True):
            if count:
                spans.append(Span(slot, start, count, self.lengths[slot]))
                start += count
                self.lengths[slot] += count
        ragged = Ragged(tuple(spans))
        rows = [x.to(self.dtype) for x in inputs(self.shape, ragged.tokens)]
        before = LayerStates(*self.wanted, spans_of(ragged))
        wanted = reference.delta(
            *(x.double() for x in rows), self.weights, self.shape, before, ragged
        )
        states = device_states(self.found, ragged, steady)
        tokens = len(states.step.positions)
        given = []
        for x in rows:
            wider = torch.full((tokens, x.shape[1] + 3), torch.nan).to(self.dtype)
            wider[: len(x), :-3] = x
            given.append(wider[:, :-3])
        found = op.delta(*given, self.weights, self.shape, states, chunked=chunked)
        tolerance = 2 * RELATIVE_RMS[self.dtype]
        assert_close(found[: len(rows[0])].double(), wanted, tolerance=tolerance)
        for here, there in zip(self.wanted, self.found, strict=True):
            assert_close(there[self.slots], here[self.slots], tolerance=tolerance)
        return found


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((SHAPES[0], torch.bfloat16), (SHAPES[1], torch.float16), (SHAPES[2], torch.float16)),
        *((SHAPES[3], torch.bfloat16), (SHAPES[4], torch.float16), (SHAPES[5], torch.float16)),
        (SHAPES[6], torch.float16),
    ],
    ids=str,
)
def test_passes_of_any_lengths_are_the_references(shape: DeltaShape, dtype: torch.dtype) -> None:
    run = Run(shape, dtype, [2, 0, 3])  # not in the order of the slots
    run.forward([67, 1, 3], chunked=True)
    run.forward([2, 70, 0], chunked=True)
    run.forward([1, 2, 5], chunked=False)
    run.forward([1, 1, 1], chunked=None)
    assert all(kept[1].isnan().all() for kept in run.found)  # a slot of nobody's


def test_other_gpus_than_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op.Gpu, "of", lambda device: op.Gpu(80, 4))
    run = Run(DeltaShape(1, 2, 16, 16, 4), torch.float16, [2, 0])
    run.forward([67, 1], chunked=True)
    run.forward([2, 65], chunked=True)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)
def test_a_step_of_some_slots_leaves_the_others_and_rows_of_no_token(shape: DeltaShape) -> None:
    run = Run(shape, torch.float16, [0, 1, 3])
    run.forward([3, 1, 2], chunked=None)
    others = [kept[1].clone() for kept in run.found]
    run.slots, run.lengths[2] = [0, 2, 3], 0
    found = run.forward([1, 1, 1], chunked=None, steady=True)
    assert len(found) == 4
    assert not found[3].any()
    for kept, other in zip(run.found, others, strict=True):
        assert torch.equal(kept[1], other)


@pytest.mark.parametrize("by_channel", [False, True])
def test_many_tokens_that_are_alike_and_never_forgotten(by_channel: bool) -> None:
    """The worst of systems: every correction depends on all before it."""
    shape = DeltaShape(1, 1, 32, 32, 2, by_channel=by_channel)
    run = Run(shape, torch.float16, [1])
    run.weights = DeltaWeights(
        run.weights.conv, torch.full((1,), -20.0), torch.zeros(shape.decays), run.weights.norm
    )
    qkv, z = (torch.randn(1, width).expand(130, -1) for width in (shape.channels, shape.values))
    ragged = Ragged((Span(1, 0, 130, 0),))
    before = LayerStates(*run.wanted, torch.tensor([[0, 130, 1]]))
    rows = [x + torch.randn_like(x) / 50 for x in (qkv, z)]
    rows += [torch.full((130, width), 9.0) for width in (1, shape.decays)]
    rows = [x.half() for x in rows]
    wanted = reference.delta(*(x.double() for x in rows), run.weights, shape, before, ragged)
    states = device_states(run.found, ragged)
    found = op.delta(*rows, run.weights, shape, states, chunked=True)
    assert_close(found.double(), wanted, tolerance=1e-2)


def test_wrong_operands_are_refused() -> None:
    shape, ragged = SHAPES[0], Ragged.of([1, 1, 1, 1], [0] * 4)
    states, given = device_states(states_of(shape), ragged), weights(shape)
    qkv, *rows = (x.half() for x in inputs(shape, 4))
    with pytest.raises(OpError, match="qkv is"):
        op.delta(qkv[:3], *rows, given, shape, states)
    with pytest.raises(OpError, match="a is"):
        op.delta(qkv, *rows[:2], rows[2].float(), given, shape, states)
    with pytest.raises(OpError, match="states is"):
        op.delta(qkv, *rows, given, shape, replace(states, memory=states.memory[:3]))
