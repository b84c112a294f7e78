"""Norms and activations that are not fused with a matmul."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from qoff.memory import Weights
from qoff.models.names import ROW_BLOCK
from qoff.models.spec import DecoderSpec

from .linear import vector


def normalized(spec: DecoderSpec, x: Tensor, weights: Weights, module: str) -> Tensor:
    """RMSNorm or LayerNorm of rows of x [M, N], as the spec says, by the weights of a module."""
    weight, bias = (vector(weights, f"{module}.{name}") for name in ("weight", "bias"))
    assert weight is not None
    if spec.norm == "rms":
        return rms_normalized(x, weight, spec.norm_eps)
    bias = None if bias is None else bias.to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias, spec.norm_eps)


def rms_normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows of x [..., N], computed in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


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
