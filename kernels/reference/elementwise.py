"""What the elementwise ops mean, in plain torch: float32 inside, rounded once at the end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def rms_norm(x: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight for x [T, C], the mean over C (arXiv 1910.07467).

    scale: what the result is multiplied by. float64 operands are computed in float64.
    """
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(y.dtype)
    return (y if scale == 1 else y * scale).to(x.dtype)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of the first R channels of x [T, H, D] by the angles of positions [T].

    cos, sin: [P, R/2], row p for position p. Column i turns channels i and i + R/2;
    channels from R on are copied. RoPE (arXiv 2104.09864) in the arrangement of GPT-NeoX.
    """
    width = 2 * cos.shape[1]
    turned, rest = wide(x[..., :width]), x[..., width:]
    c, s = (table[positions.long()][:, None].to(turned.dtype) for table in (cos, sin))
    a, b = turned.chunk(2, dim=-1)
    turned = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def resize_heads(
    x: Tensor, dim: int, to: int, *, first: int = 0, out: Tensor | None = None
) -> Tensor:
    """Return x [M, first + heads * dim] with heads of `to` channels: cut, or with zeros behind.

    first: columns before the heads, which stay as they are. out: [M, first + heads * to]; it may
    begin where x does.
    """
    heads = pad(x[:, first:].unflatten(1, (-1, dim)), (0, to - dim)).flatten(1)
    y = torch.cat((x[:, :first], heads), 1) if first else heads
    return y if out is None else out.copy_(y)


def wide(x: Tensor) -> Tensor:
    """x in the dtype that it is computed in: float64 stays, all else is float32."""
    return x if x.dtype == torch.float64 else x.float()
