"""Gates of attention: those of each number, and those of heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.ending import GATES
from qoff.kernels.reference import ops as reference_ops
from tests.tolerances import assert_close


def _shares(activation: str, by: Tensor) -> Tensor:
    return {"": by, "sigmoid": torch.sigmoid(by), "softplus": F.softplus(by)}[activation]


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("gates", [1040, 65, 13, 5, 1])  # each of 1, 16, 80, 208, 1040 numbers
def test_a_gate_is_of_each_number_or_of_neighbours(gates: int, activation: str) -> None:
    x, by = torch.randn(3, 1100)[:, :1040], 9 * torch.randn(3, 2000)[:, :gates]
    kept, each = by.clone(), 1040 // gates
    wanted = x * _shares(activation, by).repeat_interleave(each, 1)
    assert_close(reference_ops.gate(x, by, activation=activation), wanted)
    assert_close(cpu.gate(x, by, activation=activation), wanted)
    assert_close(cpu.gate(x, by, activation=activation, out=x), wanted)
    assert torch.equal(by, kept)
    assert x.data_ptr() == cpu.gate(x, by, activation=activation, out=x).data_ptr()


def test_extreme_gates() -> None:
    x, by = torch.ones(1, 64), torch.tensor([[-1e4, -30.0, 30.0, 1e4]])
    for activation in ("sigmoid", "softplus"):
        wanted = _shares(activation, by).repeat_interleave(16, 1)
        assert_close(cpu.gate(x, by, activation=activation), wanted)
    for wide in (by.repeat_interleave(16, 1), by):
        assert cpu.gate(x, wide * float("nan")).isnan().all()


def test_bad_gates_are_refused() -> None:
    x, by = torch.randn(3, 96), torch.randn(3, 96)
    with pytest.raises(OpError, match="multiple of 16 numbers"):
        cpu.gate(x[:, :7], by[:, :7])
    with pytest.raises(OpError, match="a gate of each number or of a multiple of 16, not 4 of 96"):
        cpu.gate(x, by[:, :4])
    with pytest.raises(OpError, match="by must be float32"):
        cpu.gate(x, by[:2, :6])
    with pytest.raises(OpError, match="unknown activation 'tanh'; known are '', 'sigmoid'"):
        cpu.gate(x, by, activation="tanh")
