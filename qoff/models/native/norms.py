"""The norms of a decoder that are not fused with a matmul."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from qoff.memory import Weights
from qoff.models.spec import DecoderSpec

from .linear import vector


def normalized(spec: DecoderSpec, x: Tensor, weights: Weights, module: str) -> Tensor:
    """RMSNorm or LayerNorm of rows of x [M, N], as the spec says, by the weights of a module."""
    weight, bias = vector(weights, f"{module}.weight"), vector(weights, f"{module}.bias")
    assert weight is not None
    if spec.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], _like(weight, x), _like(bias, x), spec.norm_eps)
    return rms_normalized(x, weight, spec.norm_eps)


def rms_normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows of x [..., N], computed in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def _like(weight: Tensor | None, x: Tensor) -> Tensor | None:
    return None if weight is None else weight.to(x.dtype)
