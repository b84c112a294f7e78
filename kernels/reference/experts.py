"""The MLP of a mixture of experts in plain torch: what `experts` of `ops.Ops` means."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qoff.kernels.layout.qexperts import ExpertsMlp

_TURN = 16  # columns of gate, then as many of up


def activate(z: Tensor, activation: str) -> Tensor:
    """Return the gated activation of z [M, 2I], whose columns alternate 16 of gate, 16 of up.

    activation: "silu", "gelu" (by erf) or "gelu_tanh" of the gate times up; "clamped_swiglu" is
    that of gpt-oss, (up + 1) * gate * sigmoid(1.702 gate), gate at most 7 and up within -7..7.
    """
    gate, up = (x.reshape(len(z), -1) for x in z.view(len(z), -1, 2, _TURN).unbind(2))
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def experts(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, mlp: ExpertsMlp) -> Tensor:
    """Return the sum over t of topk_weights * (down @ f(gate_up @ x + bias) + bias), [M, H].

    x: [M, H], any float dtype, in which all is computed. topk_ids: int64 [M, T], the experts of
    each token; topk_weights: [M, T], how much each counts. Nothing is rounded.
    """
    y = torch.zeros_like(x)
    for e in topk_ids.unique().tolist():
        token, place = (topk_ids == e).nonzero(as_tuple=True)
        share = topk_weights[token, place, None].to(x.dtype)
        y.index_add_(0, token, share * expert(x[token], mlp, e))
    return y


def expert(x: Tensor, mlp: ExpertsMlp, e: int) -> Tensor:
    """The MLP of expert e on rows x [m, H]."""
    z = x @ mlp.gate_up.expert(e).dequantize(x.dtype).T
    if mlp.gate_up_bias is not None:
        z = z + mlp.gate_up_bias[e].to(x.dtype)
    z = activate(z, mlp.activation) @ mlp.down.expert(e).dequantize(x.dtype).T
    return z if mlp.down_bias is None else z + mlp.down_bias[e].to(x.dtype)
