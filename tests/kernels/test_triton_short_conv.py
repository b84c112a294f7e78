"""Triton's short convolution in the interpreter against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import LayerStates
from qoff.kernels.reference.short_conv import short_conv as reference
from tests.kernels.recurrent_states import SLOTS, device_states, passes, spans_of, states_of
from tests.kernels.test_short_conv import inputs, weight_of
from tests.tolerances import RELATIVE_RMS, assert_close
from tests.triton_module import triton_module

op = triton_module("recurrent.short_conv")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (ShortConvShape(48, 3), torch.float16),
        (ShortConvShape(144, 2), torch.bfloat16),
        (ShortConvShape(16, 20), torch.float16),  # a past of more tokens than a tile
    ],
    ids=str,
)
def test_passes_of_any_lengths_are_the_references(
    shape: ShortConvShape, dtype: torch.dtype
) -> None:
    """In the last pass, by the tables of a graph, there is a row of no token, too."""
    weight, lengths = weight_of(shape), {2: 0, 0: 0, 3: 0}  # not in the order of the slots
    wanted, found = states_of(shape), states_of(shape)
    each = (67, 1, 3), (2, 40, 0), (0, 1, 5), (1, 1, 1)
    for ragged, steady in passes(lengths, each):
        bcx = inputs(shape, ragged.tokens).to(dtype)
        before = LayerStates(*wanted, spans_of(ragged))
        expected = reference(bcx.double(), weight, shape, before, ragged)
        states = device_states(found, ragged, steady)
        given = torch.full((len(states.step.positions), shape.width + 3), torch.nan).to(dtype)
        given[: len(bcx), :-3] = bcx
        out = torch.full((len(given), shape.channels), torch.nan).to(dtype)
        op.short_conv(given[:, :-3], weight, shape, states, out=out)
        tolerance = 2 * RELATIVE_RMS[dtype]
        assert_close(out[: len(bcx)].double(), expected, tolerance=tolerance)
        assert not out[len(bcx) :].any()
        assert_close(found[0][list(lengths)], wanted[0][list(lengths)], tolerance=tolerance)
    assert len(out) == SLOTS
    assert found[0][1].isnan().all()  # a slot of nobody's


def test_wrong_operands_are_refused() -> None:
    shape, ragged = ShortConvShape(48, 3), Ragged.of([1] * SLOTS, [0] * SLOTS)
    states, weight = device_states(states_of(shape), ragged), weight_of(shape)
    bcx = inputs(shape, SLOTS).half()
    with pytest.raises(OpError, match="bcx is"):
        op.short_conv(bcx[:3], weight, shape, states)
    with pytest.raises(OpError, match="weight is"):
        op.short_conv(bcx, weight[1:], shape, states)
    with pytest.raises(OpError, match="states is"):
        op.short_conv(bcx, weight, shape, replace(states, conv=states.conv[:3]))
