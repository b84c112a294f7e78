"""Triton's Mamba 2 in the interpreter against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.mamba import MambaShape
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import LayerStates
from qoff.kernels.reference.mamba import mamba as reference
from tests.kernels.recurrent_states import SLOTS, device_states, passes, spans_of, states_of
from tests.kernels.test_mamba import FACTORS, inputs, weights_of
from tests.tolerances import RELATIVE_RMS, assert_close
from tests.triton_module import triton_module

op = triton_module("recurrent.mamba")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (MambaShape(4, 16, 2, 16, 4), torch.bfloat16),
        (MambaShape(2, 48, 1, 48, 3), torch.float16),
        (MambaShape(1, 128, 1, 32, 2), torch.float16),
        (MambaShape(4, 16, 2, 16, 3, **FACTORS), torch.float16),
        (MambaShape(1, 16, 1, 144, 2), torch.bfloat16),
    ],
    ids=str,
)
def test_passes_of_any_lengths_are_the_references(shape: MambaShape, dtype: torch.dtype) -> None:
    """In the last pass, by the tables of a graph, there is a row of no token, too."""
    weights, lengths = weights_of(shape, biased=shape.taps > 2), {2: 0, 0: 0, 3: 0}
    weights = replace(weights, decay=weights.decay - 2)  # some heads remember for long
    wanted, found, last = states_of(shape), states_of(shape), Tensor()
    each = (67, 1, 3), (2, 40, 0), (0, 1, 5), (1, 1, 1)
    ways = True, True, False, None
    for (ragged, steady), chunked in zip(passes(lengths, each), ways, strict=True):
        x = inputs(shape, ragged.tokens).to(dtype)
        before = LayerStates(*wanted, spans_of(ragged))
        expected = reference(x.double(), weights, shape, before, ragged)
        states = device_states(found, ragged, steady)
        given = torch.full((len(states.step.positions), shape.width + 3), torch.nan).to(dtype)
        given[: len(x), :-3] = x
        last = op.mamba(given[:, :-3], weights, shape, states, chunked=chunked)
        tolerance = 2 * RELATIVE_RMS[dtype]
        assert_close(last[: len(x)].double(), expected, tolerance=tolerance)
        assert not last[len(x) :].any()
        for here, there in zip(wanted, found, strict=True):
            assert_close(there[list(lengths)], here[list(lengths)], tolerance=tolerance)
    assert len(last) == SLOTS
    assert all(kept[1].isnan().all() for kept in found)  # a slot of nobody's


@pytest.mark.parametrize("chunked", [True, False])
def test_what_heads_give_may_be_large(chunked: bool) -> None:
    """Beyond what float16 holds, before the norm; the state is within it."""
    shape, ragged = MambaShape(2, 32, 1, 64, 4), Ragged.of([70], [0])
    weights = weights_of(shape)
    weights = replace(weights, decay=weights.decay - 5)  # remembers for long
    x = (4 * inputs(shape, 70)).half()
    wanted, found = states_of(shape), states_of(shape)
    before = LayerStates(*wanted, torch.tensor([[0, 70, 0]]))
    expected = reference(x.double(), weights, shape, before, ragged)
    y = op.mamba(x, weights, shape, device_states(found, ragged), chunked=chunked)
    assert wanted[1][0].abs().max() * 64 > 65504
    assert_close(y.double(), expected, tolerance=4 * RELATIVE_RMS[torch.float16])


def test_wrong_operands_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, ragged = MambaShape(4, 16, 2, 16, 4), Ragged.of([1] * SLOTS, [0] * SLOTS)
    states, weights = device_states(states_of(shape), ragged), weights_of(shape)
    x = inputs(shape, SLOTS).half()
    with pytest.raises(OpError, match="zxbcdt is"):
        op.mamba(x[:3], weights, shape, states)
    with pytest.raises(OpError, match="conv_bias is"):
        op.mamba(x, replace(weights, conv_bias=weights.norm), shape, states)
    with pytest.raises(OpError, match="states is"):
        op.mamba(x, weights, shape, replace(states, conv=states.conv[:3]))
    monkeypatch.setattr(op.Gpu, "of", lambda device: op.Gpu(75, 4))
    with pytest.raises(OpError, match="tensor cores"):
        op.mamba(x, weights, shape, states, chunked=True)
