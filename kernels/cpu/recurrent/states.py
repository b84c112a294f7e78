"""What all ops of recurrent layers on the CPU want of the states that they are given."""

from __future__ import annotations

from qoff.kernels.cpu.operands import check_dense, fail
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import SPAN_FIELDS, LayerStates, StateShape


def check_states(
    op: str, states: LayerStates, shape: StateShape, ragged: Ragged, tokens: int
) -> None:
    """Raise OpError unless they have this shape, and are of the sequences of these tokens."""
    slots = len(states.conv)
    check_dense(op, "conv states", states.conv, (slots, *shape.conv_shape))
    check_dense(op, "states", states.memory, (slots, *shape.memory_shape))
    if states.spans.shape != (len(ragged.spans), len(SPAN_FIELDS)) or ragged.tokens != tokens:
        fail(op, f"states are of {len(states.spans)} sequences, the pass has {len(ragged.spans)}")
