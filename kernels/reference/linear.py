"""What the linear op does before and behind the product, in plain torch; float32 inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qoff.kernels.layout.ending import XIELU, Ending, Norm, Xielu

from .elementwise import rms_norm, wide

TURN = 16  # columns of gate, then as many of up


def normalized(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm or LayerNorm of rows of x [..., K], rounded once; of float64 in float64."""
    if not norm.centered:
        return rms_norm(x, norm.weight, norm.eps, norm.scale)
    rows = wide(x)
    bias = None if norm.bias is None else norm.bias.to(rows.dtype)
    weight = norm.weight.to(rows.dtype) * norm.scale
    return F.layer_norm(rows, x.shape[-1:], weight, bias, norm.eps).to(x.dtype)


def activated(name: str, z: Tensor) -> Tensor:
    """An activation of `ending.ACTIVATIONS`.

    "gelu" is by erf, "gelu_tanh" its approximation; "relu2" is the square of "relu".
    """
    if name in ("silu", "relu"):
        return F.silu(z) if name == "silu" else F.relu(z)
    if name == "relu2":
        return F.relu(z).square()
    return F.gelu(z, approximate="tanh" if name == "gelu_tanh" else "none")


def xielu(z: Tensor, by: Xielu) -> Tensor:
    """xIELU, see `Xielu`."""
    low = z.clamp(max=0)  # so that gradients of what is not taken are finite
    negative = by.alpha_n * (torch.expm1(low.clamp(max=by.eps)) - low)
    return torch.where(z > 0, by.alpha_p * z * z, negative) + by.beta * z


def gate_and_up(z: Tensor) -> tuple[Tensor, Tensor]:
    """Views [M, I / 16, 16] of z [M, 2I], whose columns alternate 16 of gate, 16 of up."""
    gate, up = z.view(len(z), -1, 2, TURN).unbind(2)
    return gate, up


def times(gate: Tensor, up: Tensor, limit: float = 0.0) -> Tensor:
    """The product of an activated gate and up, both [M, I / 16, 16], as [M, I]; see `Ending`."""
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * up).flatten(1)


def ended(z: Tensor, end: Ending, residual: Tensor | None = None) -> Tensor:
    """What `end` makes of a product z, and of a residual like the result."""
    if end.gated:
        gate, up = gate_and_up(z)
        z = times(activated(end.activation, gate), up, end.limit)
    elif end.activation == XIELU:
        assert end.xielu is not None
        z = xielu(z, end.xielu)
    elif end.activation:
        z = activated(end.activation, z)
    if end.post_norm is not None:
        z = normalized(z, end.post_norm)
    if end.score is not None:
        z = z * torch.sigmoid(end.score)
    if end.scale != 1:
        z = z * end.scale
    if end.soft_cap:
        z = end.soft_cap * torch.tanh(z / end.soft_cap)
    if residual is not None:
        z = z + residual
    if end.sum_scale != 1:
        z = z * end.sum_scale
    return z if end.sum_norm is None else normalized(z, end.sum_norm)
