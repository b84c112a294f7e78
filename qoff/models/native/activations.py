"""Activation functions of MLPs that are not fused with a matmul."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from qoff.models.names import ROW_BLOCK


def activate(name: str, x: Tensor) -> Tensor:
    """An activation of `spec.ACTIVATIONS` of each value."""
    if name == "silu":
        return F.silu(x)
    if name == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def gate(name: str, gate_up: Tensor) -> Tensor:
    """act(gate) * up; columns of gate_up [M, 2 I] alternate 16 of gate, 16 of up: [M, I]."""
    gate_, up = gate_up.view(len(gate_up), -1, 2, ROW_BLOCK).unbind(2)
    return (activate(name, gate_) * up).reshape(len(gate_up), -1)
